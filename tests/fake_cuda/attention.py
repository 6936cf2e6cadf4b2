"""torch's fused attention on a device that is not there: the choice between its kernels, and one launch for each.

`scaled_dot_product_attention` asks the device which kernel it has; what follows is its rule for the H100
(aten/src/ATen/native/transformers/cuda/sdp_utils.cpp): flash attention for half precision without a mask, else the
memory-efficient kernel, else plain products, in that order.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from megapipe.layers import attention as layers_attention
from tests.fake_cuda.mode import Watch

FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_HEAD_DIM = 256
PLAIN = functional.scaled_dot_product_attention


def install(watch: Watch) -> None:
    """Put the stand-ins in place, for the rest of the process."""
    functional.scaled_dot_product_attention = _chosen
    layers_attention._compiled = lambda: lambda *given, **named: _flex(watch, *given, **named)  # type: ignore[assignment]


def _chosen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if query.device.type != "cuda":
        return PLAIN(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    width = query.shape[-1]
    if attn_mask is None and query.dtype in FLASH_DTYPES and width <= FLASH_HEAD_DIM:
        padded = -width % 8
        given = [functional.pad(each, [0, padded]) if padded else each for each in (query, key, value)]
        scale = width**-0.5 if scale is None else scale
        outputs = torch.ops.aten._scaled_dot_product_flash_attention(*given, dropout_p, is_causal, False, scale=scale)
        return outputs[0][..., :width]
    aligned = width % (4 if query.dtype == torch.float32 else 8) == 0
    if query.shape[1] == key.shape[1] and aligned:
        mask = attn_mask
        if mask is not None:
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)
            mask = _aligned(mask).expand(*query.shape[:3], key.shape[2])
        with_graph = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, with_graph, dropout_p, is_causal, scale=scale
        )[0]
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _aligned(mask: Tensor) -> Tensor:
    """The kernel reads a mask's rows 16 elements at a time."""
    length = mask.shape[-1]
    return mask if length % 16 == 0 else functional.pad(mask, [0, -length % 16])[..., :length]


class _Flex(torch.autograd.Function):
    """flex_attention as torch.compile makes it: a kernel forward; backward one for sums of rows and one."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, watch: Watch, lists: tuple[Tensor, ...]
    ) -> Tensor:
        # The result has its dimensions in the order of the query's.
        mixed = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        watch.launch("flex attention forward", [query, key, value, *lists], [mixed, sums])
        ctx.save_for_backward(query, key, value, mixed, sums)
        ctx.watch, ctx.lists = watch, lists
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mixed, sums = ctx.saved_tensors
        deltas = torch.empty_like(sums)
        ctx.watch.launch("flex attention deltas", [mixed, gradient], [deltas])
        gradients = [torch.empty_like(each) for each in (query, key, value)]
        ctx.watch.launch("flex attention backward", [query, key, value, gradient, sums, deltas, *ctx.lists], gradients)
        return (*gradients, None, None)


def _flex(
    watch: Watch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
) -> Tensor:
    assert enable_gqa == (query.shape[1] != key.shape[1])
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    lists = tuple(getattr(block_mask, name) for name in names if getattr(block_mask, name) is not None)
    return _Flex.apply(query, key, value, watch, lists)
