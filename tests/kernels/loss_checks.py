"""Checks of cross entropy, alone and fused with the output projection, against torch in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from megapipe.kernels.reference import cross_entropy as reference_cross_entropy
from megapipe.kernels.registry import Implementation
from tests.kernels.cases import assert_as_exact_as_torch, assert_same_bits, draw, implementation


def _labels(rows: int, width: int, device: str) -> Tensor:
    return torch.randint(width, (rows,), generator=torch.Generator().manual_seed(1)).to(device)


def _owned(labels: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the labels as columns of a rank that has `size` columns from `first` on, and which it owns."""
    owned = (labels >= first) & (labels < first + size)
    return (labels - first).masked_fill(~owned, 0), owned


@dataclass
class Logits:
    """Logits [n, v], labels [n] and a scale [n] of each row's loss."""

    logits: Tensor
    labels: Tensor
    scale: Tensor

    @staticmethod
    def drawn(rows: int, width: int, dtype: torch.dtype, device: str) -> "Logits":
        """Draw logits that differ about as much as a trained model's."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        scale = draw(rows, seed=2, dtype=wide, device=device)
        return Logits((draw(rows, width) * 5).to(device, dtype), _labels(rows, width, device), scale)

    def exact(self, scaled: bool) -> tuple[Tensor, Tensor]:
        """Return losses [n], and the gradient of the logits of their sum, weighted by `scale` if scaled."""
        leaf = self.logits.double().requires_grad_()
        losses = functional.cross_entropy(leaf, self.labels, reduction="none")
        (gradient,) = torch.autograd.grad((losses * self.scale.double() if scaled else losses).sum(), leaf)
        return losses.detach(), gradient

    def alone(self, op: Implementation) -> tuple[Tensor, Tensor]:
        """Return losses and gradient of the logits of one rank with all columns."""
        gradient = self.logits.clone()
        statistics = op.statistics_and_gradient(gradient, self.labels, torch.ones_like(self.labels, dtype=torch.bool))
        log_sum_exp, target = reference_cross_entropy.merged(statistics.unsqueeze(0))
        return log_sum_exp - target, gradient

    def shared(self, op: Implementation, sizes: list[int], padding: int = 0) -> tuple[Tensor, Tensor]:
        """Return the same of ranks that have `sizes` columns each, with gradients scaled.

        padding: columns of other numbers after those of each rank; they must not change.
        """
        parts, gathered, first = [], [], 0
        for size in sizes:
            buffer = torch.full((self.logits.shape[0], size + padding), 77.0).to(self.logits)
            buffer[:, :size] = self.logits[:, first : first + size]
            columns, owned = _owned(self.labels, first, size)
            parts.append((buffer, size, columns, owned))
            gathered.append(op.statistics(buffer[:, :size], columns, owned))
            first += size
        log_sum_exp, target = reference_cross_entropy.merged(torch.stack(gathered))
        for buffer, size, columns, owned in parts:
            op.gradient(buffer[:, :size], columns, owned, log_sum_exp, self.scale)
            assert (buffer[:, size:] == 77.0).all()
        return log_sum_exp - target, torch.cat([buffer[:, :size] for buffer, size, _, _ in parts], dim=1)


def check_logits(
    op: Implementation,
    rows: int,
    sizes: list[int],
    dtype: torch.dtype,
    device: str,
    padding: int = 0,
    alone: bool = False,
) -> None:
    """Compare errors with those of the reference, and the bits of two runs.

    alone: one pass over whole rows; otherwise the columns are cut, and three numbers per row are exchanged between the
    two passes.
    """
    case = Logits.drawn(rows, sum(sizes), dtype, device)
    reference = implementation("cross_entropy", "reference")
    first, second, theirs = (
        case.alone(each) if alone else case.shared(each, sizes, padding) for each in (op, op, reference)
    )
    for ours, again, other, exact in zip(first, second, theirs, case.exact(scaled=not alone), strict=True):
        assert_as_exact_as_torch(ours, other, exact)
        assert_same_bits(ours, again)


@dataclass
class Part:
    """One rank's rows of the weight, followed by padding, and the labels as it sees them."""

    weight: Tensor
    num_columns: int
    columns: Tensor
    owned: Tensor
    bias: Tensor

    def head(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return the arguments of every function of the op after x."""
        return self.weight, self.columns, self.owned, self.num_columns


@dataclass
class Projection:
    """x [n, h], weight [v, h], labels [n], a scale [n] of each row's loss and a bias [v]."""

    x: Tensor
    weight: Tensor
    labels: Tensor
    scale: Tensor
    bias: Tensor

    @staticmethod
    def drawn(rows: int, hidden: int, vocabulary: int, dtype: torch.dtype, device: str) -> "Projection":
        """Draw weights that give logits of order 3."""
        weight = (draw(vocabulary, hidden, seed=1) * 3 * hidden**-0.5).to(device, dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        x, scale = draw(rows, hidden, dtype=dtype, device=device), draw(rows, seed=3, dtype=wide, device=device)
        bias = draw(vocabulary, seed=4, dtype=dtype, device=device)
        return Projection(x, weight, _labels(rows, vocabulary, device), scale, bias)

    def parts(self, sizes: list[int], padding: int) -> list[Part]:
        """Return ranks with `sizes` rows of the vocabulary each, and this number of rows of padding."""
        made, first = [], 0
        for size in sizes:
            columns, owned = _owned(self.labels, first, size)
            weight, bias = (
                torch.cat([each[first : first + size], each[:padding] * 100]) for each in (self.weight, self.bias)
            )
            made.append(Part(weight, size, columns, owned, bias))
            first += size
        return made

    def exact(self, with_bias: bool) -> list[Tensor]:
        """Return losses, and gradients of x, weight, and bias or (unscaled) logits, by torch in float64."""
        x, weight, bias = (each.double().requires_grad_() for each in (self.x, self.weight, self.bias))
        logits = functional.linear(x, weight, bias if with_bias else None)
        losses = functional.cross_entropy(logits, self.labels, reduction="none")
        leaves = [x, weight, *([bias] if with_bias else [])]
        found = list(torch.autograd.grad((losses * self.scale.double()).sum(), leaves, retain_graph=True))
        return [losses.detach(), *found, *([] if with_bias else torch.autograd.grad(losses.sum(), logits))]

    def run(self, op: Implementation, sizes: list[int], padding: int, with_bias: bool) -> list[Tensor]:
        """Return what `exact` returns, from ranks that shard the vocabulary.

        Without a bias both ways to the gradient are tried: that which keeps the gradient of the logits too.
        """
        parts, alone = self.parts(sizes, padding), len(sizes) == 1
        biases = [(part.bias,) if with_bias else () for part in parts]
        by_rank = [op.statistics(self.x, *part.head(), *bias) for part, bias in zip(parts, biases, strict=True)]
        log_sum_exp, target = reference_cross_entropy.merged(torch.stack(by_rank))
        dx, of_parameters = torch.zeros_like(self.x, dtype=log_sum_exp.dtype), []
        for part, bias, own in zip(parts, biases, by_rank, strict=True):
            part_dx, *gradients = op.backward(self.x, *part.head(), log_sum_exp, self.scale, *bias)
            dx += part_dx
            assert not any(gradient[part.num_columns :].any() for gradient in gradients)
            gradients = [gradient[: part.num_columns] for gradient in gradients]
            if not with_bias:
                kept, gradient = op.statistics_and_gradient(self.x, *part.head(), alone)
                # Products of other shapes may round the logits otherwise.
                unit = torch.finfo(self.x.dtype).eps
                torch.testing.assert_close(kept, own, rtol=4 * unit, atol=16 * unit)
                if not alone:
                    op.complete_gradient(gradient, part.columns, part.owned, part.num_columns, kept, log_sum_exp)
                assert not gradient[:, part.num_columns :].any()
                gradients.append(gradient[:, : part.num_columns].t())
            of_parameters.append(gradients)
        weight, last = (torch.cat(each) for each in zip(*of_parameters, strict=True))
        return [log_sum_exp - target, dx.to(self.x.dtype), weight, last if with_bias else last.t()]


def check_projection(
    op: Implementation, rows: int, hidden: int, sizes: list[int], padding: int, dtype: torch.dtype, device: str
) -> None:
    """Compare errors with those of the reference, which torch's products dominate, and the bits of two runs."""
    case = Projection.drawn(rows, hidden, sum(sizes), dtype, device)
    reference = implementation("linear_cross_entropy", "reference")
    for with_bias in (False, True):
        first, second, theirs = (case.run(each, sizes, padding, with_bias) for each in (op, op, reference))
        for ours, again, other, exact in zip(first, second, theirs, case.exact(with_bias), strict=True):
            assert_as_exact_as_torch(ours, other, exact)
            assert_same_bits(ours, again)
