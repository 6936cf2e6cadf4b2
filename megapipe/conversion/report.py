"""What `inspect` tells of a checkpoint."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from megapipe.checkpoint.tensor_file import DTYPES
from megapipe.conversion.contents import Contents, StoredTensor
from megapipe.conversion.formats import Format

_LOSSES = 3


def as_text(known: Format, contents: Contents) -> str:
    """Tables for people: the model, the run, sums by kind, every tensor."""
    lines = [known.title, "", *_table(_model_rows(contents)), ""]
    lines += [*_table(_run_rows(contents)), ""] if contents.run is not None else []
    kinds = [["kind", "tensors", "elements", "bytes", "type"]]
    for kind in contents.kinds:
        those = [tensor for tensor in contents.tensors if tensor.kind == kind]
        types = ", ".join(sorted({tensor.dtype for tensor in those}))
        kinds.append([kind, str(len(those)), f"{_sum(those, _elements):,}", f"{_sum(those, _bytes):,}", types])
    lines += [*_table(kinds), ""]
    rows = [["tensor", "kind", "shape", "type", "bytes"]]
    rows += [
        [each.name, each.kind, " x ".join(map(str, each.shape)), each.dtype, f"{_bytes(each):,}"]
        for each in contents.tensors
    ]
    return "\n".join(lines + _table(rows))


def as_json(known: Format, contents: Contents) -> str:
    """The same for programs, with the whole configuration."""
    run = contents.run
    document: dict[str, Any] = {
        "format": known.title,
        "model": asdict(contents.model),
        "run": None,
        "parameters": _sum([each for each in contents.tensors if each.kind == "weights"], _elements),
        "bytes": _sum(contents.tensors, _bytes),
        "tensors": [{**asdict(tensor), "bytes": _bytes(tensor)} for tensor in contents.tensors],
    }
    if run is not None:
        losses = [[step, loss if math.isfinite(loss) else None] for step, loss in run.losses]
        document["run"] = {**asdict(run), "losses": losses}
    return json.dumps(document, indent=2)


def _model_rows(contents: Contents) -> list[list[str]]:
    """Fields of the model that are not as left alone, and those that always matter."""
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
    rows = [
        ["step", f"{run.step:,}"],
        ["consumed samples", f"{run.consumed_samples:,}"],
        ["precision", run.precision],
    ]
    if run.losses:
        rows.append(["last losses", ", ".join(f"{step}: {loss:.4f}" for step, loss in run.losses[-_LOSSES:])])
    return rows


def _table(rows: list[list[str]]) -> list[str]:
    """Columns side by side; those of numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    numeric = [all(row[column].replace(",", "").isdigit() for row in rows[1:]) for column in range(len(widths))]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in rows
    ]


def _sum(tensors: Iterable[StoredTensor], measure: Any) -> int:
    return sum(measure(tensor) for tensor in tensors)


def _elements(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape)


def _bytes(tensor: StoredTensor) -> int:
    return _elements(tensor) * DTYPES[tensor.dtype].itemsize
