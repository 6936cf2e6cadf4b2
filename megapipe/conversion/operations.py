"""Conversion, averaging, comparison, verification and description of checkpoints, with one tensor in memory at a
time."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megapipe.checkpoint.directory import steps
from megapipe.checkpoint.storage import CheckpointError, on_failure
from megapipe.checkpoint.tensor_file import DTYPES
from megapipe.config.command_line import aligned, tracked
from megapipe.conversion.formats import WEIGHTS, Contents, Format, Source, StoredTensor, Target

_PIECE = 1 << 22
"""Number of elements that are cast or compared at once, because float64 and the search for infinities take memory."""

PRECISIONS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""Types of written weights, and their names in safetensors files. Moments keep their types."""


def contents_for(contents: Contents, target: Format, precision: str | None, weights_only: bool) -> Contents:
    """Return the part of a checkpoint's contents that is written to a target."""
    keeps_run = target.keeps_run and not weights_only
    tensors = [tensor for tensor in contents.tensors if keeps_run or tensor.kind == WEIGHTS]
    if not any(tensor.kind == WEIGHTS for tensor in tensors):
        raise CheckpointError("the checkpoint contains no weights, so there is nothing to convert")
    if precision is not None:  # earlier weights are cast too
        dtype = PRECISIONS[precision]
        tensors = [replace(each, dtype=dtype) if each.kind.startswith(WEIGHTS) else each for each in tensors]
    # The run state is kept as the origin of the weights.
    return replace(contents, tensors=tuple(tensors), applied_updates=contents.applied_updates if keeps_run else {})


def transfer(source: Source, contents: Contents, target: Target) -> list[str]:
    """Write every tensor of `contents` to a target, cast to its type there; return the target's notes.

    If it raises CheckpointError, nothing exists at the target's path.
    """
    stored = _by_name(source, weights_only=False)
    with on_failure(target.abandon), tracked(contents.tensors, "converting") as tensors:
        for tensor in tensors:
            target.add(tensor, cast(source.read(stored[tensor.kind, tensor.name]), tensor))
        return target.finish()


def cast(values: Tensor, tensor: StoredTensor) -> Tensor:
    """Cast `values` to the type of `tensor`. Raises CheckpointError if finite values would become infinite."""
    dtype = DTYPES[tensor.dtype]
    if values.dtype == dtype:
        return values
    result = torch.empty(values.shape, dtype=dtype)
    narrower = torch.finfo(dtype).max < torch.finfo(values.dtype).max
    for old, new in zip(values.reshape(-1).split(_PIECE), result.view(-1).split(_PIECE), strict=True):
        new.copy_(old)
        if narrower and bool((new.isinf() & old.isfinite()).any()):
            raise CheckpointError(
                f"{tensor.kind} of {tensor.name} has values beyond {torch.finfo(dtype).max:g}, the largest value of "
                f"{tensor.dtype}; choose --precision bf16 or fp32"
            )
    return result


_SUMMED_ELEMENTS = 1 << 24
"""Number of elements that are summed at once."""


def average(sources: Sequence[Source], contents: Contents, open_target: Callable[[], Target]) -> list[str]:
    """Write the mean of the sources' weights (Izmailov et al., 1803.05407), summed in float64. Return the notes.

    contents: the target's contents. Raises CheckpointError, before it writes, if the sources have different models.
    """
    named = [_by_name(source, weights_only=True) for source in sources]
    shapes = [{name: tensor.shape for (_, name), tensor in weights.items()} for weights in named]
    for number, other in enumerate(shapes[:-1], start=1):
        if other != shapes[-1]:
            name = next(name for name in {**other, **shapes[-1]} if other.get(name) != shapes[-1].get(name))
            raise CheckpointError(
                f"different models cannot be averaged: {name} has shape {other.get(name)} in "
                f"checkpoint {number} and {shapes[-1].get(name)} in the last one"
            )
    target = open_target()
    with on_failure(target.abandon), tracked(contents.tensors, "averaging") as tensors:
        for tensor in tensors:
            parts = [(source, weights[WEIGHTS, tensor.name]) for source, weights in zip(sources, named, strict=True)]
            target.add(tensor, _mean(parts, tensor))
        return target.finish()


