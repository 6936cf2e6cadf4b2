"""How two checkpoints of any formats differ, tensor by tensor."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megapipe.config.progress import tracked
from megapipe.conversion.contents import WEIGHTS, StoredTensor
from megapipe.conversion.source import Source

_PIECE = 1 << 22
"""Elements that are compared at once, in float64."""

_Tensors = Mapping[tuple[str, str], StoredTensor]
"""(kind, name) -> tensor."""


class Difference(NamedTuple):
    """Largest absolute difference of two tensors, and largest one relative to the larger of the two values."""

    absolute: float
    relative: float


def compare(ours: Source, theirs: Source, tolerance: float, weights_only: bool) -> tuple[list[str], int]:
    """Return one line for each tensor that differs or kind that is missing, and the number of compared tensors.

    tolerance: absolute differences up to it are none. Types may differ where values do not.
    """
    one, other = (_by_name(source, weights_only) for source in (ours, theirs))
    lines = [*_missing(one, other, "only in the first"), *_missing(other, one, "only in the second")]
    common = [key for key in one if key in other]
    with tracked([one[key] for key in common], "comparing") as tensors:
        for key, tensor in zip(common, tensors, strict=True):
            if tensor.shape != other[key].shape:
                lines.append(f"{_called(key)}: shape {tensor.shape} and {other[key].shape}")
                continue
            found = difference(ours.read(tensor), theirs.read(other[key]))
            if not found.absolute <= tolerance:
                lines.append(f"{_called(key)}: max difference {found.absolute:.3g}, relative {found.relative:.3g}")
    return lines, len(common)


def _missing(one: _Tensors, other: _Tensors, where: str) -> list[str]:
    """Return one line for each tensor of `one`, or for each kind of tensor, that `other` lacks."""
    kinds = Counter(kind for kind, _ in one)
    absent = [kind for kind in kinds if kind not in {kind for kind, _ in other}]
    lines = [f"{kind} of all {kinds[kind]} tensors: {where}" for kind in absent]
    return lines + [f"{_called(key)}: {where}" for key in one if key not in other and key[0] not in absent]


def difference(one: Tensor, other: Tensor) -> Difference:
    """How far two tensors of one shape are apart: 0 where bits or values are equal, infinite where one is not a
    number and the other is."""
    absolute = relative = 0.0
    for first, second in zip(one.reshape(-1).split(_PIECE), other.reshape(-1).split(_PIECE), strict=True):
        left, right = first.double(), second.double()
        equal = (left == right) | (left.isnan() & right.isnan())
        apart = _known((left - right).abs()).masked_fill(equal, 0.0)
        if bool(apart.any()):
            scale = torch.maximum(left.abs(), right.abs())
            absolute = max(absolute, float(apart.max()))
            relative = max(relative, float(_known(apart / scale).masked_fill(equal, 0.0).max()))
    return Difference(absolute, relative)


def _known(values: Tensor) -> Tensor:
    """What is not a number counts as infinite."""
    return values.masked_fill(values.isnan(), math.inf)


def _by_name(source: Source, weights_only: bool) -> dict[tuple[str, str], StoredTensor]:
    return {
        (tensor.kind, tensor.name): tensor
        for tensor in source.contents.tensors
        if tensor.kind == WEIGHTS or not weights_only
    }


def _called(key: tuple[str, str]) -> str:
    kind, name = key
    return name if kind == WEIGHTS else f"{kind} of {name}"
