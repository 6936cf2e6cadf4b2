"""Saving beside training: a copy at a step's end, which a thread of each rank then writes.

The ranks agree by collectives where a save begins and where it is waited for, both in the thread that trains; in
between by files (`records`). At most one save is under way, and its copy is the only extra memory.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megapipe.checkpoint.agreement import gathered, on_first_rank
from megapipe.checkpoint.directory import partial_folder, step_folder
from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.manifest import RunState
from megapipe.checkpoint.records import await_written, tell_failed, tell_written
from megapipe.checkpoint.save import (
    Content,
    Written,
    begin,
    contents_of,
    counts_of,
    discard,
    finish,
    manifest_of,
    write_share,
)
from megapipe.checkpoint.shards import Shard, shards_to_write
from megapipe.checkpoint.snapshot import Snapshot
from megapipe.checkpoint.storage import DISK, StorageWriter
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState


@dataclass(frozen=True)
class EndedSave:
    """What became of a save, as one rank sees it.

    seconds: from its beginning to where the next one may begin. error: why there is no such checkpoint, None where it
    is durable (rank 0) or this rank's share of it is (the others).
    """

    step: int
    path: Path
    seconds: float
    error: BaseException | None = None


class BackgroundSaver:
    """Saves of one run into one directory. The caller owns the directory, and all ranks see it.

    Whoever uses it calls `finish` before the process ends: what is not durable by then is lost.

    Attributes:
        waited: seconds that the last `start` waited for the save before it.
    """

    def __init__(
        self,
        directory: Path,
        mesh: Mesh,
        *,
        storage: StorageWriter = DISK,
        patience: float = 600.0,
        after: Callable[[], None] | None = None,
    ) -> None:
        """Nothing is allocated or written yet.

        patience: seconds that rank 0 waits while no rank writes anything. after: called on rank 0, in the thread that
        writes, once a checkpoint is durable.
        """
        self._directory = directory
        self._mesh = mesh
        self._storage = storage
        self._patience = patience
        self._after = after
        self._snapshot = Snapshot(pinned=mesh.device.type == "cuda")
        self._plan: list[Shard] | None = None
        self._planned: list[int] = []
        self._prepared = False
        self._job: _Job | None = None
        self._ended: list[EndedSave] = []
        self.waited = 0.0

    @property
    def under_way(self) -> bool:
        """Whether this rank still writes; on rank 0, whether any does."""
        return self._job is not None and self._job.running

    @property
    def snapshot_bytes(self) -> int:
        """Host memory that the copy takes on this rank."""
        return self._snapshot.num_bytes

    def plan(self, states: Sequence[UnitState]) -> None:
        """Share out the writing of these states, ahead of the first save. A collective call."""
        self._plan_of(states)

    def prepare(self) -> None:
        """Begin to allocate the memory of the copies for what was planned, once. No collective; to be called when
        optimizers have their moments."""
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
        within: float | None = None,
    ) -> Path:
        """Begin to save, and return where the checkpoint will be. A collective call; it waits for a save under way.

        Args:
            states, applied: as in `save`.
            copied: whether states may change once this has returned; otherwise not before `finish` has.
            within: seconds after which the save under way is given up, and this one with it.

        Raises:
            CheckpointError: the checkpoint exists, its folder cannot be made, or the save before it took too long. The
                same on every rank.
        """
        begun = time.perf_counter()
        if self._job is not None:
            self._job.join(within)
            self._collect()
        # Nobody begins while somebody still writes for the save before.
        gathered(self._mesh.world, lambda: self._give_up())
        self.waited = time.perf_counter() - begun
        plan = self._plan_of(states)
        on_first_rank(self._mesh.world, lambda: begin(self._storage, self._directory, run.step))
        if self._mesh.device.type == "cuda":
            # The thread reads on a stream of its own, which waits for nothing.
            torch.cuda.synchronize(self._mesh.device)
        contents = contents_of(plan)
        if copied:
            contents = self._snapshot.take(contents)
        path = step_folder(self._directory, run.step)
        counts = counts_of(plan, applied)
        self._job = _Job(run.step, path, lambda job: self._persist(job, run, contents, counts))
        return path

    def poll(self) -> list[EndedSave]:
        """The saves that have ended since the last call, oldest first. No collective."""
        self._collect()
        ended, self._ended = self._ended, []
        return ended

    def finish(self, within: float | None = None) -> None:
        """Return once the save under way is durable, on all ranks. A collective call.

        within: seconds after which it is given up; None waits as long as it takes.

        Raises:
            CheckpointError: it failed or was given up. The same on every rank.
        """
        self._snapshot.settle()
        job = self._job
        if job is None:
            return
        job.join(within)
        gathered(self._mesh.world, lambda: self._outcome(job))

    def abandon(self, patience: float) -> None:
        """Give the save under way `patience` seconds more, then give it up. No collective: peers may be gone."""
        if self._job is not None:
            self._job.join(patience)
            self._job.abandoned.set()

    def _plan_of(self, states: Sequence[UnitState]) -> list[Shard]:
        """This rank's share of the writing, found once. A collective call."""
        if self._plan is None or self._planned != [id(state) for state in states]:
            self._plan = shards_to_write(states, self._mesh.world)
            self._planned = [id(state) for state in states]
        return self._plan

    def _give_up(self) -> None:
        """Raise CheckpointError when this rank still writes."""
        job = self._job
        if job is not None and job.running:
            job.abandoned.set()
            raise CheckpointError(
                f"the save after step {job.step} was given up: it was not durable in the time that a signal leaves, "
                "checkpoint.signal_deadline_seconds; older checkpoints are untouched"
            )

    def _outcome(self, job: "_Job") -> None:
        self._give_up()
        if job.error is not None:
            raise job.error

    def _collect(self) -> None:
        job = self._job
        if job is not None and not job.told and not job.running:
            job.told = True
            self._ended.append(EndedSave(job.step, job.path, job.seconds, job.error))

    def _persist(self, job: "_Job", run: RunState, contents: Sequence[Content], counts: Mapping[str, int]) -> None:
        """What the thread does."""
        partial, rank = partial_folder(self._directory, run.step), self._mesh.rank
        try:
            written = write_share(self._storage, partial, rank, contents, counts)
            if rank:
                tell_written(self._storage, partial, rank, manifest_of(run, [written]))
                return
            others = await_written(self._storage, partial, self._mesh.world_size, self._patience, job.abandoned)
            shares = [written, *(Written(each.files, each.chunks, each.applied_updates) for each in others)]
            if job.abandoned.is_set():
                raise CheckpointError(f"{partial} was given up")
            finish(self._storage, self._directory, run, shares)
        except Exception as error:
            if rank:
                tell_failed(self._storage, partial, rank, error)
            else:
                discard(self._storage, partial)
            raise
        if self._after is not None:
            self._after()


@dataclass
class _Job:
    """One save on one rank, in a thread that does not keep the process alive.

    abandoned: whether it was given up; it then ends as soon as it notices. told: whether `poll` has its end.
    """

    step: int
    path: Path
    work: Callable[["_Job"], None]
    error: BaseException | None = None
    seconds: float = 0.0
    told: bool = False
    abandoned: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._begun = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name=f"checkpoint of step {self.step}", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self.work(self)
        except BaseException as error:
            # Who waits for it raises it, or tells of it.
            self.error = error
        self.seconds = time.perf_counter() - self._begun
