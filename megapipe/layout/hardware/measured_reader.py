"""The measured parts of a hardware file: rows of collectives, and the `measured` section."""

import re
from typing import Any

import yaml

from megapipe.layout.hardware.measured import (
    LAYER_KINDS,
    OPERATIONS,
    TRANSPORTS,
    Contention,
    MeasuredCollective,
    MeasuredLayer,
    MeasuredWait,
    Measurements,
)
from megapipe.layout.hardware.sections import MISSING, Section, Values

SHARED = ("forward", "backward", "backward_input", "backward_weight")
TIMES = (*SHARED, "recompute")
ISO_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


def collective(values: Values, node: yaml.Node, path: str) -> MeasuredCollective:
    """One row of `collectives` of a link."""
    section = Section(values, node, path, ("operation", "ranks", "over", "latency", "bandwidth", "busy"))
    return MeasuredCollective(
        operation=section.take("operation", lambda each, place: values.one_of(each, place, OPERATIONS)),
        ranks=section.take("ranks", values.count),
        over=section.take("over", lambda each, place: values.one_of(each, place, TRANSPORTS)),
        latency=section.take("latency", values.non_negative),
        bandwidth=section.take("bandwidth", values.number),
        busy=section.take("busy", values.non_negative, 0.0),
    )


def measurements(values: Values, node: yaml.Node, path: str) -> Any:
    """The `measured` section."""
    known = ("date", "torch", "shape", "update_seconds", "action_seconds", "layers", "contention", "waits")
    section = Section(values, node, path, known)
    layers = section.take("layers", lambda each, place: values.items(each, place, lambda *row: _layer(values, *row)))
    waits = section.take("waits", lambda each, place: values.items(each, place, lambda *row: _wait(values, *row)), ())
    busy = section.take("contention", lambda each, place: values.items(each, place, lambda *row: _busy(values, *row)))
    if busy is not MISSING:
        _check_contention(values, section.fields["contention"], f"{path}.contention", busy)
    return Measurements(
        date=section.take("date", lambda each, place: _date(values, each, place)),
        torch=section.take("torch", values.text),
        shape=section.take("shape", lambda each, place: _texts(values, each, place), {}),
        update_seconds=section.take("update_seconds", values.non_negative),
        action_seconds=section.take("action_seconds", values.non_negative),
        layers=layers,
        contention=busy,
        waits=waits,
    )


def _layer(values: Values, node: yaml.Node, path: str) -> MeasuredLayer:
    return MeasuredLayer(**_row(values, node, path, TIMES))


def _wait(values: Values, node: yaml.Node, path: str) -> MeasuredWait:
    return MeasuredWait(**_row(values, node, path, SHARED))


def _row(values: Values, node: yaml.Node, path: str, times: tuple[str, ...]) -> dict[str, Any]:
    """Which layer, who shares it, and its seconds."""
    section = Section(values, node, path, ("kind", "tensor", "context", "micro_size", *times))
    kind = section.take("kind", lambda each, place: values.one_of(each, place, LAYER_KINDS))
    counts = {name: section.take(name, values.count) for name in ("tensor", "context", "micro_size")}
    return {"kind": kind, **counts, **{name: section.take(name, values.non_negative) for name in times}}


def _busy(values: Values, node: yaml.Node, path: str) -> Contention:
    section = Section(values, node, path, ("ranks", "factor"))
    return Contention(section.take("ranks", values.count), section.take("factor", values.number))


def _check_contention(values: Values, node: yaml.Node, path: str, rows: tuple[Contention, ...]) -> None:
    ranks = [each.ranks for each in rows]
    if MISSING not in ranks and ranks != sorted({1, *ranks}):
        values.tell(
            node,
            path,
            f"is for {', '.join(map(str, ranks))} ranks: write each number once, in ascending order, starting with 1",
        )


def _date(values: Values, node: yaml.Node, path: str) -> Any:
    text = values.text(node, path)
    if text is not MISSING and not ISO_DAY.fullmatch(text):
        return values.tell(node, path, f"is {text!r}, which is not a date: write it as 2026-01-31")
    return text


def _texts(values: Values, node: yaml.Node, path: str) -> dict[str, str]:
    """A mapping of any names to words."""
    names = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
    section = Section(values, node, path, names)
    return {name: section.take(name, values.text) for name in names}
