"""Saving while training continues: a copy at the end of a step, which a thread of each rank then writes.

Ranks agree by collectives when a save starts and when it ends, both in the training thread. In between, a rank reports
a durable file to rank 0 by a file in the checkpoint's folder, because collectives of another thread would interleave
with the collectives of training in no fixed order. `rank-00001.json` means that the rank's tensor file is durable. It
is a manifest of this tensor file only, and is renamed to this name when it is complete.

A failed disk may reject any file, so a failure is reported through the flag `failed`: the caller sums this flag with
the other sums of a step, and all ranks then call `finish`, which exchanges the reasons. At most one save is in
progress, and its copy is the only additional memory.
"""

import contextlib
import math
import mmap
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megapipe.checkpoint.directory import discard, partial_folder, step_folder
from megapipe.checkpoint.manifest import Manifest, RunState, encoded, read_manifest_file
from megapipe.checkpoint.save_and_load import (
    Content,
    begin,
    contents_of,
    finish,
    part_without_file,
    write_rank_file,
)
from megapipe.checkpoint.shards import Shard, shards_to_write
from megapipe.checkpoint.storage import (
    DISK,
    CheckpointError,
    StorageWriter,
    agreed,
    as_all_ranks_raise_it,
    on_first_rank,
    write_file,
    writing,
)
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState

_FIRST_PAUSE = 0.002
_LONGEST_PAUSE = 0.5
"""Longest pause between two checks of the folder, in seconds."""


def report_written(storage: StorageWriter, partial: Path, rank: int, manifest: Manifest) -> None:
    """Report that this rank's part is durable. manifest: the manifest of this part only. Raises CheckpointError.

    The rename is the last operation: after it, rank 0 may rename the whole folder.
    """
    path = _report_path(partial, rank)
    incomplete = path.with_name(f"{path.name}.partial")
    with writing(partial, verb="write into"):
        write_file(storage, incomplete, encoded(manifest))
        storage.rename(incomplete, path)


def await_written(
    storage: StorageWriter, partial: Path, size: int, patience: float, abandoned: threading.Event
) -> list[Manifest]:
    """Return the manifests of all ranks except 0, in rank order, and remove the files that contain them.

    Args:
        size: number of ranks of the world.
        patience: seconds to wait while no file in the folder grows.
        abandoned: set when the save is abandoned, or has failed on another rank.

    Raises:
        CheckpointError: no file grew for `patience` seconds, or `abandoned` was set.
    """
    manifests: dict[int, Manifest] = {}
    pause, last_total, since = _FIRST_PAUSE, -1, time.monotonic()
    while True:
        sizes = _sizes(partial)
        for rank in set(range(1, size)) - manifests.keys():
            if _report_path(partial, rank).name in sizes:
                manifests[rank] = read_manifest_file(_report_path(partial, rank))
        if len(manifests) == size - 1:
            break
        now, total = time.monotonic(), len(sizes) + sum(sizes.values())
        if total != last_total:
            last_total, since = total, now
        if now - since > patience:
            missing = ", ".join(str(rank) for rank in range(1, size) if rank not in manifests)
            raise CheckpointError(
                f"rank {missing} wrote nothing into {partial} for {patience:g} s; all ranks "
                "need this folder; if it is slow, raise parallel.timeout_seconds"
            )
        if abandoned.wait(pause):
            raise CheckpointError(f"the save into {partial} was abandoned")
        pause = min(2 * pause, _LONGEST_PAUSE)
    for rank in range(1, size):
        storage.remove(_report_path(partial, rank))
    return [manifests[rank] for rank in range(1, size)]


def _sizes(partial: Path) -> dict[str, int]:
    """Return the size of each file in bytes; it grows while a rank writes the file."""
    sizes = {}
    for entry in os.scandir(partial):
        try:
            sizes[entry.name] = entry.stat().st_size
        except FileNotFoundError:
            continue
    return sizes


def _report_path(partial: Path, rank: int) -> Path:
    return partial / f"rank-{rank:05d}.json"


