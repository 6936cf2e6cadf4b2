"""The confined process that reads pickles: run by its path with `python -I`, so it imports the standard library alone.

Each request on stdin is a pickle behind its length; each reply on stdout a JSON text behind its length. Nothing named
by a pickle is imported or called: names on the list below become inert records, any other name is refused.
"""

import collections
import ctypes
import io
import json
import os
import pickle
import resource
import struct
import sys
from typing import Any, BinaryIO

LENGTH = struct.Struct("<Q")
MAX_PICKLE_BYTES = 1 << 30
"""Largest pickle that is read; that of a checkpoint with a million shards has some 200 MB."""
MEMORY_BYTES = 8 << 30
"""Address space of the process."""
CPU_SECONDS = 120
MAX_NODES = 50_000_000
"""Values in a reply: a small pickle can name one list again and again, ever deeper."""
MAX_DEPTH = 100
MAX_CHARACTERS = 1 << 30
"""Characters of text in a reply, which a small pickle can repeat as well."""

NO_NEW_PRIVILEGES = 38  # linux/prctl.h
NOBODY = 65534

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
_DTYPES = {
    *_STORAGES.values(),
    "float8_e4m3fn",
    "float8_e5m2",
    "complex64",
    "complex128",
    "uint16",
    "uint32",
    "uint64",
}

INERT = {
    "argparse": {"Namespace"},
    "_io": {"BytesIO"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "signal": {"Signals"},
    "torch": {"Size", "device", *_DTYPES},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
    **{f"{package}.multiarray": {"_reconstruct", "scalar"} for package in ("numpy.core", "numpy._core")},
    "numpy": {"ndarray", "dtype"},
    **{
        module: {
            "ModelType",
            "Fp8Recipe",
            "Fp4Recipe",
            "LayerType",
            "AttnType",
            "AttnMaskType",
            "AttnBackend",
            "CudaGraphScope",
            "PositionEmbeddingType",
            "RerunDiagnostic",
            "RerunMode",
            "RerunState",
        }
        for module in (
            "megatron.core.enums",
            "megatron.core.transformer.enums",
            "megatron.core.rerun_state_machine",
            "megatron.legacy.model.enums",
            "megatron.model.enums",
        )
    },
}
"""Module -> names that become records: what they are called with is kept, and nothing is done."""


class Refused(Exception):
    """A pickle that is not read; the message is the whole reason."""


class Record:
    """Stands for an object of a listed class. name: module and class."""

    name = ""
    state: Any = None

    def __new__(cls, *args: Any) -> "Record":
        found = object.__new__(cls)
        found.args = args
        return found

    args: tuple[Any, ...] = ()

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Storage:
    """What a tensor's elements lie in. key: names its file in the archive. num_elements: of `dtype`."""

    def __init__(self, key: str, dtype: str, num_elements: int) -> None:
        self.key, self.dtype, self.num_elements = key, dtype, num_elements


class Tensor:
    """Where a tensor lies in its storage, in elements."""

    def __init__(self, storage: Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
        numbers = (offset, *shape, *stride)
        if not isinstance(storage, Storage) or any(type(number) is not int or number < 0 for number in numbers):
            raise Refused("it holds a tensor without a place in a storage")
        self.storage, self.offset, self.shape, self.stride = storage, offset, shape, stride


def _tensor(storage: Any, offset: int, shape: Any, stride: Any, *rest: Any) -> Tensor:
    plain = [tuple(value.args[0]) if isinstance(value, Record) else tuple(value) for value in (shape, stride)]
    return Tensor(storage, offset, plain[0], plain[1])


def _parameter(tensor: Any, *rest: Any) -> Any:
    return tensor


def _dictionary(*args: Any) -> Any:
    """A defaultdict loses its factory, an OrderedDict nothing that counts."""
    return collections.OrderedDict() if not args or not isinstance(args[0], (list, tuple)) else _pairs(args[0])


def _pairs(pairs: Any) -> Any:
    return collections.OrderedDict((key, value) for key, value in pairs)


def _encoded(text: str, encoding: str = "latin1") -> bytes:
    """How protocol 2 spells bytes."""
    if encoding not in ("latin1", "latin-1"):
        raise Refused(f"it encodes text as {encoding!r}")
    return text.encode("latin1")


_BUILDERS = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): _dictionary,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("_codecs", "encode"): _encoded,
    ("builtins", "dict"): _dictionary,
    ("builtins", "set"): set,
}


