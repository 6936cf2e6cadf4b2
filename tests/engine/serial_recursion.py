"""The weight recursions of schedules that never flush, in one process and plain torch: the engine's oracle.

Update k takes the gradient of its share of micro-batches with weights that are some updates old:

    W(k+1) = W(k) - learning rate * g(W(k - delay)), W(j) = W(0) for j < 0,

PipeDream-2BW (arXiv 2006.09503, section 3.1) with a whole batch an update and delay 1 everywhere; PipeDream (arXiv
1806.03377, section 3.3) with one micro-batch an update and delay p - 1 - s at stage s of p, p - 1 at all of them with
vertical sync; a schedule that flushes with delay 0. The step itself is torch.optim's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 3
RATES = (0.05, 0.02, 0.04, 0.01, 0.03)

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Microbatch:
    """inputs, targets: [rows, width]. mask: [rows], 1 where a row counts in the loss."""

    inputs: Tensor
    targets: Tensor
    mask: Tensor

    @property
    def tokens(self) -> float:
        return float(self.mask.sum())


@dataclass(frozen=True)
class Chain:
    """A chain of layers, each with a weight and a bias; with `tied`, the first and the last one share a third one."""

    num_layers: int
    tied: bool = False
    width: int = 8
    dtype: torch.dtype = torch.float64

    def shares(self, layer: int) -> bool:
        return self.tied and layer in (0, self.num_layers - 1)

    def initial_weights(self) -> Weights:
        """Weights of order one, as the toy's tanh wants them: bits differ wherever arithmetic does."""
        generator = torch.Generator().manual_seed(5)
        matrix, vector = (self.width, self.width), (self.width,)
        shapes = {f"{layer}.weight": matrix for layer in range(self.num_layers)}
        shapes |= {f"{layer}.bias": vector for layer in range(self.num_layers)}  # type: ignore[misc]
        if self.tied:
            shapes["0.shared"] = matrix
        scale = 0.8 / math.sqrt(self.width)
        return {
            name: torch.randn(shape, generator=generator, dtype=torch.float64).mul_(scale).to(self.dtype)
            for name, shape in shapes.items()
        }

    def batch(self, step: int, num_microbatches: int) -> list[Microbatch]:
        """A step's micro-batches, with different numbers of rows that count."""
        generator = torch.Generator().manual_seed(1000 + step)

        def draw() -> Tensor:
            return torch.randn(ROWS, self.width, generator=generator, dtype=torch.float64).to(self.dtype)

        masks = [(torch.arange(ROWS) < 1 + (step + index) % ROWS).to(self.dtype) for index in range(num_microbatches)]
        return [Microbatch(draw(), draw(), mask) for mask in masks]


def apply_layer(x: Tensor, weight: Tensor, bias: Tensor, shared: Tensor | None) -> Tensor:
    """x + tanh(x shared) weight + bias."""
    return x + torch.tanh(x if shared is None else x @ shared) @ weight + bias


def loss_sum(y: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Squared error summed over the rows that count."""
    return ((y - targets).square().sum(dim=1) * mask).sum()


def learning_rate(step: int) -> float:
    """The learning rate of a step: another one each time, so that none is mistaken for its neighbour's."""
    return RATES[step % len(RATES)]


def global_norm(gradients: Weights) -> Tensor:
    """The norm over all parameters, squares added in the order of their names."""
    squares = [torch.linalg.vector_norm(gradients[name].reshape(-1)).square() for name in sorted(gradients)]
    return torch.stack(squares).sum().sqrt()


@dataclass
class History:
    """weights[k]: after k updates. The others by update: each micro-batch's loss sum, rows that count, norm."""

    weights: list[Weights]
    loss_sums: list[list[Tensor]]
    rows: list[float]
    norms: list[float]
    skipped: list[bool]

    def losses(self, updates_per_step: int = 1) -> list[float]:
        """The mean loss of every step over its rows."""
        losses = []
        for start in range(0, len(self.rows), updates_per_step):
            step = slice(start, start + updates_per_step)
            sums = torch.stack([loss for update in self.loss_sums[step] for loss in update])
            losses.append(float(sums.sum() / sum(self.rows[step])))
        return losses


MakeOptimizer = Callable[[list[Tensor], list[Tensor]], torch.optim.Optimizer]
"""From decayed and other parameters to torch's optimizer over them."""


def recursion(
    chain: Chain,
    batches: Sequence[Sequence[Microbatch]],
    rates: Sequence[float],
    delays: Sequence[int],
    make_optimizer: MakeOptimizer,
    clip_norm: float | None = None,
) -> History:
    """One update for each of `batches`, at rates[k]. delays[i]: age in updates of the weights that layer i uses."""
    newest = {name: weight.clone().requires_grad_() for name, weight in chain.initial_weights().items()}
    decayed = [parameter for parameter in newest.values() if parameter.dim() > 1]
    others = [parameter for parameter in newest.values() if parameter.dim() == 1]
    optimizer = make_optimizer(decayed, others)
    history = History([copied(newest)], [], [], [], [])
    for update, batch in enumerate(batches):
        old = [history.weights[max(0, update - delay)] for delay in delays]
        rows = sum(microbatch.tokens for microbatch in batch)
        losses, gradients = losses_and_gradients(chain, old, batch, rows)
        norm = global_norm(gradients)
        finite = math.isfinite(float(norm))
        if finite:
            take_step(optimizer, newest, gradients, rates[update], clip_coefficient(norm, clip_norm))
        history.weights.append(copied(newest))
        history.loss_sums.append(losses)
        history.rows.append(rows)
        history.norms.append(float(norm))
        history.skipped.append(not finite)
    return history


def copied(weights: Mapping[str, Tensor]) -> Weights:
    return {name: weight.detach().clone() for name, weight in weights.items()}


def losses_and_gradients(
    chain: Chain, weights: Sequence[Weights], batch: Sequence[Microbatch], rows: float
) -> tuple[list[Tensor], Weights]:
    """Each micro-batch's loss sum, and the gradient of their mean over `rows`, micro-batch by micro-batch.

    weights[i]: what layer i uses. Each use of the shared weight has a gradient of its own; they are added at the end.
    """
    leaves = [{name: leaf.clone().requires_grad_() for name, leaf in used.items()} for used in weights]
    losses = []
    for microbatch in batch:
        x = microbatch.inputs
        for layer, used in enumerate(leaves):
            shared = used["0.shared"] if chain.shares(layer) else None
            x = apply_layer(x, used[f"{layer}.weight"], used[f"{layer}.bias"], shared)
        loss = loss_sum(x, microbatch.targets, microbatch.mask)
        loss.backward(1.0 / torch.tensor(rows, dtype=torch.float64))
        losses.append(loss.detach())
    gradients: Weights = {}
    for used in leaves:
        for name, leaf in used.items():
            if leaf.grad is not None:
                gradients[name] = gradients[name] + leaf.grad if name in gradients else leaf.grad
    return losses, gradients


def clip_coefficient(norm: Tensor, limit: float | None) -> Tensor:
    """torch.nn.utils.clip_grad_norm_'s coefficient, in fp32."""
    return torch.ones(()) if limit is None else torch.clamp(limit / (norm + 1e-6), max=1.0).float()


def take_step(
    optimizer: torch.optim.Optimizer, newest: Weights, gradients: Weights, rate: float, coefficient: Tensor
) -> None:
    for name, parameter in newest.items():
        parameter.grad = gradients[name] * coefficient
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
