"""Optimizers over UnitStates: what the engine calls for UPDATE actions."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megapipe.config.optimizer import OptimizerConfig
from megapipe.kernels.ops import OPS
from megapipe.kernels.registry import Registry
from megapipe.optim.adamw import AdamW, adamw_step
from megapipe.optim.sgd import SGD, sgd_step
from megapipe.parallel.unit_state import UnitState

FIRST, SECOND = "first_moment", "second_moment"
MOMENTUM = "momentum"


@dataclass(frozen=True)
class Part:
    """Elements of flat buffers that take the same step: the decayed ones of some units, or the others.

    step: number of the units' update, from 1. moments: name -> one view a unit. decay: weight decay, 0 for the others.
    copies: bf16, where the step is to write the new parameters as well; empty where it need not.
    """

    step: int
    parameters: list[Tensor]
    gradients: list[Tensor]
    moments: dict[str, list[Tensor]]
    decay: float
    copies: list[Tensor]


class FlatOptimizer(ABC):
    """Decays the decayed range of every unit's flat buffer and nothing of the rest.

    Moments live in UnitState.moments, made at a unit's first update. `applied`, unit name -> number of updates, counts
    what was really applied: a skipped step does not advance it. kernels: which backends run the steps' ops.
    """

    writes_copies: ClassVar[bool] = False
    """Whether `_step` writes bf16 working copies along with their masters."""

    def __init__(self, config: OptimizerConfig, kernels: Registry = OPS) -> None:
        self._config = config
        self._kernels = kernels
        self.applied: dict[str, int] = {}

    @property
    @abstractmethod
    def moment_names(self) -> tuple[str, ...]:
        """Every moment that a unit keeps between updates, by its name in UnitState.moments and in checkpoints."""

    @abstractmethod
    def _step(self, part: Part, learning_rate: float, coefficient: Tensor) -> None:
        """Change parameters, moments and copies in place; gradients are multiplied by `coefficient`."""

    def update(self, states: Sequence[UnitState], version: int, learning_rate: float, coefficient: Tensor) -> None:
        """Advance `states` to absolute weight `version`; gradients are multiplied by `coefficient`, a 0-dim tensor."""
        for state in states:
            state.begin_update(version)
            if not state.moments:
                state.moments = {name: torch.zeros_like(state.master) for name in self.moment_names}
            self.applied[state.name] = self.applied.get(state.name, 0) + 1
        for step in sorted({self.applied[state.name] for state in states}):
            together = [state for state in states if self.applied[state.name] == step]
            for decayed in (True, False):
                self._step(self._part(together, step, decayed), learning_rate, coefficient)
        for state in states:
            if self._copied(state) is not None:
                state.mark_published()

    def _part(self, states: Sequence[UnitState], step: int, decayed: bool) -> Part:
        ranges = [(state, self._range(state, decayed)) for state in states]
        filled = [(state, part) for state, part in ranges if part.stop > part.start]
        return Part(
            step,
            [state.master[part] for state, part in filled],
            # A version's number is that of the update behind it plus the versions, a multiple of the gradient buffers.
            [state.reduced_gradient(state.newest)[part] for state, part in filled],
            {name: [state.moments[name][part] for state, part in filled] for name in self.moment_names},
            self._config.weight_decay if decayed else 0.0,
            [copy[part] for state, part in filled if (copy := self._copied(state)) is not None],
        )

    def _copied(self, state: UnitState) -> Tensor | None:
        copy = state.working_copy
        return copy if self.writes_copies and copy is not None and copy.dtype == torch.bfloat16 else None

    @staticmethod
    def _range(state: UnitState, decayed: bool) -> slice:
        """The decayed elements of this rank's shard, or the others."""
        size = state.shard.stop - state.shard.start
        stop = min(max(state.table.decay_stop - state.shard.start, 0), size)
        return slice(0, stop) if decayed else slice(stop, size)


class FlatAdamW(FlatOptimizer):
    """AdamW, with decoupled decay. The number of a unit's updates corrects its moments' bias."""

    writes_copies = True

    @property
    def moment_names(self) -> tuple[str, ...]:
        return FIRST, SECOND

    def _step(self, part: Part, learning_rate: float, coefficient: Tensor) -> None:
        update = AdamW(part.step, learning_rate, self._config.betas, self._config.epsilon, part.decay)
        adamw_step(
            part.parameters,
            part.gradients,
            part.moments[FIRST],
            part.moments[SECOND],
            update,
            kernels=self._kernels,
            gradient_scale=coefficient,
            copies=part.copies,
        )


class FlatSGD(FlatOptimizer):
    """Gradient descent with momentum and coupled decay, as torch.optim.SGD has it."""

    @property
    def moment_names(self) -> tuple[str, ...]:
        return (MOMENTUM,) if self._config.momentum else ()

    def _step(self, part: Part, learning_rate: float, coefficient: Tensor) -> None:
        update = SGD(learning_rate, self._config.momentum, part.decay)
        sgd_step(part.parameters, part.gradients, part.moments.get(MOMENTUM, []), update, gradient_scale=coefficient)


OPTIMIZERS: dict[str, type[FlatOptimizer]] = {"adamw": FlatAdamW, "sgd": FlatSGD}


def make_optimizer(config: OptimizerConfig, kernels: Registry = OPS) -> FlatOptimizer:
    """The optimizer that `optimizer.name` names. kernels: which backend runs AdamW's step."""
    return OPTIMIZERS[config.name](config, kernels)
