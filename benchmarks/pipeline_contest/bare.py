"""A loop over the same actions that sleeps and moves tensors and does nothing else: no autograd, no state."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from megapipe.engine.stage import TensorSpec
from megapipe.engine.transfers import Boundary, ReceiveSlots, Sender, receive_slots
from megapipe.engine.wiring import LinkPool
from megapipe.parallel.links import Edge
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
    """The links of a rank, with the engine's own slots and senders over them: what a link can do is used."""

    def __init__(self, setting: Setting, schedule: Schedule, pool: LinkPool) -> None:
        self._setting = setting
        header, device = schedule.header, setting.mesh.device
        specs = (TensorSpec(tuple(setting.x.shape), setting.x.dtype),)
        edges = _edges(schedule, setting.x.nbytes)
        made = pool.links([edge for pair in edges.values() for edge in pair])
        mine = header.stages_on(setting.rank)
        self._senders: dict[tuple[Kind, int], Sender] = {}
        self._slots: dict[tuple[Kind, int], ReceiveSlots] = {}
        for (stage, following), (activation, gradient) in edges.items():
            if stage in mine:
                self._senders[Kind.SEND_ACTIVATION, stage] = Sender(made[activation])
                boundary, count = Boundary(made[gradient], specs), header.gradient_slots[stage]
                self._slots[Kind.RECV_GRADIENT, stage] = receive_slots(boundary, count, device)
            if following in mine:
                self._senders[Kind.SEND_GRADIENT, following] = Sender(made[gradient])
                boundary, count = Boundary(made[activation], specs), header.activation_slots[following]
                self._slots[Kind.RECV_ACTIVATION, following] = receive_slots(boundary, count, device)

    def closure(self, action: Action) -> Callable[[], object]:
        """What the loop does for an action."""
        kind, stage, slot = action.kind, action.stage, action.slot
        if kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
            return partial(self._senders[kind, stage].send, (self._setting.x,))
        if kind in (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT):
            return partial(self._slots[kind, stage].post, slot)
        times, awaited = _SLEEPS.get(kind, 0), None
        if slot >= 0 and times:
            awaited = self._slots[Kind.RECV_ACTIVATION if kind == Kind.FORWARD else Kind.RECV_GRADIENT, stage]
        return partial(self._compute, times, awaited, slot)

    def _compute(self, times: int, awaited: ReceiveSlots | None, slot: int) -> None:
        if awaited is not None:
            awaited.take(slot)
        began = time.thread_time()
        for _ in range(times):
            self._setting.meter.sleep(self._setting.seconds)
        self._setting.meter.processor += time.thread_time() - began

    def finish(self) -> None:
        """Await what was sent."""
        for sender in self._senders.values():
            sender.drain()
        for slots in self._slots.values():
            slots.release()


def _edges(schedule: Schedule, num_bytes: int) -> Mapping[tuple[int, int], Sequence[Edge]]:
    """The same edges as the engine's, so that both use the same links."""
    crossings = [
        (stage, following)
        for stage, following in itertools.pairwise(schedule.header.routes[0])
        if schedule.rank_of(stage) != schedule.rank_of(following)
    ]
    edges = {}
    for index, (stage, following) in enumerate(crossings):
        source, target = schedule.rank_of(stage), schedule.rank_of(following)
        kept, kept_gradients = schedule.header.activation_slots[following], schedule.header.gradient_slots[stage]
        edges[stage, following] = (
            Edge(source, target, 2 * index, num_bytes, loans=kept),
            Edge(target, source, 2 * index + 1, num_bytes, loans=kept_gradients),
        )
    return edges