class Reader(pickle.Unpickler):
    """An unpickler that knows the lists above and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        if (module, name) in _BUILDERS:
            return _BUILDERS[module, name]
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in _DTYPES:
            return f"torch.{name}"
        if name in INERT.get(module, ()):
            return type(name, (Record,), {"name": f"{module}.{name}"})
        raise Refused(f"it names {module}.{name}, which is not on the list of what a checkpoint may hold")

    def persistent_load(self, place: Any) -> Storage:
        match place:
            case ("storage", str(dtype), str(key), str(), int(count)) if count >= 0 and dtype in _DTYPES:
                return Storage(key, dtype, count)
        raise Refused("it refers to something that is no storage of a known dtype")


class Encoder:
    """A read pickle as JSON values. Objects are {kind: content}; lists and scalars stand for themselves."""

    def __init__(self) -> None:
        self.nodes = self.characters = 0

    def encode(self, value: Any, depth: int = 0) -> Any:
        """The JSON value. Raises Refused for one that is too large, too deep or refers to itself."""
        self.nodes += 1
        if isinstance(value, str):
            self.characters += len(value)
        if self.nodes > MAX_NODES or self.characters > MAX_CHARACTERS:
            raise Refused(f"it spells out more than {MAX_NODES} values or {MAX_CHARACTERS} characters")
        if depth > MAX_DEPTH:
            raise Refused(f"it is nested deeper than {MAX_DEPTH} levels")
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, list):
            return [self.encode(each, depth + 1) for each in value]
        return self._object(value, depth + 1)

    def _object(self, value: Any, depth: int) -> dict[str, Any]:
        if isinstance(value, (tuple, set, frozenset)):
            return {"tuple": [self.encode(each, depth) for each in value]}
        if isinstance(value, dict):
            return {"dict": [[self.encode(key, depth), self.encode(each, depth)] for key, each in value.items()]}
        if isinstance(value, Tensor):
            held = value.storage
            place = {"key": held.key, "dtype": held.dtype, "storage_elements": held.num_elements}
            return {"tensor": {**place, "offset": value.offset, "shape": value.shape, "stride": value.stride}}
        if isinstance(value, Record):
            state = value.state
            return {"record": [value.name, self.encode([*value.args], depth), self.encode(state, depth)]}
        if isinstance(value, (bytes, bytearray)):
            return {"bytes": len(value)}
        if isinstance(value, type) and issubclass(value, Record):
            return {"record": [value.name, [], None]}
        raise Refused(f"it holds a {type(value).__name__}")


def described(content: bytes) -> dict[str, Any]:
    """{"value": ...} of one pickle, or {"refused": why}."""
    try:
        return {"value": Encoder().encode(Reader(io.BytesIO(content)).load())}
    except Refused as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"refused": f"it asks for more memory than the {MEMORY_BYTES >> 30} GiB that reading it may take"}
    except Exception as error:  # a damaged or hostile pickle can end in any of them
        return {"refused": f"it is not a readable pickle: {type(error).__name__}: {error}"}


def confine() -> None:
    """Give up, for good, writing to files, opening files and sockets, starting processes, and privileges."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    if os.geteuid() == 0:  # root could raise its limits again
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        except OSError:
            pass  # a container may forbid it; the limits hold for what does not undo them
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer until there are no more requests."""
    while prefix := requests.read(LENGTH.size):
        (length,) = LENGTH.unpack(prefix)
        reply = json.dumps(described(requests.read(length))).encode()
        replies.write(LENGTH.pack(len(reply)) + reply)
        replies.flush()


if __name__ == "__main__":
    confine()
    serve(sys.stdin.buffer, sys.stdout.buffer)
