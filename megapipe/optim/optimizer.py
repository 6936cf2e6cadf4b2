"""AdamW over UnitStates: what the engine calls for UPDATE actions."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megapipe.config.run import OptimizerConfig
from megapipe.optim.adamw import AdamW, adamw_step
from megapipe.parallel.unit_state import UnitState

FIRST, SECOND = "first_moment", "second_moment"


class FlatAdamW:
    """AdamW with decoupled decay on the decayed range of every unit's flat buffer and none on the rest.

    Moments live in UnitState.moments, made at a unit's first update. The number of updates of a unit, which corrects
    the moments' bias, counts what was really applied: a skipped step does not advance it.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        self.applied: dict[str, int] = {}

    def update(self, states: Sequence[UnitState], version: int, learning_rate: float, coefficient: Tensor) -> None:
        """Advance `states` to absolute weight `version`; gradients are multiplied by `coefficient`, a 0-dim tensor."""
        for step, together in self._by_step(states).items():
            for decayed in (True, False):
                ranges = [(state, self._range(state, decayed)) for state in together]
                parts = [(state, part) for state, part in ranges if part.stop > part.start]
                if decayed:
                    for state in together:
                        state.begin_update(version)
                adamw_step(
                    [state.master[part] for state, part in parts],
                    [state.gradients[0][part] for state, part in parts],
                    [state.moments[FIRST][part] for state, part in parts],
                    [state.moments[SECOND][part] for state, part in parts],
                    AdamW(
                        step,
                        learning_rate,
                        self._config.betas,
                        self._config.epsilon,
                        self._config.weight_decay if decayed else 0.0,
                    ),
                    gradient_scale=coefficient,
                )

    def _by_step(self, states: Sequence[UnitState]) -> dict[int, list[UnitState]]:
        """States grouped by the number of the update that they are about to take, counted from 1."""
        groups: dict[int, list[UnitState]] = {}
        for state in states:
            if not state.moments:
                state.moments = {name: torch.zeros_like(state.master) for name in (FIRST, SECOND)}
            self.applied[state.name] = self.applied.get(state.name, 0) + 1
            groups.setdefault(self.applied[state.name], []).append(state)
        return groups

    @staticmethod
    def _range(state: UnitState, decayed: bool) -> slice:
        stop = state.table.decay_stop
        return slice(0, stop) if decayed else slice(stop, state.table.num_elements)
