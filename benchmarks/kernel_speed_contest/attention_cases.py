"""Softmax of attention scores, and the product before it."""

from collections.abc import Callable

import torch
from torch import Tensor

from megapipe.kernels.registry import Implementation

from .case import QUICK, TINY, Aim, Case, Draw, Entry, Size, Traffic, Work, grid

SCALE = 0.125
HEAD = 128
AIM = Aim(0.90, 0.85)
SIZES = grid([4096, 32768], [1024, 2048, 4096, 8192, 16384])
SQUARE = grid([32768], [1024, 2048, 4096, 8192, 16384])
SEEN_OF_PADDED = 0.75


def _seen(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def _plain_inputs(size: Size, draw: Draw) -> list[Tensor]:
    return [draw.normal(1, 1, size.rows, size.width)]


def _causal_inputs(size: Size, draw: Draw) -> list[Tensor]:
    heads = size.rows // size.width
    return [draw.normal(1, heads, size.width, size.width), _seen(size.width, draw.device)]


def _padded_inputs(size: Size, draw: Draw) -> list[Tensor]:
    seen = torch.arange(size.width, device=draw.device) < int(SEEN_OF_PADDED * size.width)
    return [draw.normal(1, 1, size.rows, size.width), seen.view(1, 1, 1, -1)]


def _plain(op: Implementation) -> Entry:
    return Entry(lambda scores: op.forward(scores, None, SCALE, False, None))


def _causal(op: Implementation) -> Entry:
    return Entry(lambda scores, seen: op.forward(scores, None, SCALE, True, None))


def _padded(op: Implementation) -> Entry:
    return Entry(lambda scores, seen: op.forward(scores, seen, SCALE, False, None))


def _torch_softmax(scores: Tensor, seen: Tensor | None = None) -> Tensor:
    scaled = scores * SCALE
    if seen is not None:
        scaled = scaled.masked_fill(~seen, -torch.inf)
    return torch.softmax(scaled, dim=-1)


def _liger_softmax() -> Entry:
    """Return Liger's softmax, which does not apply a scale."""
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return Entry(LigerSoftmaxFunction.apply)


def _products(size: Size, draw: Draw) -> list[Tensor]:
    heads = size.rows // size.width
    query, key = (draw.normal(heads, size.width, HEAD) for _ in range(2))
    return [query, key, _seen(size.width, draw.device)]


def _probabilities(op: Implementation) -> Entry:
    return Entry(lambda query, key, seen: op.apply(query, key, SCALE, None))


def _torch_probabilities(query: Tensor, key: Tensor, seen: Tensor) -> Tensor:
    return _torch_softmax(query @ key.transpose(1, 2), seen)


def _probabilities_work(size: Size, itemsize: int) -> tuple[Work, Work]:
    """Return the work of the forward, and of forward and backward.

    The forward writes the weights; the backward reads them and their gradient. In addition, the forward reads query
    and key; the backward reads both again, and writes their gradients.
    """
    weights, heads = size.elements * itemsize, 2 * size.rows * HEAD * itemsize
    return Work(weights + heads), Work(3 * weights + 3 * heads)


def _softmax_case(
    form: str,
    sizes: list[Size],
    draw: Callable[[Size, Draw], list[Tensor]],
    seen: float,
    entry: Callable[[Implementation], Entry],
    liger: Callable[[], Entry] | None = None,
) -> Case:
    """Return a case of softmax.

    seen: fraction of the scores that the forward reads. The backward ignores the mask: it reads two whole tensors and
    writes one.
    """
    quick = sizes[len(sizes) // 2] if form == "causal" else QUICK
    tiny = Size(64, 64) if form == "causal" else TINY
    traffic = Traffic(1 + seen, 3)
    return Case("softmax", form, sizes, quick, tiny, draw, traffic.work, entry, Entry(_torch_softmax), liger, aim=AIM)


CASES = [
    _softmax_case("plain", SIZES, _plain_inputs, 1.0, _plain, _liger_softmax),
    _softmax_case("causal", SQUARE, _causal_inputs, 0.5, _causal),
    _softmax_case("padded", SIZES, _padded_inputs, SEEN_OF_PADDED, _padded),
    Case(
        "attention_probabilities",
        "",
        SQUARE,
        Size(32768, 4096),
        Size(64, 64),
        _products,
        _probabilities_work,
        _probabilities,
        Entry(_torch_probabilities),
    ),
]
