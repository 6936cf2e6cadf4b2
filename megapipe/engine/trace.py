"""Records the actual execution on each rank: when it reaches an action, how long it waits within it, and when it is
done.

The engine compiles its schedule a second time, over receive slots and groups that report every wait to a stopwatch.
Recorded steps run that program; all others run the first one, which has no code for recording.
"""

import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import sub
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from megapipe.engine.forwards import Closure
from megapipe.engine.host_memory import WatchedWork
from megapipe.engine.program import Instruction
from megapipe.engine.step import StepState
from megapipe.engine.transfers import ReceiveSlots, Transfers
from megapipe.parallel.groups import Group, ReduceOperation, Work, awaited_unless
from megapipe.schedules.actions import Kind, short_word
from megapipe.schedules.measured.traces import Event
from megapipe.schedules.schedule import SECTIONS, Schedule, SectionName

ROUNDS: Final = 32
"""Number of barriers for an estimate of the offset between two hosts' clocks. The first one, which opens connections,
does not count."""


class HostClock:
    """Host times, for ranks on a CPU. `mark` returns a mark for the current time, and `nanoseconds` its time on the
    scale of time.perf_counter_ns."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def nanoseconds(self, mark: int) -> int:
        return mark


class DeviceClock:
    """Times of the current stream of a GPU, as HostClock: when the device reaches a mark, not when the host launched
    it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._origin = self.mark()
        torch.cuda.synchronize(device)
        self._origin_nanoseconds = time.perf_counter_ns()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def nanoseconds(self, mark: torch.cuda.Event) -> int:
        mark.synchronize()
        return self._origin_nanoseconds + round(self._origin.elapsed_time(mark) * 1e6)


Clock = HostClock | DeviceClock


@dataclass(frozen=True)
class ClockOffset:
    """The offset of this rank's clock from rank 0's, in nanoseconds, with an uncertainty of `error`.

    leads_host: this is the first rank on its host.
    """

    nanoseconds: int
    error: int
    leads_host: bool


def this_host() -> str:
    """Return a name that is the same for ranks with the same time.perf_counter_ns: it identifies the host and its
    boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else platform.node()


def clock_offset(
    world: Group, host: str | None = None, clock: Callable[[], int] = time.perf_counter_ns
) -> ClockOffset:
    """Compare the hosts' clocks. A collective call over all ranks, during which the group has no other work in
    progress.

    Ranks of one host read the same clock. All ranks leave a barrier at the same time, so the offset of two hosts is
    the median difference of the times at which their first ranks leave barriers. The error is half of the
    interquartile range.
    """
    host = this_host() if host is None else host
    hosts = world.all_gather_object(host)
    leader = hosts.index(host)
    leads = leader == world.rank
    if len(set(hosts)) == 1:
        return ClockOffset(0, 0, leads)
    left = []
    for _ in range(ROUNDS + 1):
        world.barrier()
        left.append(clock())
    everyone = world.all_gather_object(left[1:])
    differences = map(sub, everyone[leader], everyone[0])
    lower, middle, upper = statistics.quantiles(differences, n=4)
    return ClockOffset(round(middle), round((upper - lower) / 2), leads)


Result = TypeVar("Result")


class Stopwatch:
    """Collects the waits within the current action, on its own thread. Hidden sums, which other threads wait for, are
    not counted."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._thread = threading.get_ident()
        self._waits: list[tuple[Any, Any]] = []

    def wait(self, function: Callable[[], Result]) -> Result:
        """Call a function that waits. Such calls are not nested."""
        if threading.get_ident() != self._thread:
            return function()
        start = self._clock.mark()
        result = function()
        self._waits.append((start, self._clock.mark()))
        return result

    def take(self) -> list[tuple[Any, Any]]:
        """Return the waits since the last call."""
        waits, self._waits = self._waits, []
        return waits


class _Note(NamedTuple):
    """A recorded action; its marks are read after the run."""

    section: SectionName
    step: int
    position: int
    start: Any
    waits: list[tuple[Any, Any]]
    end: Any


