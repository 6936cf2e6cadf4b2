"""State that replicas share out: whole weights gathered, whole gradients summed into shards, a few units at a time.

ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, sections 5 and 7). The schedule says when; what is started here is
awaited where its result is used.
"""

from collections import deque
from collections.abc import Mapping

import torch

from megapipe.engine.stage import Stage
from megapipe.parallel.groups import Group, Work
from megapipe.parallel.unit_state import UnitState


def shared_states(stages: Mapping[int, Stage], stage: int) -> list[tuple[UnitState, ...]]:
    """For each unit of a stage, the states whose weights it computes with and may have to wait for.

    Any unit may use a tied weight, which is awaited at most once.
    """
    tied = [
        state
        for each in stages.values()
        for index, state in each.states.items()
        if index >= len(each.units) and _awaits(state)
    ]
    states = stages[stage].states
    return [
        (*([states[unit]] if unit in states and _awaits(states[unit]) else []), *tied)
        for unit in range(len(stages[stage].units))
    ]


def _awaits(state: UnitState) -> bool:
    return state.sharding.count > 1 or state.weights_come_and_go


class GradientReduction(Work):
    """The sum of a unit's gradient over the ranks that share its state, each getting its shard of it.

    copies: ranks with the same shard, over which the shard is summed too; None where this sum is not the unit's last.
    dtype: in which gradients travel.
    """

    def __init__(
        self, state: UnitState, update: int, shards: Group, copies: Group | None, dtype: torch.dtype | None
    ) -> None:
        self.state = state
        self.update = update
        self._shards = shards
        self._copies = copies
        self._whole = state.gradients_of(update)[0]
        self._sent = self._whole if dtype is None else self._whole.to(dtype)
        self._summing: Work | None = shards.reduce_into_part(self._sent)
        self._copying: Work | None = None

    def go_on(self) -> None:
        """Await the sum over shards and start the one over copies."""
        if self._summing is None:
            return
        self._summing.wait()
        self._summing = None
        if self._sent is not self._whole:
            self._shards.own_part(self._whole).copy_(self._shards.own_part(self._sent))
            self._sent = self._whole
        if self.state.sharding.gradients:
            self.state.close_gradients(self.update)
        if self._copies is not None:
            self._copying = self._copies.all_reduce(self.state.reduced_gradient(self.update), async_op=True)

    def wait(self) -> None:
        self.go_on()
        if self._copying is not None:
            self._copying.wait()
            self._copying = None


class GradientBuffers:
    """Whole gradients that have memory at once, where they are sharded: those added to and those on their way.

    limit: how many.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open = 0
        self._on_their_way: deque[GradientReduction] = deque()

    def open(self, state: UnitState, update: int) -> None:
        """Give a unit's accumulator for an update memory where it has none, once a buffer is free.

        What was in it before may still be on its way: nothing may be added to that.
        """
        while any(each.state is state and each.update == update for each in self._on_their_way):
            self._finish_oldest()
        if state.has_open_gradients(update):
            return
        while self._on_their_way and self._open >= self._limit:
            self._finish_oldest()
        state.open_gradients(update)
        self._open += 1

    def reduce(self, reduction: GradientReduction) -> None:
        """Take note of a reduction that was started; its buffer is free once it is done."""
        self._on_their_way.append(reduction)

    def finish(self) -> None:
        """Await every reduction under way, over shards."""
        while self._on_their_way:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        self._on_their_way.popleft().go_on()
        self._open -= 1
