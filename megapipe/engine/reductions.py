"""Sums over ranks: gradients over replicas, tied weights over their uses, scalars over everyone; then the update."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megapipe.engine.step import StepState
from megapipe.parallel.groups import Group
from megapipe.parallel.norms import add_squared_norms, name_positions
from megapipe.parallel.unit_state import UnitState


class Optimizer(Protocol):
    """Makes a weight version out of the newest one and the reduced gradients."""

    def update(self, states: Sequence[UnitState], version: int, learning_rate: float, coefficient: Tensor) -> None:
        """Advance `states` to absolute `version`, every gradient multiplied by `coefficient` (float32 scalar)."""


@dataclass(frozen=True)
class Communicators:
    """The groups of one rank that the engine needs. tied[g]: ranks that hold uses of tied group g.

    counts_loss: this rank's loss sums and token counts enter the global sums (tensor rank 0 of its stage).
    counts_norm: this rank's squared gradient norms do (one data replica; the others hold the same sums).
    """

    world: Group
    data: Group
    tied: Mapping[int, Group]
    counts_loss: bool = True
    counts_norm: bool = True


class Reductions:
    """The collective actions of one rank and what they act on."""

    def __init__(
        self,
        counted_states: Sequence[UnitState],
        parameter_names: Sequence[str],
        communicators: Communicators,
        clip: Callable[[Tensor], Tensor],
        optimizer: Optimizer | None,
        device: torch.device,
    ) -> None:
        """Nothing is communicated yet.

        counted_states: those whose norm this rank contributes; a tied weight counts on one of its ranks.
        parameter_names: the whole model's. clip: gradient norm -> coefficient.
        """
        self._counted_states = counted_states
        self._positions = name_positions(parameter_names)
        self._communicators = communicators
        self._clip = clip
        self._optimizer = optimizer
        self._device = device
        self._coefficient = torch.ones((), device=device)

    def start_counts(self, step: StepState) -> None:
        """Start the sum of (loss tokens, wishes to stop) over all ranks."""
        count = step.input.token_count if self._communicators.counts_loss else 0.0
        step.counts = torch.tensor([count, float(step.input.stop)], dtype=torch.float64, device=self._device)
        step.counts_work = self._communicators.world.all_reduce(step.counts, async_op=True)

    def reduce_gradients(self, step: StepState, state: UnitState) -> None:
        """Start the sum of a unit's gradient over data-parallel replicas."""
        step.reductions.append(state.reduce(self._communicators.data))

    def reduce_tied(self, step: StepState, state: UnitState, group: int) -> None:
        """Start the sum of a tied weight's gradients over its uses, here and on other ranks.

        Only started: with several stages a rank, others may have to finish work that waits for this rank first.
        """
        state.sum_uses()
        work = self._communicators.tied[group].all_reduce(state.gradients[0], async_op=True)
        step.tied_reductions.append((work, state))

    def await_gradients(self, step: StepState) -> None:
        """Await every gradient sum of the step; a tied weight's sum over uses is then summed over replicas."""
        for work, state in step.tied_reductions:
            work.wait()
            self.reduce_gradients(step, state)
        for work in step.reductions:
            work.wait()
        step.tied_reductions.clear()
        step.reductions.clear()

    def reduce_scalars(self, step: StepState) -> None:
        """Await the step's gradient sums, then find the global loss, the canonical norm and the clip coefficient."""
        self.await_gradients(step)
        scalars = torch.zeros(len(self._positions) + 1, dtype=torch.float64, device=self._device)
        if self._communicators.counts_norm:
            add_squared_norms(self._counted_states, self._positions, scalars)
        if self._communicators.counts_loss and step.loss_sums:
            scalars[-1] = torch.stack(step.loss_sums).double().sum()
        self._communicators.world.all_reduce(scalars)
        norm = scalars[:-1].sum().sqrt()
        count = step.global_counts()[0]
        step.gradient_norm = float(norm)
        step.loss = float(scalars[-1] / count.clamp(min=1.0))
        self._coefficient = self._clip(norm).to(torch.float32)

    def update(self, step: StepState, states: Sequence[UnitState], version: int) -> None:
        """Optimizer step of `states`, or a mere copy of their weights when the gradients were not finite."""
        if self._optimizer is None:
            raise ValueError("this engine was built without an optimizer; give it one to run UPDATE actions")
        if math.isfinite(step.gradient_norm):
            self._optimizer.update(states, version, step.input.learning_rate, self._coefficient)
        else:
            for state in states:
                state.begin_update(version)
        for state in states:
            state.publish()
            state.zero_gradients()
