"""Reads `.metadata` of torch.distributed.checkpoint, a bare pickle that torch's weights-only loader cannot read.

Only classes on a written list are known. None is imported or called: each becomes a record of the state it was given.
Runs only in the confined process (`confined.py`).
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

_INTEGERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_FLOATS = {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}
DTYPES = frozenset({"bool", "complex64", "complex128"} | _INTEGERS | _FLOATS)
"""torch's names of the element types that a tensor may have."""

_METADATA = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
}
"""Module -> names that become records."""


class Refused(Exception):
    """A pickle that is not read; the message is the whole reason."""


class Inert:
    """Placeholder for an object of a listed class. name: its module and class. state: set once, never used."""

    __slots__ = ("state",)
    state: Any
    name = ""

    def __new__(cls, *args: Any) -> "Inert":
        record = object.__new__(cls)
        record.state = None
        return record

    def __init__(self, *args: Any) -> None:
        """Ignore the arguments of the object."""

    def __setstate__(self, state: Any) -> None:
        if self.state is not None:
            raise Refused(f"it sets the state of a {self.name} twice")
        self.state = state


def inert_classes(names: Mapping[str, Iterable[str]]) -> dict[str, type[Inert]]:
    """Return `module.name` -> the placeholder for it."""
    return {
        f"{module}.{name}": type(name, (Inert,), {"__slots__": (), "name": f"{module}.{name}"})
        for module, listed in names.items()
        for name in listed
    }


def _size(extents: Any = ()) -> tuple[int, ...]:
    if not isinstance(extents, (tuple, list)) or any(type(extent) is not int for extent in extents):
        raise Refused("it holds a torch.Size of something other than integers")
    return tuple(extents)


def _dictionary(*args: Any) -> dict[Any, Any]:
    """Return a dictionary in place of a defaultdict or an OrderedDict."""
    return OrderedDict(args[0]) if args and isinstance(args[0], (list, tuple)) else OrderedDict()


_KNOWN: dict[str, Any] = {
    **inert_classes(_METADATA),
    **{f"torch.{name}": f"torch.{name}" for name in DTYPES},
    "torch.Size": _size,
    "collections.OrderedDict": _dictionary,
    "collections.defaultdict": _dictionary,
    "builtins.dict": _dictionary,
    "builtins.set": set,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get(f"{module}.{name}")
        if known is None:
            raise Refused(f"it names {module}.{name}, which is not on the list of what a checkpoint may hold")
        return known


def unpickled(content: bytes) -> Any:
    """Return the content of a bare pickle, with an Inert for each object. Raises Refused, or any error if damaged."""
    return _Unpickler(io.BytesIO(content)).load()
