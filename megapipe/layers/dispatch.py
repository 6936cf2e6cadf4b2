"""Tokens to the rows of their experts and back, each way the transpose of the other.

Both directions gather: sums are over a token's own experts in the order of its choices, so a device that adds with
atomics gives the same bits every time.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Assignment:
    """Which tokens the experts of one rank work on. A pair is a token and one of its k choices: number token x k + i.

    pairs: int64 [n], the pairs of this rank's n rows: expert by expert, ascending within each.
    rows: int64 [tokens x k], the row of every pair, n for those of other ranks' experts.
    counts: rows of each of this rank's experts. choices: k.
    """

    pairs: Tensor
    rows: Tensor
    counts: tuple[int, ...]
    choices: int


def assign(chosen: Tensor, first: int, num_experts: int) -> Assignment:
    """The rows of experts first to first + num_experts - 1. chosen: integers [tokens, k], every token's experts.

    Waits for the device, since how many rows there are has to be known.
    """
    local = chosen.flatten() - first
    place = torch.where((local >= 0) & (local < num_experts), local, num_experts)
    counts = torch.bincount(place, minlength=num_experts + 1)[:num_experts].tolist()
    pairs = torch.argsort(place, stable=True)[: sum(counts)].clone()
    rows = torch.full_like(place, len(pairs))
    rows[pairs] = torch.arange(len(pairs), device=chosen.device)
    return Assignment(pairs, rows, tuple(counts), chosen.shape[-1])


def assign_evenly(chosen: Tensor, num_experts: int, num_all: int) -> Assignment:
    """As `assign`, where tensors have no values (the meta device): each of `num_all` experts gets an even share."""
    pairs = chosen.numel()
    counts = [pairs * (expert + 1) // num_all - pairs * expert // num_all for expert in range(num_experts)]
    flat = chosen.flatten()
    return Assignment(flat.new_empty(sum(counts)), flat, tuple(counts), chosen.shape[-1])


def pick_rows(tokens: Tensor, assignment: Assignment) -> Tensor:
    """The rows [n, h] out of tokens [tokens, h]; a token's gradient is the sum of its rows'."""
    return _Pick.apply(tokens, assignment.pairs, assignment.rows, assignment.choices)


def sum_rows(rows: Tensor, assignment: Assignment) -> Tensor:
    """Of every token the sum [tokens, h] of its rows among [n, h], zeros where it has none."""
    return _Sum.apply(rows, assignment.pairs, assignment.rows, assignment.choices)


def _picked(tokens: Tensor, pairs: Tensor, choices: int) -> Tensor:
    return tokens.index_select(0, pairs // choices)


def _summed(values: Tensor, rows: Tensor, choices: int) -> Tensor:
    elsewhere = values.new_zeros(1, values.shape[-1])
    found = torch.cat([values, elsewhere]).index_select(0, rows)
    return found.view(-1, choices, values.shape[-1]).sum(1)


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, pairs: Tensor, rows: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.choices = choices
        return _picked(tokens, pairs, choices)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (rows,) = ctx.saved_tensors
        return _summed(gradient, rows, ctx.choices), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, pairs: Tensor, rows: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(pairs)
        ctx.choices = choices
        return _summed(values, rows, choices)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (pairs,) = ctx.saved_tensors
        return _picked(gradient, pairs, ctx.choices), None, None, None