def _mean(parts: Sequence[tuple[Source, StoredTensor]], tensor: StoredTensor) -> Tensor:
    """Return the mean in the type of `tensor`. Some rows are computed at a time, to limit the memory for float64."""
    mean = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
    rows = max(1, _SUMMED_ELEMENTS * tensor.shape[0] // mean.numel())
    for start in range(0, tensor.shape[0], rows):
        index = (slice(start, min(start + rows, tensor.shape[0])), *(slice(0, length) for length in tensor.shape[1:]))
        total = torch.zeros(mean[index].shape, dtype=torch.float64)
        for source, stored in parts:
            total.add_(source.read(stored, index).double())
        mean[index] = cast(total.div_(len(parts)), tensor)
    return mean


_Tensors = Mapping[tuple[str, str], StoredTensor]
"""(kind, name) -> tensor."""


class Difference(NamedTuple):
    """Largest absolute difference of two tensors, and the largest difference relative to the larger value."""

    absolute: float
    relative: float


def compare(first: Source, second: Source, tolerance: float, weights_only: bool) -> tuple[list[str], int]:
    """Return one line for each tensor that differs and each kind that is missing, and the number of compared tensors.

    tolerance: largest absolute difference that is ignored. Types may differ if values are equal.
    """
    one, other = (_by_name(source, weights_only) for source in (first, second))
    lines = [*_missing(one, other, "only in the first"), *_missing(other, one, "only in the second")]
    common = [key for key in one if key in other]
    with tracked([one[key] for key in common], "comparing") as tensors:
        for key, tensor in zip(common, tensors, strict=True):
            if tensor.shape != other[key].shape:
                lines.append(f"{_label(key)}: shape {tensor.shape} and {other[key].shape}")
                continue
            largest = difference(first.read(tensor), second.read(other[key]))
            if not largest.absolute <= tolerance:
                lines.append(f"{_label(key)}: max difference {largest.absolute:.3g}, relative {largest.relative:.3g}")
    return lines, len(common)


def _missing(one: _Tensors, other: _Tensors, where: str) -> list[str]:
    """Return one line for each tensor of `one`, or for each kind of tensor, that `other` lacks."""
    kinds = Counter(kind for kind, _ in one)
    absent = [kind for kind in kinds if kind not in {kind for kind, _ in other}]
    lines = [f"{kind} of all {kinds[kind]} tensors: {where}" for kind in absent]
    return lines + [f"{_label(key)}: {where}" for key in one if key not in other and key[0] not in absent]


def difference(one: Tensor, other: Tensor) -> Difference:
    """Return the difference of two tensors of the same shape.

    It is 0 for equal bits or values, and infinite if only one of two elements is not a number.
    """
    absolute = relative = 0.0
    for first, second in zip(one.reshape(-1).split(_PIECE), other.reshape(-1).split(_PIECE), strict=True):
        left, right = first.double(), second.double()
        equal = (left == right) | (left.isnan() & right.isnan())
        distance = _with_infinity((left - right).abs()).masked_fill(equal, 0.0)
        if bool(distance.any()):
            scale = torch.maximum(left.abs(), right.abs())
            absolute = max(absolute, float(distance.max()))
            relative = max(relative, float(_with_infinity(distance / scale).masked_fill(equal, 0.0).max()))
    return Difference(absolute, relative)


def _with_infinity(values: Tensor) -> Tensor:
    """Replace values that are not numbers by infinity."""
    return values.masked_fill(values.isnan(), math.inf)


def _by_name(source: Source, weights_only: bool) -> dict[tuple[str, str], StoredTensor]:
    return {
        (tensor.kind, tensor.name): tensor
        for tensor in source.contents.tensors
        if tensor.kind == WEIGHTS or not weights_only
    }


def _label(key: tuple[str, str]) -> str:
    kind, name = key
    return name if kind == WEIGHTS else f"{kind} of {name}"


def checkpoints_of(path: Path) -> list[Path]:
    """Return all checkpoints of a run's folder; any other folder is one checkpoint."""
    return [*(steps(path / "checkpoints") or steps(path)).values()] or [path]


def problems_of(source: Source) -> list[str]:
    """Return the problems of a checkpoint, one line for each problem of each bad file."""
    affected: dict[str, list[str]] = {}
    with tracked(source.contents.tensors, "verifying") as tensors:
        for tensor in tensors:
            for problem in source.verify(tensor):
                affected.setdefault(problem, []).append(_label((tensor.kind, tensor.name)))
    return [f"{problem}; lost: {', '.join(names)}" for problem, names in affected.items()]


_LOSSES = 3


def as_text(source_format: Format, contents: Contents) -> str:
    """Return the contents as tables for users: the model, the run, totals by kind, all tensors."""
    lines = [source_format.title, "", *_table(_model_rows(contents)), ""]
    lines += [*_table(_run_rows(contents)), ""] if contents.run is not None else []
    kinds = [["kind", "tensors", "elements", "bytes", "type"]]
    for kind in contents.kinds:
        members = [tensor for tensor in contents.tensors if tensor.kind == kind]
        types = ", ".join(sorted({tensor.dtype for tensor in members}))
        elements, num_bytes = (sum(each.num_elements for each in members), sum(each.num_bytes for each in members))
        kinds.append([kind, str(len(members)), f"{elements:,}", f"{num_bytes:,}", types])
    lines += [*_table(kinds), ""]
    rows = [["tensor", "kind", "shape", "type", "bytes"]]
    rows += [
        [each.name, each.kind, " x ".join(map(str, each.shape)), each.dtype, f"{each.num_bytes:,}"]
        for each in contents.tensors
    ]
    return "\n".join(lines + _table(rows))


def as_json(source_format: Format, contents: Contents) -> str:
    """Return the contents as JSON for programs, with the whole configuration."""
    document = {
        "format": source_format.title,
        "model": asdict(contents.model),
        "run": None if contents.run is None else contents.run.as_dict(),
        "parameters": sum(each.num_elements for each in contents.tensors if each.kind == WEIGHTS),
        "bytes": sum(each.num_bytes for each in contents.tensors),
        "tensors": [{**asdict(tensor), "bytes": tensor.num_bytes} for tensor in contents.tensors],
    }
    return json.dumps(document, indent=2)


def _model_rows(contents: Contents) -> list[list[str]]:
    """Return the model's fields that differ from their defaults, and some important ones."""
    model = contents.model
    defaults = type(model)()
    always = ("vocabulary_size", "num_layers", "hidden_size", "num_heads", "max_positions")
    return [
        [f"model.{each.name}", str(getattr(model, each.name))]
        for each in fields(model)
        if each.name in always or getattr(model, each.name) != getattr(defaults, each.name)
    ]


def _run_rows(contents: Contents) -> list[list[str]]:
    run = contents.run
    assert run is not None
    losses = ", ".join(f"{step}: {loss:.4f}" for step, loss in run.losses[-_LOSSES:])
    return [
        ["step", f"{run.step:,}"],
        ["consumed samples", f"{run.consumed_samples:,}"],
        ["precision", run.precision],
        *([["last losses", losses]] if losses else []),
    ]


def _table(rows: list[list[str]]) -> list[str]:
    """Return aligned columns; columns of numbers are aligned to the right."""
    return aligned(rows, lambda cells: all(cell.replace(",", "").isdigit() for cell in cells))
