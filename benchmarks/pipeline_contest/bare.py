"""A loop over the actions of a schedule that only runs the stages and moves tensors, without state and sums."""

import itertools
from collections.abc import Callable
from functools import partial

from torch import Tensor

from megapipe.engine.stage import TensorSpec
from megapipe.engine.transfers import LinkPool, ReceiveSlots, Sender, link_edges, receive_slots
from megapipe.schedules import Schedule
from megapipe.schedules.actions import Action, Kind
from pipeline_contest.floor import COMPUTE, Compute
from pipeline_contest.setting import Setting, Step


def bare_loop(setting: Setting, schedule: Schedule, pool: LinkPool) -> Step:
    """Return a function that runs one step of the bare loop."""
    loop = _Loop(setting, schedule, pool)
    closures = [loop.closure(action) for action in schedule.actions("body", setting.rank)]

    def step() -> None:
        for closure in closures:
            closure()
        loop.finish()

    return step


class _Loop:
    """The links of a rank. They use the engine's slots and senders, so that links have all their features."""

    def __init__(self, setting: Setting, schedule: Schedule, pool: LinkPool) -> None:
        self._setting = setting
        self._compute = Compute(setting, schedule)
        self._outgoing: dict[tuple[bool, int, int], Tensor] = {}
        header, device = schedule.header, setting.mesh.device
        specs = (TensorSpec(tuple(setting.x.shape), setting.x.dtype),)
        crossings = [
            (stage, following)
            for stage, following in itertools.pairwise(header.routes[0])
            if schedule.rank_of(stage) != schedule.rank_of(following)
        ]
        links = pool.links(link_edges(header, dict.fromkeys(crossings, specs)))
        mine = header.stages_on(setting.rank)
        self._senders: dict[tuple[Kind, int], Sender] = {}
        self._slots: dict[tuple[Kind, int], ReceiveSlots] = {}
        for stage, following in crossings:
            source, destination = schedule.rank_of(stage), schedule.rank_of(following)
            if setting.rank not in (source, destination):
                continue  # the pool has only the links of this rank
            there, back = links[source, destination], links[destination, source]
            if stage in mine:
                self._senders[Kind.SEND_ACTIVATION, stage] = Sender(there, specs)
                count = header.gradient_slots[stage]
                self._slots[Kind.RECV_GRADIENT, stage] = receive_slots(back, specs, count, device)
            if following in mine:
                self._senders[Kind.SEND_GRADIENT, following] = Sender(back, specs)
                count = header.activation_slots[following]
                self._slots[Kind.RECV_ACTIVATION, following] = receive_slots(there, specs, count, device)

    def closure(self, action: Action) -> Callable[[], object]:
        """Return the function that runs an action."""
        kind, stage, slot = action.kind, action.stage, action.slot
        if kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
            return partial(self._send, action)
        if kind in (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT):
            return partial(self._slots[kind, stage].post, slot)
        if kind not in COMPUTE:
            return _nothing
        awaited = None
        if slot >= 0 and kind != Kind.BACKWARD_WEIGHT:
            awaited = self._slots[Kind.RECV_ACTIVATION if kind == Kind.FORWARD else Kind.RECV_GRADIENT, stage]
        return partial(self._run, action, awaited)

    def _run(self, action: Action, awaited: ReceiveSlots | None) -> None:
        incoming = self._setting.x if awaited is None else awaited.take(action.slot)[0]
        outgoing = self._compute.run(action, incoming)
        if outgoing is not None:
            self._outgoing[action.kind == Kind.FORWARD, action.stage, action.microbatch] = outgoing

    def _send(self, action: Action) -> None:
        activation = action.kind == Kind.SEND_ACTIVATION
        outgoing = self._outgoing.pop((activation, action.stage, action.microbatch))
        self._senders[action.kind, action.stage].send((outgoing,))

    def finish(self) -> None:
        """Wait for all sends."""
        self._outgoing.clear()
        for sender in self._senders.values():
            sender.drain()
        for slots in self._slots.values():
            slots.release()


def _nothing() -> None:
    """Do nothing, for sums and updates."""
