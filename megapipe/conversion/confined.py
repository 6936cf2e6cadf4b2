"""The confined process that reads pickles for `archive.py`, which forks it.

Each request is an open file and a range of its bytes. Each reply is the length of a JSON text and the text, which
describes the content of the pickle. torch's own weights-only loader reads archives of torch.save on the meta device:
it reads no storage and returns the place of each one.

`.metadata` of torch.distributed.checkpoint is a bare pickle, which torch's loader cannot read, so it is read here.
Only classes on a fixed list are accepted. None of them is imported or called: each object becomes a record of its
state.
"""

import ctypes
import functools
import gc
import io
import json
import os
import pickle
import re
import resource
import socket
import struct
import time
import warnings
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import IO, Any, cast

import torch
from torch.serialization import clear_safe_globals, safe_globals

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
"""Names whose objects become records, by module."""


class Refused(Exception):
    """A pickle that is refused; the message is the complete reason."""


class Inert:
    """Placeholder for an object of a listed class. name: its module and class. state: its pickled state."""

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
    """Return the placeholder class of each name, by `module.name`."""
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


_METADATA_CLASSES: dict[str, Any] = {
    **inert_classes(_METADATA),
    **{f"torch.{name}": f"torch.{name}" for name in DTYPES},
    "torch.Size": _size,
    "collections.OrderedDict": _dictionary,
    "collections.defaultdict": _dictionary,
    "builtins.dict": _dictionary,
    "builtins.set": set,
}
"""Replacement of each name that a bare pickle may contain."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = _METADATA_CLASSES.get(f"{module}.{name}")
        if allowed is None:
            raise Refused(f"it names {module}.{name}, which is not on the list of what a checkpoint may hold")
        return allowed


def unpickled(content: bytes) -> Any:
    """Return the content of a bare pickle, with an Inert for each object. Raises Refused, or any error if damaged."""
    return _Unpickler(io.BytesIO(content)).load()


REQUEST = struct.Struct("<BQQ")
"""Fields: whether to read an archive, its first byte, its end."""
LENGTH = struct.Struct("<Q")
MAX_PICKLE_BYTES = 1 << 29
"""Largest pickle. The metadata of a checkpoint with a million shards has about 200 MB."""
MAX_MEMBERS = 1_000_000
MAX_DEPTH = 20
"""Largest number of nested containers; Megatron-LM's checkpoints have eight."""
MEMORY_BYTES = 8 << 30
"""Address space in addition to that at the start of the process."""
CPU_SECONDS = 120
"""Limit of the CPU time for one request."""

_VALUES_FOR_A_BYTE, _CHARACTERS_FOR_A_BYTE = 8, 64
"""Limits of a reply per byte of the pickle, because a pickle can refer to one value many times."""
_NO_NEW_PRIVILEGES = 38  # linux/prctl.h
_NOBODY = 65534
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_REFUSED_NAME = re.compile(r"GLOBAL (\S+) (?:was not an allowed|whose module)")
_MEGATRON_ENUMS = (
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
)
_ALLOWED = inert_classes(
    {
        "argparse": ("Namespace",),
        "_io": ("BytesIO",),
        "pathlib": ("Path", "PosixPath", "PurePosixPath"),
        "signal": ("Signals",),
        "builtins": ("dict", "list", "int", "float"),
        "numpy": ("ndarray", "dtype"),
        "numpy.core.multiarray": ("_reconstruct", "scalar"),
        "numpy._core.multiarray": ("_reconstruct", "scalar"),
        **dict.fromkeys(
            (
                "megatron.core.enums",
                "megatron.core.transformer.enums",
                "megatron.core.rerun_state_machine",
                "megatron.legacy.model.enums",
                "megatron.model.enums",
            ),
            _MEGATRON_ENUMS,
        ),
    }
)
"""Names that torch's loader accepts in addition to tensors and plain values. No code of these libraries runs."""
_NAMESPACE = _ALLOWED["argparse.Namespace"]


def _mapping(*factory: Any) -> OrderedDict[Any, Any]:
    """Replace a defaultdict, because torch's loader cannot fill it."""
    return OrderedDict()


