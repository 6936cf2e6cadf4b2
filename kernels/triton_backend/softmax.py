"""Softmax of masked attention scores in Triton: the functions and arguments of `megapipe.kernels.reference.softmax`.

Any number of keys. Hidden scores are not read. Rows of up to `RESIDENT` keys are read once, of up to
`RESIDENT_UNALIGNED` where they are not read 16 bytes at a time.
"""

from typing import Any

import torch
from torch import Tensor

from megapipe.kernels.opaque import opaque
from megapipe.kernels.reference.softmax import check
from megapipe.kernels.triton_backend.launch import Launch, ceiling_division, power_of_two, stays_on_chip
from megapipe.kernels.triton_backend.launch import refusal as refusal
from megapipe.kernels.triton_backend.softmax_kernels import (
    chunked_gradient_kernel,
    chunked_kernel,
    resident_gradient_kernel,
    resident_kernel,
)
from megapipe.kernels.triton_backend.specimens import Specimen, meta

RESIDENT, RESIDENT_UNALIGNED = 16384, 8192
_TILE, _CHUNK, _ELEMENTS_PER_WARP = 4096, 4096, 512


def _fake_forward(scores: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int | None) -> Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.scale = inputs[2]


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (y,) = ctx.saved_tensors
    return input_gradient(dy, y, ctx.scale), None, None, None, None


@opaque(
    "softmax_triton(Tensor scores, Tensor? mask, float scale, bool causal, SymInt? window) -> Tensor",
    _fake_forward,
    _keep,
    _backward,
)
def forward(scores: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int | None) -> Tensor:
    """Attention weights of scores [b, heads, q, k], in their shape and dtype: softmax(scale * scores) over the keys.

    A hidden key weighs 0, whatever its score; a row that sees no key, or only scores of minus infinity, is all 0.
    """
    check(scores, mask, causal, window)
    scores = scores.contiguous()
    y = torch.empty_like(scores)
    forward_launch(scores, mask, y, scale, causal, window).run()
    return y


@opaque(
    "softmax_triton_input_gradient(Tensor dy, Tensor y, float scale) -> Tensor",
    lambda dy, y, scale: torch.empty_like(y, memory_format=torch.contiguous_format),
)
def input_gradient(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """Gradient of the scores, from that of the weights and the weights y."""
    dy, y = dy.contiguous(), y.contiguous()
    dx = torch.empty_like(y)
    gradient_launch(dy, y, dx, scale).run()
    return dx


def forward_launch(
    scores: Tensor, mask: Tensor | None, y: Tensor, scale: float, causal: bool, window: int | None
) -> Launch:
    """Reads the contiguous scores and the mask, writes y."""
    _, heads, queries, keys = scores.shape
    constants: dict[str, int] = {"CAUSAL": causal, "WINDOW": window is not None, "MASK": mask is not None}
    strides: tuple[int, ...] = (0, 0, 0)
    if mask is not None:
        mask = mask.expand(scores.shape)
        if mask.stride(3) != 1 and keys > 1:
            mask = mask.contiguous()
        mask, strides = mask.view(torch.uint8), mask.stride()[:3]
    arguments = {
        "scores": scores,
        "mask": mask,
        "y": y,
        "heads": heads,
        "queries": queries,
        "keys": keys,
        "mask_batch": strides[0],
        "mask_head": strides[1],
        "mask_query": strides[2],
        "window": window or 0,
        "scale": scale,
    }
    return _over_rows(resident_kernel, chunked_kernel, scores, arguments, constants)


def gradient_launch(dy: Tensor, y: Tensor, dx: Tensor, scale: float) -> Launch:
    """Reads dy and y, writes dx, all contiguous."""
    arguments = {"dy": dy, "y": y, "dx": dx, "keys": y.shape[-1], "scale": scale}
    return _over_rows(resident_gradient_kernel, chunked_gradient_kernel, y, arguments, {})


def _over_rows(resident: Any, chunked: Any, x: Tensor, arguments: dict[str, Any], constants: dict[str, int]) -> Launch:
    width = x.shape[-1]
    num_rows = x.shape[:-1].numel()
    if not stays_on_chip(width, RESIDENT, RESIDENT_UNALIGNED):
        chunks = constants | {"BLOCK": _CHUNK}
        return Launch(chunked, (num_rows,), arguments, chunks, _CHUNK // _ELEMENTS_PER_WARP)
    block = power_of_two(max(width, 1))
    rows = max(1, _TILE // block)
    return Launch(
        resident,
        (ceiling_division(num_rows, rows),),
        arguments | {"num_rows": num_rows},
        constants | {"ROWS": rows, "BLOCK": block},
        rows * block // _ELEMENTS_PER_WARP,
    )


def specimens() -> list[Specimen]:
    """Every mask at lengths that take several rows a program, one row, the longest resident row, and chunks."""
    found = []
    shapes = [(512, False, True), (2048, True, False), (RESIDENT, True, True), (65536, True, True)]
    for keys, causal, masked in [*shapes, (RESIDENT_UNALIGNED - 1, True, True)]:
        scores = meta(1, 16, keys, keys, dtype=torch.bfloat16)
        mask = meta(1, 1, 1, keys, dtype=torch.bool) if masked else None
        launch = forward_launch(scores, mask, scores, 0.125, causal, None)
        name = f"softmax, {'causal ' if causal else ''}{'masked ' if masked else ''}forward, bf16 {keys}"
        aligned = keys % 16 == 0
        found.append(Specimen(name, launch, loads=(1 + masked) * aligned, stores=int(aligned)))
        backward = gradient_launch(scores, scores, scores, 0.125)
        found.append(Specimen(f"softmax, backward, bf16 {keys}", backward, 2 * aligned, int(aligned)))
    return found