_FIRST_SLICE = 0.01
_LONGEST_SLICE = 1.0
"""Longest time in seconds that a rank waits for its own thread before the ranks compare their progress. It is far
below the timeout of a collective, so that a slow disk of one rank never looks like a lost peer."""


@dataclass(frozen=True)
class EndedSave:
    """The result of a save on one rank.

    seconds: time from its start until the next save may start. error: the reason why the save failed; None if the
    checkpoint (on rank 0) or this rank's part of it (on other ranks) is durable.
    """

    step: int
    path: Path
    seconds: float
    error: BaseException | None = None


@dataclass(eq=False)
class BackgroundSaver:
    """Saves checkpoints of one run in the background. Rank 0 must hold the directory's lock; all ranks must see the
    directory.

    The caller must call `finish` before the process ends, because a save that is not durable by then is lost. A new
    saver does not allocate or write anything yet.

    patience: seconds that rank 0 waits while no rank writes. after: called on rank 0, in the writing thread, when a
    checkpoint is durable.

    Attributes:
        waited: seconds that the last `start` waited for the previous save.
    """

    directory: Path
    mesh: Mesh
    _: KW_ONLY
    storage: StorageWriter = DISK
    patience: float = 300.0
    after: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self._snapshot = Snapshot(pinned=self.mesh.device.type == "cuda")
        self._plan: list[Shard] | None = None
        self._planned_ids: list[int] = []
        self._prepared = False
        self._copying: StateSnapshot | None = None
        self._untaken: StateSnapshot | None = None
        self._job: _Job | None = None
        self._ended: list[EndedSave] = []
        self.waited = 0.0

    @property
    def under_way(self) -> bool:
        """Whether this rank is still writing; on rank 0, whether any rank is."""
        return self._job is not None and self._job.running

    @property
    def failed(self) -> bool:
        """True if this rank's part of the save has failed and `finish` has not reported this to all ranks yet."""
        job = self._job
        return job is not None and not job.agreed and not job.running and job.error is not None

    def plan(self, states: Sequence[UnitState]) -> list[Shard]:
        """Divide the writing of these states among the ranks, once, and return the shards that this rank writes. A
        collective call."""
        if self._plan is None or self._planned_ids != [id(state) for state in states]:
            self._plan = shards_to_write(states, self.mesh.world)
            self._planned_ids = [id(state) for state in states]
        return self._plan

    def prepare(self) -> None:
        """Start allocating memory for the copies of the planned states, once. Not a collective call.

        Call it after the optimizers have allocated their moments.
        """
        if self._plan is not None and not self._prepared:
            self._prepared = True
            self._snapshot.prepare(contents_of(self._plan))

    def start(
        self,
        states: Sequence[UnitState],
        applied: Mapping[str, int],
        run: RunState,
        *,
        copied: bool = True,
        by_step: bool = False,
        timeout: float | None = None,
    ) -> Path:
        """Start a save, and return the checkpoint's path. A collective call; it waits for a save in progress.

        Args:
            states, applied: see `save`.
            copied: whether states may change after this call returns; if False, they may change only after `finish`
                returns.
            by_step: let the next step make the copy, which it gets from `take_snapshot`: a state may change after
                `StateSnapshot.wait` returns for it, and all states after `finish`.
            timeout: seconds after which the save in progress is abandoned, together with this one.

        Raises:
            CheckpointError: the checkpoint exists, its folder cannot be created, there is too little memory for the
                copy, or the previous save took too long. Every rank raises the same error. If the previous save
                failed, `poll` returns the failure.
        """
        started = time.perf_counter()
        error = self._settle(timeout)
        if error is not None and self._job is not None and not self._job.agreed:
            raise error
        self.waited = time.perf_counter() - started
        plan = self.plan(states)
        world = self.mesh.world
        on_first_rank(world, lambda: begin(self.storage, self.directory, run.step))
        if self.mesh.device.type == "cuda" and not by_step:
            # The writing thread reads the states on another stream, which does not wait for the current stream.
            torch.cuda.synchronize(self.mesh.device)
        contents = contents_of(plan)
        copying = agreed(world, lambda: self._copies(plan, by_step)) if copied else None
        self._copying = self._untaken = copying if by_step else None
        path = step_folder(self.directory, run.step)
        part = part_without_file(plan, applied, run)

        def work(job: _Job) -> None:
            self._persist(job, part, lambda: contents if copying is None else copying.whole(job.abandoned))

        self._job = _Job(run.step, path, work)
        return path

    def take_snapshot(self) -> "StateSnapshot | None":
        """Return the copies that the next step has to make, None if there are none. Not a collective call."""
        copying, self._untaken = self._untaken, None
        return copying

    def _copies(self, plan: Sequence[Shard], by_step: bool) -> "StateSnapshot":
        """Return the copies of the planned shards. by_step: the next step makes them; otherwise they are made now."""
        sources = [(id(each.state), part) for each in plan for part in contents_of([each])]
        copies = self._snapshot.places([content for _, content in sources])
        moves = defaultdict[int, list[tuple[Tensor, Tensor]]](list)
        for (state, content), place in zip(sources, copies, strict=True):
            moves[state].append((place.tensor.values, content.tensor.values.detach()))
        snapshot = StateSnapshot(copies, moves)
        if not by_step:
            snapshot.complete()
        return snapshot

    def poll(self) -> list[EndedSave]:
        """Return the saves that have ended since the last call, oldest first. Not a collective call."""
        self._collect()
        ended, self._ended = self._ended, []
        return ended

    def finish(self, timeout: float | None = None) -> None:
        """Wait until the save in progress is durable on all ranks. A collective call.

        timeout: seconds after which the save is abandoned; None waits without a limit.

        Raises:
            CheckpointError: the save failed on a rank, or was abandoned. Every rank raises the same error, once.
        """
        self._snapshot.settle()
        error = self._settle(timeout)
        if error is not None:
            raise error

    def abandon(self, patience: float) -> None:
        """Wait `patience` seconds for the save in progress, then abandon it. Not a collective call: peers may have
        ended."""
        if self._job is not None:
            with contextlib.suppress(RuntimeError):  # the device may have failed
                self._complete_copy()
            self._job.join(patience)
            self._job.abandoned.set()

    def _complete_copy(self) -> None:
        """Make the copies that no step has made."""
        copying, self._copying, self._untaken = self._copying, None, None
        if copying is not None:
            copying.complete()

    def _settle(self, timeout: float | None) -> CheckpointError | None:
        """Wait until the save in progress has ended on all ranks, or the time is up. Return its error. A collective
        call.

        If the time is up, the save is abandoned, but a rank may still be writing, and its job is not `agreed`.
        """
        self._complete_copy()
        job, error = self._job, None
        if job is None or job.agreed:
            return error
        deadline = math.inf if timeout is None else time.perf_counter() + timeout
        pause = _FIRST_SLICE
        while True:
            job.join(max(0.0, min(pause, deadline - time.perf_counter())))
            pause = min(2 * pause, _LONGEST_SLICE)
            mine = _Progress.of(job, self.mesh, deadline)
            ranks: list[_Progress] = self.mesh.world.all_gather_object(mine)
            failure = next((each.failure for each in ranks if each.failure is not None), None)
            if error is None and failure is not None:
                error = CheckpointError(failure)
                job.give_up(error)  # rank 0 stops waiting for the others
            if not any(each.running for each in ranks):
                job.agreed = True
                if error is not None and self.mesh.rank == 0:
                    # Another rank may have written into the folder while rank 0's failed thread removed it.
                    discard(self.storage, partial_folder(self.directory, job.step))
                break
            if any(each.late for each in ranks):
                error = error or CheckpointError(
                    f"the save after step {job.step} was abandoned: it was not durable within "
                    "checkpoint.signal_deadline_seconds; older checkpoints are untouched"
                )
                job.give_up(error)
                break
        self._collect()
        return error

    def _collect(self) -> None:
        job = self._job
        if job is not None and not job.reported and not job.running:
            job.reported = True
            self._ended.append(EndedSave(job.step, job.path, job.seconds, job.error))

    def _persist(self, job: "_Job", part: Manifest, contents: Callable[[], Sequence[Content]]) -> None:
        """Write this rank's part in the thread; on rank 0, also complete the checkpoint.

        part: see `part_without_file`. contents: waits until the contents are copied, and returns them.
        """
        partial, rank = partial_folder(self.directory, job.step), self.mesh.rank
        if rank:
            part = write_rank_file(self.storage, partial, rank, part, contents())
            report_written(self.storage, partial, rank, part)
            return
        try:
            parts = [write_rank_file(self.storage, partial, rank, part, contents())]
            parts += await_written(self.storage, partial, self.mesh.world_size, self.patience, job.abandoned)
            if job.abandoned.is_set():
                raise CheckpointError(f"the save into {partial} was abandoned")
            finish(self.storage, self.directory, parts)
        except Exception:
            discard(self.storage, partial)
            raise
        if self.after is not None:
            self.after()