class FileWindow(io.RawIOBase):
    """Bytes `start` to `stop` of a file, as a file object: a file of DCP is a sequence of archives."""

    def __init__(self, descriptor: int, start: int, stop: int) -> None:
        self._descriptor, self._start, self._size, self._position = descriptor, start, stop - start, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position within the window. Raises ValueError for a position before its beginning."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"position {base + offset} is before the beginning")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read bytes of the window into a buffer, without moving the file's own position, and return their number."""
        count = max(0, min(len(buffer), self._size - self._position))
        content = os.pread(self._descriptor, count, self._start + self._position)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


class _Members:
    """The directory of an archive. pickle_bytes: size of its data.pkl."""

    def __init__(self, window: FileWindow) -> None:
        with zipfile.ZipFile(window) as archive:
            entries = archive.infolist()
            if len(entries) > MAX_MEMBERS:
                raise Refused(f"it has {len(entries):,} members; at most {MAX_MEMBERS:,} are read")
            names = {entry.filename.partition("/")[2]: entry for entry in entries}
            if len(names) < len(entries) or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise Refused("one of its members appears twice or is compressed")
            if "data.pkl" not in names:
                raise Refused("it has no data.pkl")
            if "byteorder" in names and archive.read(names["byteorder"]) != b"little":
                raise Refused("its numbers are big-endian")
        self.pickle_bytes = names["data.pkl"].file_size
        self._storages = {}
        for name, entry in names.items():
            if name.startswith("data/"):
                window.seek(entry.header_offset)
                _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(window.read(_LOCAL_HEADER.size) or b"")
                self._storages[entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes] = entry

    def checksum(self, start: int, num_bytes: int) -> int:
        """Return the CRC-32 of the storage that has exactly these bytes."""
        entry = self._storages.get(start)
        if entry is None or entry.file_size != num_bytes:
            raise Refused(f"it has no storage of {num_bytes:,} bytes at byte {start:,}")
        return entry.CRC


class Encoder:
    """Encodes the content of a pickle as JSON values. Objects become {kind: content}; lists and most scalars are
    unchanged."""

    def __init__(self, pickle_bytes: int, members: _Members | None = None) -> None:
        self._values = 10_000 + _VALUES_FOR_A_BYTE * pickle_bytes
        self._characters = 100_000 + _CHARACTERS_FOR_A_BYTE * pickle_bytes
        self._members = members

    def encode(self, value: Any, depth: int = 0) -> Any:
        """Return the JSON value. Raises Refused for a value that is too large, too deep or refers to itself."""
        self._values -= 1
        if isinstance(value, str):
            self._characters -= len(value)
        if self._values < 0 or self._characters < 0:
            raise Refused("it expands to far more values than a pickle of its size may hold")
        if depth > MAX_DEPTH:
            raise Refused(f"it is nested deeper than {MAX_DEPTH} levels")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, (int, float)):
            # Also for NaN.
            return value if abs(value) < 1e30 else {"other": type(value).__name__}
        if isinstance(value, str):
            return value.encode("utf-8", "replace").decode()
        if isinstance(value, list):
            return [self.encode(each, depth + 1) for each in value]
        if isinstance(value, (tuple, set, frozenset)):
            return {"tuple": [self.encode(each, depth + 1) for each in value]}
        if isinstance(value, dict):
            pairs = value.items()
            return {"dict": [[self.encode(key, depth + 1), self.encode(each, depth + 1)] for key, each in pairs]}
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.dtype):
            return str(value)
        if isinstance(value, _NAMESPACE) or (isinstance(value, Inert) and self._members is None):
            return {"record": [value.name, self.encode(value.state, depth + 1)]}
        return {"other": getattr(value, "name", "") or type(value).__name__}

    def _tensor(self, tensor: torch.Tensor) -> dict[str, Any]:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if self._members is None or tensor.layout != torch.strided or dtype not in DTYPES:
            return {"other": f"tensor of {tensor.dtype}"}
        storage = tensor.untyped_storage()
        start = getattr(storage, "_checkpoint_offset", None)
        if start is None:
            return {"other": "tensor without a storage in the file"}
        place = {
            "dtype": dtype,
            "start": start,
            "num_bytes": storage.nbytes(),
            "crc32": self._members.checksum(start, storage.nbytes()),
            "offset": tensor.storage_offset(),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
        }
        return {"tensor": place}


