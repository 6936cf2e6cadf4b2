"""What goes into a step and what comes out of it, and the state that lives while it runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megapipe.engine.compute import Piece
from megapipe.layers.split import SplitTape
from megapipe.parallel.groups import Work
from megapipe.parallel.unit_state import UnitState

Key = tuple[int, int]
"""(stage, micro-batch)."""

UnitKey = tuple[int, int, int]
"""(stage, micro-batch, unit); unit is WHOLE for the stage's whole chain."""


@dataclass(frozen=True)
class StepInput:
    """One optimizer step as this rank sees it.

    step: number of the step, from 0. contexts: one per micro-batch of this replica, handed to every unit.
    token_count: loss tokens in this rank's micro-batches if its loss counts (last stage, tensor rank 0), else 0.
    learning_rate: for this step. stop: this rank asks everyone to stop after the step.
    """

    step: int
    contexts: Sequence[Any]
    token_count: float
    learning_rate: float = 0.0
    stop: bool = False


@dataclass(frozen=True)
class StepResult:
    """What every rank knows after a step, the same on all of them.

    loss: sum over the global batch's loss tokens divided by their number. gradient_norm: before clipping.
    skipped: the gradients were not finite, weights stayed. stop: some rank asked to stop.
    outputs: forward mode only, last stage only: what the last unit returned, by micro-batch.
    """

    loss: float
    token_count: float
    gradient_norm: float = 0.0
    skipped: bool = False
    stop: bool = False
    outputs: tuple[tuple[Tensor, ...], ...] = ()


@dataclass
class StepState:
    """Everything that is alive during one step on one rank.

    pieces: from a forward to its backward or input half. tapes: from an input half to the weight half.
    activations, gradients: from whoever made them to the next unit or stage on this rank, or to a send.
    reductions, tied_reductions: sums of gradients that were started and not awaited.
    """

    input: StepInput
    pieces: dict[UnitKey, Piece] = field(default_factory=dict)
    tapes: dict[UnitKey, SplitTape] = field(default_factory=dict)
    activations: dict[Key, tuple[Tensor, ...]] = field(default_factory=dict)
    gradients: dict[Key, tuple[Tensor, ...]] = field(default_factory=dict)
    loss_sums: list[Tensor] = field(default_factory=list)
    outputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    counts: Tensor | None = None
    counts_work: Work | None = None
    reductions: list[Work] = field(default_factory=list)
    tied_reductions: list[tuple[Work, UnitState]] = field(default_factory=list)
    loss: float = 0.0
    gradient_norm: float = 0.0
    _loss_gradient: Tensor | None = None

    def global_counts(self) -> Tensor:
        """(loss tokens, ranks that want to stop) over the global batch, float64; awaits their reduction."""
        if self.counts is None:
            raise RuntimeError("the schedule reads the token count before it reduces it")
        if self.counts_work is not None:
            self.counts_work.wait()
            self.counts_work = None
        return self.counts

    def loss_gradient(self) -> Tensor:
        """Gradient of the mean loss over the global batch with respect to a micro-batch's loss sum: 1 / count."""
        if self._loss_gradient is None:
            count = self.global_counts()[0].clamp(min=1.0)
            like = self.loss_sums[0]
            self._loss_gradient = (1.0 / count).to(device=like.device, dtype=like.dtype)
        return self._loss_gradient


def finished(state: StepState) -> StepResult:
    """Read the result off a step's state. A forward-only step reduces nothing: it has outputs alone."""
    outputs = tuple(state.outputs[key] for key in sorted(state.outputs))
    if state.counts is None:
        return StepResult(loss=0.0, token_count=0.0, outputs=outputs)
    counts = state.global_counts()
    return StepResult(
        loss=state.loss,
        token_count=float(counts[0]),
        gradient_norm=state.gradient_norm,
        skipped=not math.isfinite(state.gradient_norm),
        stop=bool(counts[1] > 0),
    )