@dataclass(frozen=True)
class _Progress:
    """Progress of one rank. failure: the reason why its part failed. late: whether its deadline has passed."""

    running: bool
    failure: str | None
    late: bool

    @classmethod
    def of(cls, job: "_Job", mesh: Mesh, deadline: float) -> "_Progress":
        """Return the progress of this rank. Raises the error that ended the thread if it is not an Exception."""
        running = job.running
        error = None if running else job.error
        if error is not None and not isinstance(error, Exception):
            raise error
        # The error of another rank already names that rank.
        failure = None if error is None or error is job.reason else str(as_all_ranks_raise_it(error, mesh.world))
        return cls(running, failure, time.perf_counter() >= deadline)


@dataclass
class _Job:
    """One save on one rank, in a thread that does not keep the process alive.

    abandoned: set when the save is abandoned; the thread then ends at its next check. reason: the error, if the ranks
    have agreed on one. agreed: all ranks know its result. reported: its result is in the list that `poll` returns.
    """

    step: int
    path: Path
    work: Callable[["_Job"], None]
    error: BaseException | None = None
    reason: CheckpointError | None = None
    seconds: float = 0.0
    agreed: bool = False
    reported: bool = False
    abandoned: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._start = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name=f"checkpoint of step {self.step}", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def give_up(self, reason: CheckpointError) -> None:
        """Let the thread end without a checkpoint if it is still running."""
        self.reason = reason
        self.abandoned.set()

    def _run(self) -> None:
        try:
            self.work(self)
        except BaseException as error:
            # The error is raised by `finish` or reported by `poll`.
            given_up = self.reason is not None and isinstance(error, Exception)
            self.error = self.reason if given_up else error
        self.seconds = time.perf_counter() - self._start


