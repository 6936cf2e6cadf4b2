"""Files: those of unknown origin are decoded safely, and written ones survive a power failure.

Any bytes give a value or one error, in bounded time and memory. Values have only finite numbers below 1e100 (YAML also
has .inf and .nan), text that can be encoded, no repeated keys, and at most MAX_DEPTH levels, so recursion over them is
safe.
"""

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO, NoReturn, Union, get_args, get_origin

import yaml

from megapipe.config.field_types import has_other_digits

MAX_DEPTH = 100
MAX_JSON_BYTES = 1 << 28
MAX_YAML_CHARACTERS = 1 << 20
"""Largest YAML text. PyYAML reads roughly 100,000 characters a second."""
MAX_YAML_BYTES = 4 * MAX_YAML_CHARACTERS
"""Largest YAML file: a character of UTF-8 has at most 4 bytes."""

DECODING_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions that code may raise on a decoded value with another structure than expected."""

Failure = Callable[[str], Exception]
"""Creates the exception to raise from a message; CheckpointError, for example."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.S)
_NOT_BRACKETS = re.compile(r"[^\[\]{}]+")
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MAX_NUMBER_CHARACTERS = 100
_LARGE_NUMBER = re.compile(r"\d{40}|[eE]\+?\d{3}", re.ASCII)