class Recorder:
    """Records how one rank runs the actions of a schedule, after `Engine.record(recorder)`.

    Create it on the thread that runs the engine, directly before the recorded steps: times of a GPU count from its
    creation.

    Attributes:
        stopwatch: measures the waits.
    """

    def __init__(self, schedule: Schedule, rank: int, device: torch.device) -> None:
        """Create a recorder without events. rank: pipeline rank."""
        self._schedule = schedule
        self._rank = rank
        self._clock: Clock = DeviceClock(device) if device.type == "cuda" else HostClock()
        self.stopwatch = Stopwatch(self._clock)
        self._notes: list[_Note] = []

    def events(self, clock_offset: int = 0) -> list[Event]:
        """Return the recorded events in order. clock_offset: to subtract from this rank's times, in nanoseconds."""
        slices = self._schedule.header.slices
        words = {
            section: [short_word(action, slices) for action in self._schedule.actions(section, self._rank)]
            for section in SECTIONS
        }
        read = self._clock.nanoseconds
        return [
            Event(
                note.section,
                note.step,
                note.position,
                words[note.section][note.position],
                read(note.start) - clock_offset,
                sum(read(end) - read(start) for start, end in note.waits),
                read(note.end) - clock_offset,
            )
            for note in self._notes
        ]

    def transfers(self, transfers: Transfers) -> Transfers:
        """Return the boundaries with receives whose waits the stopwatch measures."""

        def watched(every: dict[int, ReceiveSlots]) -> dict[int, ReceiveSlots]:
            return {stage: _WatchedSlots(slots, self.stopwatch) for stage, slots in every.items()}

        return replace(
            transfers,
            receive_activation=watched(transfers.receive_activation),
            receive_gradient=watched(transfers.receive_gradient),
            shards={stage: replace(each, group=self.group(each.group)) for stage, each in transfers.shards.items()},
        )

    def group(self, group: Group) -> Group:
        """Return the group with collectives whose waits the stopwatch measures."""
        return _WatchedGroup(group, self.stopwatch)

    def instructions(self, section: SectionName, instructions: Iterable[Instruction]) -> list[Instruction]:
        """Return the instructions, extended to record their times."""
        return [replace(each, run=self._noted(each, section)) for each in instructions]

    def _noted(self, instruction: Instruction, section: SectionName) -> Closure:
        run, offset, number = instruction.run, instruction.offset, instruction.number
        mark, stopwatch, notes = self._clock.mark, self.stopwatch, self._notes
        updates = instruction.action.kind == Kind.UPDATE and self._schedule.header.updates_per_step == 1

        def noted(step: StepState) -> None:
            stopwatch.take()
            start = mark()
            if updates and step.scalars is not None:
                stopwatch.wait(step.scalars.result)
            run(step)
            notes.append(_Note(section, step.input.step - offset, number, start, stopwatch.take(), mark()))

        return noted


class _WatchedSlots(ReceiveSlots):
    """Receive slots whose waits are measured."""

    def __init__(self, slots: ReceiveSlots, stopwatch: Stopwatch) -> None:
        self._slots = slots
        self._stopwatch = stopwatch

    def post(self, slot: int, part: int = 0) -> None:
        self._slots.post(slot, part)

    def take(self, slot: int) -> tuple[Tensor, ...]:
        return self._stopwatch.wait(lambda: self._slots.take(slot))

    def release(self) -> None:
        self._slots.release()

    def without_peer(self) -> ReceiveSlots:
        return self._slots.without_peer()


class _WatchedGroup(Group):
    """A group whose waits are measured: waits for asynchronous collectives, and synchronous collectives as a whole."""

    def __init__(self, group: Group, stopwatch: Stopwatch) -> None:
        super().__init__(group.name, group.ranks, group.rank)
        self._group = group
        self._stopwatch = stopwatch

    def all_reduce(self, tensor: Tensor, op: ReduceOperation = "sum", async_op: bool = False) -> Work:
        work = self._group.all_reduce(tensor, op, async_op=True)
        return awaited_unless(async_op, WatchedWork(work, self._stopwatch.wait))

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._stopwatch.wait(lambda: self._group.all_gather(tensor))

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        return self._stopwatch.wait(lambda: self._group.reduce_scatter(tensor))

    def gather_into(self, whole: Tensor, part: Tensor) -> Work:
        return WatchedWork(self._group.gather_into(whole, part), self._stopwatch.wait)

    def reduce_into_part(self, whole: Tensor) -> Work:
        return WatchedWork(self._group.reduce_into_part(whole), self._stopwatch.wait)

    def broadcast(self, tensor: Tensor, source: int, async_op: bool = False) -> Work:
        work = self._group.broadcast(tensor, source, async_op=True)
        return awaited_unless(async_op, WatchedWork(work, self._stopwatch.wait))

    def shift(self, tensor: Tensor, into: Tensor) -> Work:
        return WatchedWork(self._group.shift(tensor, into), self._stopwatch.wait)

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._stopwatch.wait(lambda: self._group.all_gather_object(value))

    def barrier(self) -> None:
        self._stopwatch.wait(self._group.barrier)