Moves = Sequence[tuple[Tensor, Tensor]]
"""(target, source): pairs of tensors of one shape and dtype."""


class StartedCopy(Protocol):
    """Copies that were started together; see `megapipe.engine.host_memory.Copy`."""

    def wait(self) -> None: ...

    def synchronize(self) -> None: ...


class CopyLane(Protocol):
    """Copies in one direction, in the order of their starts; see `megapipe.engine.host_memory.CopyStream`."""

    def start(self, moves: Moves) -> StartedCopy: ...


class StateSnapshot:
    """The copies of one save, unit by unit: the next step starts them, and an update waits for the copy of its unit,
    unless `complete` makes all of them first.

    This is the first phase of CheckFreq (Mohan et al., FAST 2021, section 4.1). `complete` makes all copies that the
    step has not started.
    """

    def __init__(self, contents: Sequence[Content], moves: Mapping[int, Moves]) -> None:
        """contents: the copies, once they are made. moves: the copies to make for each state, by its id."""
        self._contents = contents
        self._missing = dict(moves)
        self._started: dict[int, StartedCopy] = {}
        self._all_started = threading.Event()
        self._check_all_started()

    def start(self, state: UnitState, lane: CopyLane) -> None:
        """Start copying a state, unless this rank saves nothing of it or its copy has already started."""
        if id(state) in self._missing:
            self._started[id(state)] = lane.start(self._missing.pop(id(state)))
            self._check_all_started()

    def wait(self, state: UnitState) -> None:
        """Wait until the state may change. If its copy has not started, it is made now."""
        self._copy_now([id(state)])
        if id(state) in self._started:
            self._started[id(state)].wait()

    def complete(self) -> None:
        """Make the copies that have not started. States have not changed since, because updates call `wait`."""
        self._copy_now(list(self._missing))

    def whole(self, abandoned: threading.Event) -> Sequence[Content]:
        """Return the contents once all copies are done; called by the thread that writes them.

        Raises CheckpointError if the save is abandoned before all copies have started.
        """
        while not self._all_started.wait(_LONGEST_PAUSE):
            if abandoned.is_set():
                raise CheckpointError("the save was abandoned before its copy was complete")
        for copy in list(self._started.values()):
            copy.synchronize()
        return self._contents

    def _copy_now(self, states: Iterable[int]) -> None:
        devices = set()
        for target, source in (move for state in states for move in self._missing.pop(state, ())):
            target.copy_(source, non_blocking=True)
            devices.add(source.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self._check_all_started()

    def _check_all_started(self) -> None:
        if not self._missing:
            self._all_started.set()


_ALIGNMENT = 64
"""Bytes of a cache line, a multiple of every element size."""

_TOUCHED_AT_ONCE = 1 << 26
"""Bytes whose pages one operation touches, few enough that torch stays in the calling thread."""


class Snapshot:
    """Host memory that is allocated once and contains one copy at a time: the only additional memory of a background
    save.

    pinned: whether the memory is page-locked, so that a GPU copies into it asynchronously.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._allocation: threading.Thread | None = None

    @property
    def num_bytes(self) -> int:
        """Number of allocated bytes."""
        return self._memory.numel()

    def prepare(self, contents: Sequence[Content]) -> None:
        """Allocate the memory for these contents in the background. `places` waits for it.

        The first touch of its pages takes several times as long as a copy.
        """
        self.settle()
        _, num_bytes = _places(contents)
        if num_bytes > self.num_bytes:
            self._allocation = threading.Thread(
                target=self._allocate_or_leave, args=(num_bytes,), name="memory for checkpoints", daemon=True
            )
            self._allocation.start()

    def settle(self) -> None:
        """Wait until the allocation in the background has finished."""
        if self._allocation is not None:
            self._allocation.join()
            self._allocation = None

    def places(self, contents: Sequence[Content]) -> list[Content]:
        """Return `contents` with views of the copy's memory, which contains the previous copy or is uninitialized."""
        self.settle()
        starts, end = _places(contents)
        if end > self.num_bytes:
            self._allocate(end)
        return [self._placed(*each) for each in zip(contents, starts, strict=True)]

    def _placed(self, content: Content, start: int) -> Content:
        place: Tensor = self._memory[start : start + content.tensor.num_bytes].view(content.tensor.values.dtype)
        return replace(content, tensor=replace(content.tensor, values=place))

    def _allocate(self, num_bytes: int) -> None:
        # The old memory is freed first, so that there are never two copies.
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._memory = (
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) if self._pinned else _pages(num_bytes)
        )

    def _allocate_or_leave(self, num_bytes: int) -> None:
        """Allocate in the thread. If there is too little memory, `places` tries again and raises the error."""
        with contextlib.suppress(MemoryError, OSError, RuntimeError):
            self._allocate(num_bytes)
        for part in self._memory.split(_TOUCHED_AT_ONCE):
            part[:: mmap.PAGESIZE].zero_()


def _places(contents: Sequence[Content]) -> tuple[list[int], int]:
    """Return the offset of each content, and the total number of bytes."""
    starts, end = [], 0
    for content in contents:
        starts.append(end)
        end += -(-content.tensor.num_bytes // _ALIGNMENT) * _ALIGNMENT
    return starts, end


def _pages(num_bytes: int) -> Tensor:
    """Return host memory in huge pages if the system has them: the first touch then causes fewer page faults."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not on Linux
        return torch.empty(num_bytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel was built without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
