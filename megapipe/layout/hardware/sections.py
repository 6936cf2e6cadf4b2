"""Fields of a YAML file, read strictly: every problem is told, with line, value, rule and way out."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import yaml

from megapipe.config.errors import nearest


class _Missing:
    """Stands for what could not be read, once its problem is told."""


MISSING: Any = _Missing()


class Section:
    """A mapping of a file, of known keys alone: its fields are taken by name."""

    def __init__(self, reader: "Values", node: yaml.Node | None, path: str, known: Iterable[str]) -> None:
        self.reader, self.path, self.node = reader, path, node
        self.fields: dict[str, yaml.Node] = {}
        if not isinstance(node, yaml.MappingNode):
            reader.tell(node, path or "the file", "is not a mapping: write `key: value` lines")
            return
        known = tuple(known)
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                reader.tell(key, path or "the file", "has a list or mapping as a key: write a name")
                continue
            place = f"{path}.{key.value}" if path else key.value
            if key.value not in known:
                hint = nearest(key.value, known)
                reader.tell(key, place, f"is an unknown key{hint} (known here: {', '.join(known)})")
            elif key.value in self.fields:
                reader.tell(key, place, "appears twice in one mapping; keep one of them")
            else:
                self.fields[key.value] = value

    def take(self, name: str, read: Callable[[yaml.Node, str], Any], default: Any = MISSING) -> Any:
        """The field as `read` understands it; `default` where it is left out, a problem where that is not given."""
        place = f"{self.path}.{name}" if self.path else name
        if name in self.fields:
            return read(self.fields[name], place)
        if default is MISSING and isinstance(self.node, yaml.MappingNode):
            self.reader.tell(self.node, place, "is missing; add it")
        return default


class Values:
    """Reads single values, and collects every problem that it meets. origin: name of the file."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.problems: list[str] = []

    def tell(self, node: yaml.Node | None, place: str, problem: str) -> Any:
        line = f":{node.start_mark.line + 1}" if node is not None else ""
        self.problems.append(f"{self.origin}{line}: {place} {problem}")
        return MISSING

    def text(self, node: yaml.Node, place: str) -> Any:
        if not isinstance(node, yaml.ScalarNode) or not node.value:
            return self.tell(node, place, "is not text: write a name")
        return node.value

    def one_of(self, node: yaml.Node, place: str, known: tuple[str, ...]) -> Any:
        """A word of a few."""
        text = self.text(node, place)
        if text is not MISSING and text not in known:
            return self.tell(node, place, f"is {text!r}, but must be one of {', '.join(known)}{nearest(text, known)}")
        return text

    def number(self, node: yaml.Node, place: str, rule: str = "above 0", valid: Callable[[float], bool] = bool) -> Any:
        """A finite number of a rule; 1e9 counts, which YAML 1.1 reads as text."""
        written = node.value if isinstance(node, yaml.ScalarNode) else "a list or mapping"
        try:
            value = float(written)
        except ValueError:
            return self.tell(
                node, place, f"is {written!r}, which is not a number: it must be {rule}, without its unit"
            )
        if not math.isfinite(value) or value < 0 or not valid(value):
            return self.tell(node, place, f"is {written}, but must be {rule}")
        return value

    def amount(self, node: yaml.Node, place: str) -> Any:
        """FLOP/s, bytes or bytes per second: what lies outside of the bounds was written in another unit."""
        field = place.rpartition(".")[2]
        unit = "bytes (80e9, not 80)" if field == "memory_bytes" else "FLOP/s (312e12, not 312)"
        if "bandwidth" in field or field.startswith("link_matrix"):
            unit = "bytes per second (50e9, not 50)"
        rule = f"from 1e3 to 1e24, in {unit}"
        return self.number(node, place, rule, lambda value: 1e3 <= value <= 1e24)

    def non_negative(self, node: yaml.Node, place: str) -> Any:
        return self.number(node, place, "0 or more", lambda value: True)

    def seconds(self, node: yaml.Node, place: str) -> Any:
        """A latency: more than a second was written in another unit."""
        return self.number(node, place, "from 0 to 1, in seconds (3e-6, not 3)", lambda value: value <= 1)

    def share(self, node: yaml.Node, place: str) -> Any:
        return self.number(node, place, "above 0 and at most 1", lambda value: 0 < value <= 1)

    def count(self, node: yaml.Node, place: str) -> Any:
        rule = "a whole number from 1 to 1e9"
        value = self.number(node, place, rule, lambda value: 1 <= value <= 1e9 and value == int(value))
        return value if value is MISSING else int(value)

    def items(self, node: yaml.Node, place: str, read: Callable[[yaml.Node, str], Any]) -> Any:
        if not isinstance(node, yaml.SequenceNode) or not node.value:
            return self.tell(node, place, "is not a list: write one or more `- ` items")
        return tuple(read(each, f"{place}[{index}]") for index, each in enumerate(node.value))
