"""Our parameters as tensors of a Hugging Face family, and back.

Every conversion is a permutation of elements, so it carries gradients and optimizer moments as well as weights.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.spec.family import Family, FamilyError, Step
from megapipe.spec.parameters import ParameterSpec

Join = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Correspondence:
    """One of our parameters and the tensors of a family that contain its elements.

    theirs: names of these tensors. steps: pairs of functions: a step from the family's tensors towards our parameter,
    and its inverse.
    """

    spec: ParameterSpec
    theirs: tuple[str, ...]
    steps: tuple[tuple[Join, Join], ...]

    def part(self, ours: Tensor) -> Sequence[Tensor]:
        """Return the family's tensors, in the order of `theirs`, that our parameter becomes."""
        parts: Sequence[Tensor] = [ours]
        for _, inverse in reversed(self.steps):
            parts = inverse(parts)
        return parts if self.steps else [_merged(self.spec, part) for part in parts]

    def check(self, shapes: Sequence[Sequence[int]]) -> None:
        """Raise FamilyError unless `shapes`, one for each of `theirs`, are the shapes of the tensors that form our
        parameter."""
        parts = self.part(torch.empty(self.spec.shape, device="meta"))
        for name, shape, part in zip(self.theirs, shapes, parts, strict=True):
            if tuple(shape) != tuple(part.shape):
                raise FamilyError(
                    f"{name} has the shape {tuple(shape)}, but the model configuration needs {tuple(part.shape)} for "
                    f"{self.spec.name}"
                )

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return our parameter, which the family's tensors form. Raises FamilyError for a part of another shape."""
        self.check([part.shape for part in parts])
        for step, _ in self.steps:
            parts = step(parts)
        (whole,) = parts
        return whole.reshape(self.spec.shape)


def correspondences(model: ModelConfig, family: Family) -> list[Correspondence]:
    """Return the correspondence of every parameter. Raises FamilyError if the family has no tensor for one."""
    return [
        Correspondence(spec, names, tuple(_step(step, spec, own, len(names)) for step in steps))
        for spec, own, names, steps in family.places(model)
    ]


def _step(step: Step, spec: ParameterSpec, model: ModelConfig, count: int) -> tuple[Join, Join]:
    """Return a step and its inverse. count: number of the family's tensors."""
    if step == "query_key_value":
        return _query_key_value(model, fused=count == 1)
    if step == "rotary_pairs":
        half = model.head_dim // 2
        return lambda parts: [_regrouped(parts[0], half, 2)], lambda parts: [_regrouped(parts[0], 2, half)]
    if step == "rotary_last":
        return rotary_last(model, spec)
    if step == "stacked":
        axes = next(n for n in range(1, len(spec.shape)) if math.prod(spec.shape[:n]) == count)
        return lambda parts: [torch.stack([*parts])], lambda parts: parts[0].flatten(0, axes - 1).unbind(0)
    if step == "input_first":
        return _input_swapped, _input_swapped
    if step == "interleaved":
        return (
            lambda parts: [parts[0].unflatten(1, (-1, 2)).transpose(1, 2)],
            lambda parts: [parts[0].transpose(1, 2).flatten(1, 2)],
        )
    if step == "row":
        return lambda parts: [parts[0][0]], lambda parts: [parts[0][None]]
    return _transposed, lambda parts: _transposed([_merged(spec, part) for part in parts])


def _transposed(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    return [part.t() if part.ndim == 2 else part for part in parts]


def _input_swapped(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    return [part.transpose(1, 2) if part.ndim == 3 else part for part in parts]


def _merged(spec: ParameterSpec, ours: Tensor) -> Tensor:
    """Return a matrix with its leading axes merged, or a bias or norm as a vector."""
    return ours.flatten(0, -2) if spec.decay else ours.flatten()


def _query_key_value(model: ModelConfig, fused: bool) -> tuple[Join, Join]:
    """Return the step from query, key and value to one tensor (kv groups, query heads per group + 2, head_dim, ...),
    and its inverse. fused: whether query, key and value are in one tensor, instead of three."""
    groups, width = model.kv_heads, model.head_dim
    heads = model.num_heads // groups
    rows = [model.num_heads * width, groups * width, groups * width]

    def join(parts: Sequence[Tensor]) -> Sequence[Tensor]:
        pieces = parts[0].split(rows) if fused else parts
        counts = (heads, 1, 1)
        shaped = (
            piece.reshape(groups, count, width, *piece.shape[1:]) for piece, count in zip(pieces, counts, strict=True)
        )
        return [torch.cat([*shaped], dim=1)]

    def part(parts: Sequence[Tensor]) -> Sequence[Tensor]:
        pieces = [piece.flatten(0, 2) for piece in parts[0].split([heads, 1, 1], dim=1)]
        return [torch.cat(pieces)] if fused else pieces

    return join, part


def rotary_last(model: ModelConfig, spec: ParameterSpec) -> tuple[Join, Join]:
    """Return the step that moves the rotated rows of queries to the front of each head and regroups their pairs, and
    its inverse. In both formats, the rows of the shared key follow the rows of the latent."""
    rotated = model.rotary_dim
    shared = spec.name.rpartition(".")[0].endswith("kv_down")
    heads = 1 if shared else model.num_heads

    def join(parts: Sequence[Tensor]) -> Sequence[Tensor]:
        rows = parts[0].unflatten(0, (heads, -1))
        plain, pairs = rows.split([rows.shape[1] - rotated, rotated], dim=1)
        pairs = pairs.unflatten(1, (rotated // 2, 2)).transpose(1, 2).flatten(1, 2)
        return [torch.cat([plain, pairs] if shared else [pairs, plain], dim=1).flatten(0, 1)]

    def part(parts: Sequence[Tensor]) -> Sequence[Tensor]:
        rows = parts[0].unflatten(0, (heads, -1))
        sizes = [rotated, rows.shape[1] - rotated]
        plain, pairs = rows.split(sizes[::-1], dim=1) if shared else rows.split(sizes, dim=1)[::-1]
        pairs = pairs.unflatten(1, (2, rotated // 2)).transpose(1, 2).flatten(1, 2)
        return [torch.cat([plain, pairs], dim=1).flatten(0, 1)]

    return join, part


def _regrouped(qkv: Tensor, *pairs: int) -> Tensor:
    """Return `qkv`, (kv groups, query heads + 2, head_dim, ...), with regrouped channels of queries and keys.

    pairs: two sizes, into which head_dim is split; the two axes are then exchanged.
    """
    rotated, values = qkv.split([qkv.shape[1] - 1, 1], dim=1)
    return torch.cat([rotated.unflatten(2, pairs).transpose(2, 3).flatten(2, 3), values], dim=1)
