"""Checks of the fused output projection and cross entropy against torch in float64."""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from megapipe.kernels.reference import cross_entropy
from megapipe.kernels.reference import linear_cross_entropy as reference
from tests.kernels.cases import assert_as_exact_as_torch, assert_same_bits, draw


@dataclass
class Part:
    """One rank's rows of the weight, with padding behind them, and the labels as it sees them."""

    weight: Tensor
    num_columns: int
    columns: Tensor
    owned: Tensor
    bias: Tensor

    def head(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """The arguments that all functions of the op begin with, behind x."""
        return self.weight, self.columns, self.owned, self.num_columns


@dataclass
class Case:
    """x [n, h], weight [v, h], labels [n], a scale [n] of each row's loss and a bias [v] for whoever adds one."""

    x: Tensor
    weight: Tensor
    labels: Tensor
    scale: Tensor
    bias: Tensor

    @staticmethod
    def drawn(rows: int, hidden: int, vocabulary: int, dtype: torch.dtype, device: str) -> "Case":
        """Logits of order 3."""
        weight = (draw(vocabulary, hidden, seed=1) * 3 * hidden**-0.5).to(device, dtype)
        labels = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(2)).to(device)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        x, scale = draw(rows, hidden, dtype=dtype, device=device), draw(rows, seed=3, dtype=wide, device=device)
        return Case(x, weight, labels, scale, draw(vocabulary, seed=4, dtype=dtype, device=device))

    def parts(self, sizes: list[int], padding: int) -> list[Part]:
        """Ranks with `sizes` rows of the vocabulary each, and as many rows of padding as given."""
        made = []
        first = 0
        for size in sizes:
            weight = torch.cat([self.weight[first : first + size], self.weight[:padding] * 100])
            owned = (self.labels >= first) & (self.labels < first + size)
            bias = torch.cat([self.bias[first : first + size], self.bias[:padding] * 100])
            made.append(Part(weight, size, (self.labels - first).masked_fill(~owned, 0), owned, bias))
            first += size
        return made

    def exact(self) -> list[Tensor]:
        """Losses, and gradients of x, weight and (unscaled) logits, by torch in float64."""
        x, weight = self.x.double().requires_grad_(), self.weight.double().requires_grad_()
        logits = x @ weight.t()
        losses = functional.cross_entropy(logits, self.labels, reduction="none")
        dx, dweight = torch.autograd.grad((losses * self.scale.double()).sum(), [x, weight], retain_graph=True)
        return [losses.detach(), dx, dweight, torch.autograd.grad(losses.sum(), logits)[0]]

    def exact_with_bias(self) -> list[Tensor]:
        """Losses, and gradients of x, weight and bias, by torch in float64."""
        x, weight, bias = (tensor.double().requires_grad_() for tensor in (self.x, self.weight, self.bias))
        losses = functional.cross_entropy(functional.linear(x, weight, bias), self.labels, reduction="none")
        gradients = torch.autograd.grad((losses * self.scale.double()).sum(), [x, weight, bias])
        return [losses.detach(), *gradients]


def run(op: ModuleType, case: Case, sizes: list[int], padding: int) -> list[Tensor]:
    """What `Case.exact` gives, from ranks that share the vocabulary, by both ways that the op offers."""
    parts = case.parts(sizes, padding)
    alone = len(sizes) == 1
    by_rank = torch.stack([op.statistics(case.x, *part.head()) for part in parts])
    log_sum_exp, target = cross_entropy.merged(by_rank)
    dx, dweights, gradients = torch.zeros_like(case.x, dtype=log_sum_exp.dtype), [], []
    for part, own in zip(parts, by_rank, strict=True):
        part_dx, dweight = op.backward(case.x, *part.head(), log_sum_exp, case.scale)
        assert not dweight[part.num_columns :].any()
        dx += part_dx
        dweights.append(dweight[: part.num_columns])
        kept, gradient = op.statistics_and_gradient(case.x, *part.head(), alone)
        # Products of other shapes may round the logits otherwise.
        unit = torch.finfo(case.x.dtype).eps
        torch.testing.assert_close(kept, own, rtol=4 * unit, atol=16 * unit)
        if not alone:
            op.complete_gradient(gradient, part.columns, part.owned, part.num_columns, kept, log_sum_exp)
        assert not gradient[:, part.num_columns :].any()
        gradients.append(gradient[:, : part.num_columns])
    return [log_sum_exp - target, dx.to(case.x.dtype), torch.cat(dweights), torch.cat(gradients, dim=1)]


def run_with_bias(op: ModuleType, case: Case, sizes: list[int], padding: int) -> list[Tensor]:
    """What `Case.exact_with_bias` gives, by recomputation."""
    parts = case.parts(sizes, padding)
    by_rank = torch.stack([op.statistics(case.x, *part.head(), part.bias) for part in parts])
    log_sum_exp, target = cross_entropy.merged(by_rank)
    dx, dweights, dbiases = torch.zeros_like(case.x, dtype=log_sum_exp.dtype), [], []
    for part in parts:
        part_dx, dweight, dbias = op.backward(case.x, *part.head(), log_sum_exp, case.scale, part.bias)
        assert not dweight[part.num_columns :].any()
        assert not dbias[part.num_columns :].any()
        dx += part_dx
        dweights.append(dweight[: part.num_columns])
        dbiases.append(dbias[: part.num_columns])
    return [log_sum_exp - target, dx.to(case.x.dtype), torch.cat(dweights), torch.cat(dbiases)]


def check_exactness(
    op: ModuleType, rows: int, hidden: int, sizes: list[int], padding: int, dtype: torch.dtype, device: str
) -> None:
    """No less exact than the reference, which torch's products make inexact first, and the same bits again."""
    case = Case.drawn(rows, hidden, sum(sizes), dtype, device)
    for way, expected in ((run, case.exact()), (run_with_bias, case.exact_with_bias())):
        found = way(op, case, sizes, padding)
        for ours, theirs, exact in zip(found, way(reference, case, sizes, padding), expected, strict=True):
            assert_as_exact_as_torch(ours, theirs, exact)
        for first, second in zip(found, way(op, case, sizes, padding), strict=True):
            assert_same_bits(first, second)
