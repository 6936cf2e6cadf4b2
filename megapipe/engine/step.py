"""Input and result of a step, the state that lives while it runs, and the error that ends it."""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megapipe.engine.host_memory import SavedTensors, StateCopies
from megapipe.engine.stage import SavedGraph
from megapipe.layers.split import SplitTape, Tensors
from megapipe.parallel.groups import Work
from megapipe.schedules.actions import Action

Key = tuple[int, int]
"""(stage, micro-batch)."""

UnitKey = tuple[int, int, int]
"""(stage, micro-batch, unit); unit is WHOLE for the stage's whole chain."""


NUM_FLAGS = 3
"""Number of flags that are summed over ranks with a step's token counts: stop, save, a save has failed."""

Counts = float | Sequence[float]
"""The number of tokens that a micro-batch's loss is a sum over, or one number for each term of a loss."""


@dataclass(frozen=True)
class StepInput:
    """One optimizer step as this rank sees it.

    Attributes:
        step: number of the step, from 0.
        contexts: one per micro-batch of this replica, passed to every unit.
        token_counts: loss tokens of each micro-batch; only read if this rank's loss counts (last stage, tensor rank
            0). A loss of several terms has a count for each, in order.
        learning_rate: for this step.
        stop: this rank asks all ranks to stop after the step.
        loss_scale: factor of the loss, and so of all gradients until the optimizer divides by it.
        save: this rank asks all ranks to save after the step.
        save_failed: this rank's part of a background save has failed.
        snapshot: copies of the state before the step for a checkpoint; each update waits for the copy of its unit.
    """

    step: int
    contexts: Sequence[Any]
    token_counts: Sequence[Counts]
    learning_rate: float = 0.0
    stop: bool = False
    loss_scale: float = 1.0
    save: bool = False
    save_failed: bool = False
    snapshot: StateCopies | None = None


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank.

    Attributes:
        step: its number.
        loss: sum over the global batch's loss tokens divided by their number; if the loss has several terms, the sum
            of their means.
        loss_terms: the mean of each term.
        token_count: number of loss tokens, those of the first term.
        gradient_norm: before clipping; that of the last update in a step of several.
        skipped: the loss or the gradients were not finite, so the weights did not change.
        stop, save, save_failed: whether that flag of StepInput was set on any rank.
        outputs: forward mode only, last stage only: what the last unit returned, by micro-batch.
        squared_loads: of each block whose experts are balanced, in order, the sum over its experts of their squared
            loads (`layers.router`), of the last update.

    Example:
        >>> from megapipe import StepResult
        >>> StepResult(step=3, loss=2.5, token_count=1024.0).skipped
        False
    """

    step: int
    loss: float
    token_count: float
    gradient_norm: float = 0.0
    skipped: bool = False
    stop: bool = False
    outputs: tuple[Tensors, ...] = ()
    loss_terms: tuple[float, ...] = ()
    save: bool = False
    save_failed: bool = False
    squared_loads: tuple[float, ...] = ()


@dataclass(frozen=True)
class Counted:
    """`StepState.counts`, read on the host. by_term: loss tokens of the step, for each term of the loss. flags: stop,
    save, a save has failed; true if any rank set them."""

    by_term: tuple[float, ...]
    flags: tuple[bool, bool, bool]

    @classmethod
    def of(cls, counts: Sequence[float], updates: int) -> "Counted":
        """Return the sums of a step. counts: loss tokens of each of its updates, by term, then the flags."""
        tokens, (stop, save, save_failed) = counts[:-NUM_FLAGS], counts[-NUM_FLAGS:]
        terms = len(tokens) // updates
        by_term = tuple(sum(tokens[term::terms]) for term in range(terms))
        return cls(by_term, (stop > 0, save > 0, save_failed > 0))


@dataclass(frozen=True)
class Scalars:
    """A step's sums over all ranks. loss_terms: means, one for each term of the loss.

    coefficient: factor of the gradients, from clipping and the loss scale; float32, on the device. squared_loads: as
    in StepResult.
    """

    loss_terms: tuple[float, ...]
    gradient_norm: float
    coefficient: Tensor
    counted: Counted
    squared_loads: tuple[float, ...] = ()

    @property
    def finite(self) -> bool:
        """Whether the step may change weights: a loss that is not finite can have gradients that are."""
        return math.isfinite(self.gradient_norm) and all(map(math.isfinite, self.loss_terms))


@dataclass
class StepState:
    """State of one step on one rank.

    updates: optimizer updates that the step makes, over equal parts of its micro-batches.
    kept: inputs of forwards that will be recomputed, until then.
    pieces: from a forward or its recomputation to its backward or input half.
    tapes: from an input half to the weight half.
    saved: saved tensors that move to host memory, from the forward to the backward or input half.
    activations, gradients: from the action that made them to the next unit or stage on this rank, or to a send.
    handed_out, summed: if the vocabulary is sharded over all pipeline ranks, tensors that are broadcast to shards and
    tensors that are summed over them, by shard and micro-batch (`engine.transfers`). counts: loss tokens of each
    update, by term, then the number of ranks that set each flag; float64. reductions: sums of gradients that were
    started but not awaited. scalars: the step's sums, once they are started.
    """

    input: StepInput
    updates: int = 1
    kept: dict[UnitKey, Tensors] = field(default_factory=dict)
    pieces: dict[UnitKey, SavedGraph] = field(default_factory=dict)
    tapes: dict[UnitKey, SplitTape] = field(default_factory=dict)
    saved: dict[UnitKey, SavedTensors] = field(default_factory=dict)
    activations: dict[Key, Tensors] = field(default_factory=dict)
    gradients: dict[Key, Tensors] = field(default_factory=dict)
    handed_out: dict[Key, tuple[Tensor, Work | None]] = field(default_factory=dict)
    summed: dict[Key, tuple[Tensor, Work]] = field(default_factory=dict)
    loss_sums: list[Tensor] = field(default_factory=list)
    outputs: dict[int, Tensors] = field(default_factory=dict)
    counts: Tensor | None = None
    counts_work: Work | None = None
    reductions: list[Work] = field(default_factory=list)
    scalars: Future[Scalars] | None = None
    _loss_gradients: Tensor | None = None

    def absolute(self, number: int) -> int:
        """Return the absolute number of a weight version or an update, for its number within the step."""
        return self.input.step * self.updates + number

    def update_of(self, microbatch: int) -> int:
        """Return the number, within the step, of the update that a micro-batch contributes to."""
        return microbatch * self.updates // len(self.input.contexts)

    def global_counts(self) -> Tensor:
        """`counts` over the global batch; awaits their reduction."""
        if self.counts is None:
            raise RuntimeError("the schedule reads the token count before it reduces it")
        if self.counts_work is not None:
            self.counts_work.wait()
            self.counts_work = None
        return self.counts

    def loss_gradient(self, microbatch: int) -> Tensor:
        """Gradient of the mean loss over the update's global batch with respect to a micro-batch's loss sum, in the
        shape of that sum: each term of a loss has its own mean. It includes the step's loss scale.
        """
        if self._loss_gradients is None:
            like = self.loss_sums[0]
            counts = self.global_counts()[:-NUM_FLAGS]
            # The loss of an update without loss tokens is 0.
            divisors = torch.where(counts == 0, 1.0, counts)
            by_update = (self.input.loss_scale / divisors).view(self.updates, *like.shape)
            self._loss_gradients = by_update.to(device=like.device, dtype=like.dtype)
        return self._loss_gradients[self.update_of(microbatch)]


def finished(state: StepState) -> StepResult:
    """Return the result of a step. A forward-only step reduces nothing: it only has outputs."""
    outputs = tuple(state.outputs[key] for key in sorted(state.outputs))
    if state.counts is None or state.scalars is None:
        return StepResult(state.input.step, loss=0.0, token_count=0.0, outputs=outputs)
    scalars = state.scalars.result()
    stop, save, save_failed = scalars.counted.flags
    return StepResult(
        step=state.input.step,
        loss=sum(scalars.loss_terms),
        token_count=scalars.counted.by_term[0],
        gradient_norm=scalars.gradient_norm,
        skipped=not scalars.finite,
        stop=stop,
        loss_terms=scalars.loss_terms,
        save=save,
        save_failed=save_failed,
        squared_loads=scalars.squared_loads,
    )


def tensor_on(array: np.ndarray, device: torch.device, *, wide: bool = False) -> Tensor:
    """Return a contiguous tensor of the array's values and dtype on `device`.

    A GPU copies from pinned memory, in stream order, so that the host does not wait; the allocator keeps that memory
    until the copy is done. int64 is sent as int32 and widened on the device: token ids, positions and lengths all fit.

    wide: send integers unchanged, because int32 cannot hold all of them.
    """
    if device.type != "cuda":
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)
    narrowed = array.dtype == np.int64 and not wide
    sent = array.astype(np.int32) if narrowed else np.ascontiguousarray(array)
    moved = torch.from_numpy(sent).pin_memory().to(device, non_blocking=True)
    return moved.long() if narrowed else moved


def action_words(action: Action) -> str:
    """Return an action in words, such as `FORWARD stage 1 microbatch 3`."""
    fields = [f"{name} {value}" for name, value in action._asdict().items() if name != "kind" and value >= 0]
    return f"{action.kind.name} {' '.join(fields)}".rstrip()


class EngineError(RuntimeError):
    """A step failed. The message names the rank, the step and the action, and the peer that it waited for, if any.

    action: the action that failed. states: state of each step in progress. unit: index, in the action's stage, of the
    unit whose forward failed. None or empty if there is none.
    """

    def __init__(
        self,
        message: str,
        action: Action | None = None,
        states: Sequence[StepState] = (),
        unit: int | None = None,
    ) -> None:
        super().__init__(message)
        self.action = action
        self.states = tuple(states)
        self.unit = unit