def read_bytes(path: Path, failure: Failure, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises FileNotFoundError or NotADirectoryError if the file does not exist, and `failure` if it is unreadable,
    larger than `max_bytes`, or not a regular file, which could block or never end.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise failure(f"{path} is not a regular file; choose a file")
            if state.st_size > max_bytes:
                raise failure(f"{path} has {state.st_size:,} bytes; at most {max_bytes:,} are read")
            content = file.read(max_bytes + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise failure(f"cannot read {path}: {error.strerror}; choose another, or change its permissions") from error
    if len(content) > max_bytes:
        raise failure(f"{path} has more than {max_bytes:,} bytes")
    return content


def read_text(path: Path, failure: Failure, advice: str, max_bytes: int = MAX_JSON_BYTES) -> str:
    """Return the content of a UTF-8 text file, without a byte order mark. advice: ends the message of an error.

    Raises `failure` if the file does not exist or is not UTF-8, and as `read_bytes` does.
    """
    try:
        return read_bytes(path, failure, max_bytes).decode("utf-8-sig")
    except OSError as error:
        why = error.strerror
    except UnicodeDecodeError as error:
        why = f"it is not UTF-8 text: {error.reason} at byte {error.start}"
    raise failure(f"cannot read {path}: {why}; {advice}")


def read_json(path: Path, failure: Failure, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the value in a JSON file. Raises the exceptions of `read_bytes` and `decode_json`."""
    return decode_json(read_bytes(path, failure, max_bytes), str(path), failure)


def decode_json(content: bytes, origin: str, failure: Failure) -> Any:
    """Return the value of a JSON text in UTF-8. Raises `failure`, in one line that starts with `origin`."""
    try:
        text = content.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=no_constant)
        _check_scalars(text)
    except RecursionError:
        raise failure(f"{origin} is not readable JSON: it is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise failure(f"{origin} is not readable JSON: {_one_line(error)}") from error
    return value


def is_of_type(value: Any, declared: Any) -> bool:
    """Return whether a decoded value has a field's type: a class, a union, or a container, whose contents are only
    checked in a mapping to int. Integers are counts, sizes and ids, so they must be at least 0; a bool is not one."""
    if get_origin(declared) in (Union, UnionType):
        return any(is_of_type(value, each) for each in get_args(declared))
    if not isinstance(value, get_origin(declared) or declared):
        return False
    if isinstance(value, dict) and get_args(declared)[1:] == (int,):
        return all(is_of_type(each, int) for each in value.values())
    if isinstance(value, bool):
        return declared is not int
    return not isinstance(value, int) or value >= 0


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        repeated = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"it has the key {repeated!r} twice in one object; keep one of them")
    return values


def no_constant(name: str) -> NoReturn:
    """Refuse NaN or Infinity, for `json`, which reads them by default. Raises ValueError."""
    raise ValueError(f"it contains {name}, which JSON does not allow")


def _check_scalars(text: str) -> None:
    """Raise for a valid JSON text that is too deep, or has numbers or text that later code could not handle."""
    number = _LARGE_NUMBER.search(text) and _LARGE_NUMBER.search(_STRING.sub("", text))
    if number:
        raise ValueError(f"it contains a number with 40 or more digits, or of 1e100 or more, at {number[0]!r}")
    if text.count("[") + text.count("{") > MAX_DEPTH:
        brackets = _NOT_BRACKETS.sub("", _STRING.sub("", text)).replace("{", "[").replace("}", "]")
        for _ in range(MAX_DEPTH):
            brackets = brackets.replace("[]", "")
        if brackets:
            raise RecursionError
    if "\\u" in text:  # an escape can spell half of a surrogate pair, which no encoder takes
        json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class StrictLoader(yaml.SafeLoader):
    """YAML of plain values: no aliases, no repeated keys, bounded depth; `3e-4` is a number, as in other tools.

    Aliases (`*name`) let a few lines stand for gigabytes, and configurations do not need them.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one node.

        Raises yaml.YAMLError for an alias, for too deep nesting, and for a number that is too long or has digits of
        another script than ASCII.
        """
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.YAMLError(
                f"line {event.start_mark.line + 1}: aliases (*{event.anchor}) are not read; write the value out"
            )
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.YAMLError(f"lists or mappings are nested deeper than {MAX_DEPTH} levels")
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        if not isinstance(node, yaml.ScalarNode):
            return node
        line = node.start_mark.line + 1
        if node.tag in _NUMBERS and len(node.value) > _MAX_NUMBER_CHARACTERS:
            raise yaml.YAMLError(f"line {line}: a number has more than {_MAX_NUMBER_CHARACTERS} characters")
        if node.style is None and has_other_digits(node.value):
            raise yaml.YAMLError(f"line {line}: {node.value} is not a number; write it in the digits 0 to 9")
        return node


def _mapping(loader: StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    values: dict[Any, Any] = {}
    for name, value in node.value:
        key, line = loader.construct_object(name, deep=True), name.start_mark.line + 1
        if isinstance(key, (dict, list)):
            raise yaml.YAMLError(f"line {line}: a key is a list or mapping; write a name")
        if key in values:
            raise yaml.YAMLError(f"line {line}: the key {key!r} appears twice in one mapping; keep one of them")
        values[key] = loader.construct_object(value, deep=True)
    return values


StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
# YAML 1.1 reads 3e-4 as a string; users of every other tool write it.
StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.\d*|\.\d+|\d+)[eE][-+]?\d+$", re.ASCII),
    list("-+0123456789."),
)


def decode_yaml(text: str, max_characters: int = MAX_YAML_CHARACTERS) -> Any:
    """Return the plain value of a YAML text. Raises only yaml.YAMLError."""
    return _decoded(text, max_characters, yaml.load)


def compose_yaml(text: str, max_characters: int = MAX_YAML_CHARACTERS) -> yaml.Node | None:
    """Return the node tree of a YAML text, without shared nodes. Raises only yaml.YAMLError."""
    node: yaml.Node | None = _decoded(text, max_characters, yaml.compose)
    return node


def _decoded(text: str, max_characters: int, decode: Callable[..., Any]) -> Any:
    if len(text) > max_characters:
        raise yaml.YAMLError(f"it has {len(text):,} characters; at most {max_characters:,} are read")
    try:
        return decode(text, Loader=StrictLoader)
    except yaml.MarkedYAMLError as error:  # its own text has several lines
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise yaml.YAMLError(where + " ".join(f"{error.problem or error}".split())) from error
    except yaml.YAMLError as error:
        raise yaml.YAMLError(_one_line(error)) from error
    except DECODING_ERRORS as error:  # for example a date in month 13
        raise yaml.YAMLError(f"a value cannot be read: {_one_line(error)}") from error


def flat(values: Mapping[Any, Any], above: str = "") -> dict[str, Any]:
    """Return the fields of nested groups by their dotted names; groups below MAX_DEPTH levels stay whole."""
    fields: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value and above.count(".") < MAX_DEPTH:
            fields.update(flat(value, f"{above}{name}."))
        else:
            fields[f"{above}{name}"] = value
    return fields


def flush_to_disk(file: BinaryIO) -> None:
    """Write a file's data from the buffers of Python and the kernel to the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Wait until renames in the folder would survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it; create its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            flush_to_disk(file)
        os.replace(partial, path)
        flush_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)
