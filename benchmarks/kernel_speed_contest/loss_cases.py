"""Cross entropy of logits, and of hidden states with the output projection."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from megapipe.kernels.registry import Implementation

from .case import Aim, Case, Draw, Entry, Size, Traffic, Work, grid

HIDDEN_SIZE = 4096
CAP = 30.0
VOCABULARIES = [32768, 131072, 262144]


def _labels(size: Size, draw: Draw) -> list[Tensor]:
    """Return labels, and a mask that says that all of them belong to this rank."""
    return [
        draw.below(size.width, size.rows),
        torch.ones(size.rows, dtype=torch.bool, device=draw.device),
    ]


def _logits(size: Size, draw: Draw) -> list[Tensor]:
    return [draw.normal(size.rows, size.width), *_labels(size, draw)]


@torch.no_grad()
def _in_place(op: Implementation, logits: Tensor, labels: Tensor, owned: Tensor) -> tuple[Tensor, Tensor]:
    """Replace the logits by their gradient; return the statistics and the gradient."""
    return op.statistics_and_gradient(logits, labels, owned), logits


def _cross_entropy(op: Implementation) -> Entry:
    return Entry(op.statistics, lambda *inputs: _in_place(op, *inputs))


def _torch_cross_entropy(logits: Tensor, labels: Tensor, owned: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), labels, reduction="sum")


def _liger_cross_entropy() -> Entry:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return Entry(lambda logits, labels, owned: liger_cross_entropy(logits, labels, reduction="sum"))


def _projected(size: Size, draw: Draw) -> list[Tensor]:
    scale = HIDDEN_SIZE**-0.5
    weight = (draw.normal(size.width, HIDDEN_SIZE, leaf=False) * scale).requires_grad_()
    return [draw.normal(size.rows, HIDDEN_SIZE), weight, *_labels(size, draw)]


@torch.no_grad()
def _projection_and_gradients(
    op: Implementation, x: Tensor, weight: Tensor, labels: Tensor, owned: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute as `megapipe.layers.cross_entropy`: keep the gradient of the logits, then compute two products."""
    statistics, gradient = op.statistics_and_gradient(x, weight, labels, owned, weight.shape[0], True)
    return statistics, gradient @ weight, gradient.t() @ x


@torch.no_grad()
def _projected_twice(
    op: Implementation, x: Tensor, weight: Tensor, labels: Tensor, owned: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute as `megapipe.layers.cross_entropy` with recompute.logits: four products, and only a chunk of logits."""
    statistics = op.statistics(x, weight, labels, owned, weight.shape[0])
    log_sum_exp = statistics[0] + statistics[1].log()
    scale = torch.ones_like(log_sum_exp)
    dx, dweight = op.backward(x, weight, labels, owned, weight.shape[0], log_sum_exp, scale)
    return statistics, dx, dweight


def _linear_cross_entropy(op: Implementation, both: Callable[..., object] = _projection_and_gradients) -> Entry:
    def forward(x: Tensor, weight: Tensor, labels: Tensor, owned: Tensor) -> Tensor:
        return op.statistics(x, weight, labels, owned, weight.shape[0])

    return Entry(forward, lambda *inputs: both(op, *inputs))


def _recomputed(op: Implementation) -> Entry:
    return _linear_cross_entropy(op, _projected_twice)


def _softcapped(op: Implementation) -> Entry:
    names = ("statistics", "statistics_and_gradient")
    return _linear_cross_entropy(Implementation(**{name: partial(getattr(op, name), cap=CAP) for name in names}))


def _torch_softcapped(x: Tensor, weight: Tensor, labels: Tensor, owned: Tensor) -> Tensor:
    logits = CAP * torch.tanh((x @ weight.t()).float() / CAP)
    return functional.cross_entropy(logits, labels, reduction="sum")


def _torch_linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, owned: Tensor) -> Tensor:
    return functional.cross_entropy((x @ weight.t()).float(), labels, reduction="sum")


def _liger_linear_cross_entropy() -> Entry:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def forward(x: Tensor, weight: Tensor, labels: Tensor, owned: Tensor) -> Tensor:
        return liger_fused_linear_cross_entropy(x, weight, labels, reduction="sum")

    return Entry(forward)


def _projection_work(size: Size, itemsize: int) -> tuple[Work, Work]:
    """Return the work of the forward, and of forward and backward.

    The forward has one product and reads x and weight. The backward has two more products and writes the gradients.
    The logits need not be in memory.
    """
    product = 2.0 * size.elements * HIDDEN_SIZE
    operands = (size.rows + size.width) * HIDDEN_SIZE * itemsize
    return Work(operands, product), Work(2 * operands, 3 * product)


CASES = [
    Case(
        "cross_entropy",
        "",
        grid([4096, 8192], VOCABULARIES),
        Size(4096, 131072),
        Size(16, 512),
        _logits,
        Traffic(1, 1).work,  # reads the logits; the backward writes their gradient in place
        _cross_entropy,
        Entry(_torch_cross_entropy),
        _liger_cross_entropy,
        aim=Aim(0.80, 0.80),
    ),
    *(
        Case(
            "linear_cross_entropy",
            f"hidden {HIDDEN_SIZE}{suffix}",
            grid([8192], VOCABULARIES[:2]),
            Size(4096, 32768),
            Size(4, 64),
            _projected,
            _projection_work,
            entry,
            Entry(_torch_linear_cross_entropy),
            _liger_linear_cross_entropy,
        )
        for suffix, entry in (("", _linear_cross_entropy), (", recomputed", _recomputed))
    ),
    Case(
        "softcapped_linear_cross_entropy",
        f"hidden {HIDDEN_SIZE}",
        grid([8192], VOCABULARIES[:2]),
        Size(4096, 32768),
        Size(4, 64),
        _projected,
        _projection_work,
        _softcapped,
        Entry(_torch_softcapped),
    ),
]
