"""A loop over the same actions that sleeps and moves tensors and does nothing else: no autograd, no state."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megapipe.engine.wiring import LinkPool
from megapipe.parallel.links import Edge, Link, Transfer
from megapipe.schedules import Schedule
from megapipe.schedules.actions import Action, Kind
from pipeline_contest.setting import Setting, Step

_SLEEPS = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 1}


def bare_loop(setting: Setting, schedule: Schedule, pool: LinkPool) -> Step:
    """One step of the bare loop."""
    loop = _Loop(setting, schedule, pool)
    closures = [loop.closure(action) for action in schedule.actions("body", setting.rank)]

    def step() -> None:
        for closure in closures:
            closure()
        loop.finish()

    return step


class _Loop:
    """The links, buffers and transfers of a rank."""

    def __init__(self, setting: Setting, schedule: Schedule, pool: LinkPool) -> None:
        self._setting = setting
        header = schedule.header
        edges = _edges(schedule, setting.x.nbytes)
        made = pool.links([edge for pair in edges.values() for edge in pair])
        mine = set(header.stages_on(setting.rank))
        self._links: dict[tuple[Kind, int], Link] = {}
        for (stage, following), (activation, gradient) in edges.items():
            if stage in mine:
                self._links[Kind.SEND_ACTIVATION, stage] = made[activation]
                self._links[Kind.RECV_GRADIENT, stage] = made[gradient]
            if following in mine:
                self._links[Kind.RECV_ACTIVATION, following] = made[activation]
                self._links[Kind.SEND_GRADIENT, following] = made[gradient]
        self._buffers: dict[tuple[Kind, int], list[Tensor]] = {}
        for kind, slots in (
            (Kind.RECV_ACTIVATION, header.activation_slots),
            (Kind.RECV_GRADIENT, header.gradient_slots),
        ):
            for stage in mine:
                self._buffers[kind, stage] = [torch.empty_like(setting.x) for _ in range(slots[stage])]
        self._receives: dict[tuple[Kind, int, int], Transfer] = {}
        self._sends: list[Transfer] = []

    def closure(self, action: Action) -> Callable[[], None]:
        """What the loop does for an action."""
        kind, stage, slot = action.kind, action.stage, action.slot
        if kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
            link, x = self._links[kind, stage], self._setting.x
            return lambda: self._sends.append(link.send(x))
        if kind in (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT):
            link, buffer = self._links[kind, stage], self._buffers[kind, stage][slot]
            return lambda: self._receives.update({(kind, stage, slot): link.receive(buffer)})
        times, awaited = _SLEEPS.get(kind, 0), None
        if slot >= 0 and times:
            awaited = (Kind.RECV_ACTIVATION if kind == Kind.FORWARD else Kind.RECV_GRADIENT, stage, slot)
        return lambda: self._compute(times, awaited)

    def _compute(self, times: int, awaited: tuple[Kind, int, int] | None) -> None:
        if awaited is not None:
            self._receives.pop(awaited).wait()
        began = time.thread_time()
        for _ in range(times):
            self._setting.meter.sleep(self._setting.seconds)
        self._setting.meter.processor += time.thread_time() - began

    def finish(self) -> None:
        """Await what was sent."""
        for transfer in self._sends:
            transfer.wait()
        self._sends.clear()


def _edges(schedule: Schedule, num_bytes: int) -> Mapping[tuple[int, int], Sequence[Edge]]:
    """The same edges as the engine's, so that both use the same links."""
    crossings = [
        (stage, following)
        for stage, following in itertools.pairwise(schedule.header.routes[0])
        if schedule.rank_of(stage) != schedule.rank_of(following)
    ]
    return {
        (stage, following): (
            Edge(schedule.rank_of(stage), schedule.rank_of(following), 2 * index, num_bytes),
            Edge(schedule.rank_of(following), schedule.rank_of(stage), 2 * index + 1, num_bytes),
        )
        for index, (stage, following) in enumerate(crossings)
    }
