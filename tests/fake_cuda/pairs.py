"""Which kernels of one half of a pair wait for a collective of the other half.

A kernel waits for a collective if the order of its stream and the events that streams wait for say so, directly or
through other operations. Two things are left out: a communicator runs its operations one after another, so a half
whose collective is queued after one of the other half waits for that too where both have one communicator; and the
host launches nothing while it reads from the device, as experts do.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megapipe.engine.program import Instruction
from megapipe.engine.step import StepState
from megapipe.schedules.actions import Kind, pairs_of
from megapipe.schedules.schedule import Schedule
from tests.fake_cuda.communicators import Communicator
from tests.fake_cuda.mode import Watch
from tests.fake_cuda.timeline import Memory, Place, Timeline

Half = tuple[int, int, int]
"""(step, number of the pair, 0 for its forward or 1 for its backward)."""


@dataclass
class Pair:
    """Counts of each half, forward first: kernels, collectives, and kernels that wait for the other half."""

    kernels: list[int]
    collectives: list[int]
    waiting: list[int]


class _Clock(dict[int, int]):
    """An event. after: collectives that have ended when it comes."""

    after: frozenset[tuple[Half, int]] = frozenset()


class Order:
    """Notes the launches of every pair whose instructions are marked.

    pairs: by (step, number of the pair).
    """

    def __init__(self, timeline: Timeline, watch: Watch) -> None:
        self.pairs: dict[tuple[int, int], Pair] = {}
        self._after: dict[int, frozenset[tuple[Half, int]]] = {}
        self._here = threading.local()
        self._backward: Half | None = None
        self._number = 0
        self._watch = watch
        self._record, self._follow, self._launch = timeline.record, timeline.follow, watch._launch
        timeline.record, timeline.follow = self._recorded, self._followed  # type: ignore[method-assign]
        watch._launch = self._launched  # type: ignore[method-assign]
        for name in ("collective", "point_to_point"):
            setattr(Communicator, name, self._without_queue(getattr(Communicator, name)))

    def _without_queue(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """Leave out what a communicator's queue adds: its own stream forgets what came before."""

        def started(group: Communicator, *arguments: Any) -> Any:
            self._after[group.stream] = frozenset()
            return start(group, *arguments)

        return started

    def marks(self, schedule: Schedule, rank: int) -> Callable[[Instruction], Instruction]:
        """Return a function that lets an instruction of a rank note what its half launches."""
        actions = list(schedule.actions("body", rank))
        halves: dict[Any, tuple[int, int]] = {}
        for number, first in enumerate(pairs_of(actions)):
            for action in actions[first : first + 2]:
                halves[action[:4]] = number, int(action.kind != Kind.FORWARD)

        def marked(instruction: Instruction) -> Instruction:
            if instruction.action[:4] not in halves:
                return instruction
            number, half = halves[instruction.action[:4]]

            def run(step: StepState) -> None:
                self._here.half = own = (step.input.step, number, half)
                if half:
                    self._backward = own
                try:
                    instruction.run(step)
                finally:
                    self._here.half = None
                    if half:
                        self._backward = None

            return replace(instruction, run=run)

        return marked

    def _launched(
        self,
        name: str,
        reads: Sequence[Memory],
        writes: Sequence[Memory],
        moved: int,
        stream: int | None = None,
        at: Place | None = None,
    ) -> None:
        self._launch(name, reads, writes, moved, stream, at)
        stream = self._watch.device.current if stream is None else stream
        of_autograd = isinstance(threading.current_thread(), threading._DummyThread)
        half = self._backward if of_autograd else getattr(self._here, "half", None)
        if half is None:
            return
        *number, own = half
        pair = self.pairs.setdefault((number[0], number[1]), Pair([0, 0], [0, 0], [0, 0]))
        after = self._after.get(stream, frozenset())
        is_collective = name.startswith("nccl ")
        (pair.collectives if is_collective else pair.kernels)[own] += 1
        pair.waiting[own] += any(each == (*number, 1 - own) for each, _ in after)
        if is_collective:
            self._number += 1
            self._after[stream] = after | {(half, self._number)}

    def _recorded(self, stream: int) -> _Clock:
        event = _Clock(self._record(stream))
        event.after = self._after.get(stream, frozenset())
        return event

    def _followed(self, stream: int, event: dict[int, int]) -> None:
        self._follow(stream, event)
        self._after[stream] = self._after.get(stream, frozenset()) | getattr(event, "after", frozenset())