def describe_pickle(descriptor: int, start: int, stop: int, *, archive: bool) -> Mapping[str, Any]:
    """Return {"value": ...} for the pickle in these bytes of a file, {"refused": reason}, or {"damaged": reason}."""
    try:
        window = FileWindow(descriptor, start, stop)
        if not archive:
            _check_size(stop - start)
            return {"value": Encoder(stop - start).encode(unpickled(window.read(stop - start) or b""))}
        members = _Members(window)
        _check_size(members.pickle_bytes)
        window.seek(0)
        allowed = [(placeholder, name) for name, placeholder in _ALLOWED.items()]
        with safe_globals([*allowed, (_mapping, "collections.defaultdict")]):
            value = torch.load(cast(IO[bytes], window), map_location="meta", weights_only=True)
        return {"value": Encoder(members.pickle_bytes, members).encode(value)}
    except Refused as error:
        return {"refused": str(error)}
    except zipfile.BadZipFile as error:
        return {"damaged": f"{error}; if it is from before torch 1.6, load and save it once with a newer torch"}
    except MemoryError:
        return {"refused": f"reading it takes more memory than is allowed, which is at most {MEMORY_BYTES >> 30} GiB"}
    except Exception as error:  # a damaged or hostile pickle can raise any exception
        refused = _REFUSED_NAME.search(str(error))
        if refused is not None:
            name = refused[1] if "." in refused[1] else f"builtins.{refused[1]}"
            return {"refused": f"it names {name}, which is not on the list of what a checkpoint may hold"}
        message = str(error).split("WeightsUnpickler error:")[-1].split("Check the documentation of torch.load")[0]
        return {"damaged": f"{type(error).__name__}: {' '.join(message.split())[:300]}"}


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_PICKLE_BYTES:
        raise Refused(f"its pickle has {num_bytes:,} bytes; at most {MAX_PICKLE_BYTES:,} are read")


def confine() -> None:
    """Permanently give up writing files, opening files and sockets, starting processes, and privileges.

    Every limit is lowered, but never above a lower limit of the system.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    with open("/proc/self/statm", "rb") as file:
        address_space = int(file.read().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_AS, address_space + MEMORY_BYTES)
    if os.geteuid() == 0:  # root could raise its limits again
        # A container may forbid it; the limits apply even then, unless they are raised again.
        with suppress(OSError):
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    _limit(resource.RLIMIT_NPROC, 0)
    # The channel, two for /dev/null, and the file of the request.
    _limit(resource.RLIMIT_NOFILE, 4)


def _limit(kind: int, value: int, *, permanent: bool = True) -> None:
    """Set a limit, at most to that of the system. permanent: whether this process cannot raise it again."""
    _, hard = resource.getrlimit(kind)
    limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (limit, limit if permanent else hard))


@functools.cache
def warm_up() -> None:
    """Import everything that reading imports on first use, before the fork: the confined process cannot open files."""
    with open(os.memfd_create("archive"), "w+b") as file:
        torch.save({"tensor": torch.zeros(1), "args": Namespace(content=b"\xff")}, file)
        file.flush()
        describe_pickle(file.fileno(), 0, file.tell(), archive=True)
    unpickled(pickle.dumps({}))
    b"name".decode("cp437")  # the encoding in which zipfile decodes names of members


def serve(channel: socket.socket) -> None:
    """Answer requests until the channel closes. This runs in a forked process and does not return."""
    try:
        # Finalizers of the parent's objects must not close descriptors that are reused here.
        gc.disable()
        warnings.simplefilter("ignore")
        null_device = os.open(os.devnull, os.O_RDWR)
        for source, target in ((channel.detach(), 0), (null_device, 1), (null_device, 2)):
            os.dup2(source, target)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2:
                with suppress(OSError):  # the descriptor of the listing is already closed
                    os.close(descriptor)
        clear_safe_globals()  # the parent process may have added some
        confine()
        with socket.socket(fileno=0) as requests:
            while True:
                request, descriptors, _, _ = socket.recv_fds(requests, REQUEST.size, 1)
                if len(request) < REQUEST.size:
                    os._exit(0)
                archive, start, stop = REQUEST.unpack(request)
                _limit(resource.RLIMIT_CPU, int(time.process_time() + CPU_SECONDS) + 1, permanent=False)
                reply = json.dumps(describe_pickle(descriptors[0], start, stop, archive=bool(archive))).encode()
                os.close(descriptors[0])
                requests.sendall(LENGTH.pack(len(reply)) + reply)
    finally:
        os._exit(1)
