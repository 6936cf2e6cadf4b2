"""Checks of cross entropy backends against torch in float64, and no less exact than the reference."""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from megapipe.kernels.reference import cross_entropy as reference
from tests.kernels.cases import assert_as_exact_as_torch, assert_same_bits, draw


@dataclass
class Case:
    """Logits [n, v], labels [n] and a scale [n] of each row's loss."""

    logits: Tensor
    labels: Tensor
    scale: Tensor

    @staticmethod
    def drawn(rows: int, width: int, dtype: torch.dtype, device: str) -> "Case":
        """Logits about as far apart as a trained model's."""
        logits = (draw(rows, width) * 5).to(device, dtype)
        labels = torch.randint(width, (rows,), generator=torch.Generator().manual_seed(1)).to(device)
        return Case(logits, labels, draw(rows, seed=2, dtype=torch.float32, device=device))

    def exact(self, scaled: bool) -> tuple[Tensor, Tensor]:
        """(losses [n], gradient of the logits of their sum, weighted by `scale` if scaled) by torch in float64."""
        leaf = self.logits.double().requires_grad_()
        losses = functional.cross_entropy(leaf, self.labels, reduction="none")
        (gradient,) = torch.autograd.grad((losses * self.scale.double() if scaled else losses).sum(), leaf)
        return losses.detach(), gradient


def alone(op: ModuleType, case: Case) -> tuple[Tensor, Tensor]:
    """(losses, gradient of the logits) of one rank with all columns, its logits overwritten."""
    gradient = case.logits.clone()
    statistics = op.statistics_and_gradient(gradient, case.labels, torch.ones_like(case.labels, dtype=torch.bool))
    log_sum_exp, target = reference.merged(statistics.unsqueeze(0))
    return log_sum_exp - target, gradient


def shared(op: ModuleType, case: Case, sizes: list[int], padding: int = 0) -> tuple[Tensor, Tensor]:
    """The same from ranks that have `sizes` columns each, with gradients scaled.

    padding: columns of other numbers behind each rank's, which must stay as they are.
    """
    parts, gathered = [], []
    first = 0
    for size in sizes:
        buffer = torch.full((case.logits.shape[0], size + padding), 77.0).to(case.logits)
        buffer[:, :size] = case.logits[:, first : first + size]
        owned = (case.labels >= first) & (case.labels < first + size)
        columns = (case.labels - first).masked_fill(~owned, 0)
        parts.append((buffer, size, columns, owned))
        gathered.append(op.statistics(buffer[:, :size], columns, owned))
        first += size
    log_sum_exp, target = reference.merged(torch.stack(gathered))
    for buffer, size, columns, owned in parts:
        op.gradient(buffer[:, :size], columns, owned, log_sum_exp, case.scale)
        assert (buffer[:, size:] == 77.0).all()
    return log_sum_exp - target, torch.cat([buffer[:, :size] for buffer, size, _, _ in parts], dim=1)


def check_alone(op: ModuleType, rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    """One pass over whole rows."""
    case = Case.drawn(rows, width, dtype, device)
    found = alone(op, case)
    for ours, theirs, exact in zip(found, alone(reference, case), case.exact(scaled=False), strict=True):
        assert_as_exact_as_torch(ours, theirs, exact)
    for first, second in zip(found, alone(op, case), strict=True):
        assert_same_bits(first, second)


def check_shared(op: ModuleType, rows: int, sizes: list[int], dtype: torch.dtype, device: str, padding: int) -> None:
    """Columns cut anywhere, with the exchange of three numbers a row between the passes."""
    case = Case.drawn(rows, sum(sizes), dtype, device)
    found = shared(op, case, sizes, padding)
    for ours, theirs, exact in zip(found, shared(reference, case, sizes), case.exact(scaled=True), strict=True):
        assert_as_exact_as_torch(ours, theirs, exact)
    for first, second in zip(found, shared(op, case, sizes, padding), strict=True):
        assert_same_bits(first, second)
