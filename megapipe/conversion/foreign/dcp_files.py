"""The files of torch.distributed.checkpoint: `.metadata`, a pickle that tells of every tensor's chunks, and `.distcp`
files in which each chunk is an archive of torch.save.

Written with torch's own metadata classes; read by description, since `.metadata` runs code when torch reads it.
"""

import io
import os
import pickle
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megapipe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megapipe.checkpoint.extents import Extent, tiling_problem
from megapipe.checkpoint.storage import DISK, explained, write_file
from megapipe.checkpoint.tensor_file import DTYPES
from megapipe.checkpoint.untrusted import inside
from megapipe.config.untrusted import DECODING_ERRORS
from megapipe.conversion.foreign.archive import Archive
from megapipe.conversion.foreign.layouts import METADATA
from megapipe.conversion.foreign.sandbox import InertObject, Sandbox, TensorPlace
from megapipe.conversion.source import Index
from megapipe.spec.parameters import Box

_DATA = "__0_0.distcp"
_DTYPE_NAMES = {str(dtype): name for name, dtype in DTYPES.items()}
_METADATA_VERSION = "1.0.0"


@dataclass(frozen=True)
class DcpChunk:
    """A box of a tensor and where its archive lies: bytes `start` to `stop` of a file."""

    box: Box
    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class DcpTensor:
    """A tensor of the metadata. dtype: as safetensors names it. chunks: disjoint, together the whole."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[DcpChunk, ...]


class DcpFiles:
    """A folder that torch.distributed.checkpoint wrote, from any number of ranks. tensors: the floating-point ones.

    Raises CheckpointError or DamagedCheckpointError naming the file for a folder that is not whole.
    """

    def __init__(self, folder: Path, sandbox: Sandbox) -> None:
        self._folder, self._sandbox = folder, sandbox
        path = folder / METADATA
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                metadata = sandbox.load(file.fileno(), 0, size, str(path), archive=False)
        except OSError as error:
            raise CheckpointError(
                f"cannot read {path}: {error.strerror}; if the file is missing, the save was interrupted"
            ) from error
        try:
            self.tensors = {each.name: each for each in _tensors(metadata, path)}
        except DECODING_ERRORS as error:
            if isinstance(error, CheckpointError):
                raise
            raise DamagedCheckpointError(
                f"{path} is not metadata of torch.distributed.checkpoint: {error!r}", "unreadable"
            ) from error

    def read(self, name: str, index: Index = ()) -> Tensor:
        """The elements of a tensor inside `index`, contiguous. One chunk is held beside them."""
        tensor = self.tensors[name]
        wanted = index or tuple(slice(0, extent) for extent in tensor.shape)
        found = torch.empty([part.stop - part.start for part in wanted], dtype=DTYPES[tensor.dtype])
        for chunk in tensor.chunks:
            starts = [max(low, part.start) for low, part in zip(chunk.box.starts, wanted, strict=True)]
            stops = [min(high, part.stop) for high, part in zip(chunk.box.stops, wanted, strict=True)]
            if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
                continue
            with _Item(self._folder, chunk, tensor, self._sandbox) as item:
                values = item.archive.tensor(item.place)
            source = _relative(starts, stops, chunk.box.starts)
            found[_relative(starts, stops, [part.start for part in wanted])] = values[source]
        return found

    def verify(self, name: str, first: int | None = None) -> list[str]:
        """Read all of a tensor, or what has `first` on its first axis: what is wrong with it, empty if nothing is."""
        tensor, found = self.tensors[name], []
        for chunk in tensor.chunks:
            if first is not None and not chunk.box.starts[0] <= first < chunk.box.stops[0]:
                continue
            try:
                with _Item(self._folder, chunk, tensor, self._sandbox) as item:
                    found += item.archive.verify(item.place)
            except CheckpointError as error:
                found.append(str(error))
        return found


class _Item:
    """The archive of one chunk, opened."""

    def __init__(self, folder: Path, chunk: DcpChunk, tensor: DcpTensor, sandbox: Sandbox) -> None:
        path = inside(folder, chunk.file)
        self.archive = Archive(path, sandbox, chunk.start, chunk.stop)
        place = self.archive.value
        expected = str(DTYPES[tensor.dtype]).removeprefix("torch.")
        if not isinstance(place, TensorPlace) or (place.shape, place.dtype) != (chunk.box.shape, expected):
            self.archive.close()
            raise DamagedCheckpointError(
                f"{path}, bytes {chunk.start} to {chunk.stop}, do not hold the part of {tensor.name!r} of shape "
                f"{chunk.box.shape} and {expected} that {METADATA} lists",
                "unreadable",
            )
        self.place = place

    def __enter__(self) -> "_Item":
        return self

    def __exit__(self, *error: object) -> None:
        self.archive.close()


def _relative(starts: Sequence[int], stops: Sequence[int], base: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(low - origin, high - origin) for low, high, origin in zip(starts, stops, base, strict=True))


def _tensors(metadata: InertObject, path: Path) -> Iterator[DcpTensor]:
    """Every floating-point tensor of the metadata, its chunks found and seen to tile it."""
    places: dict[tuple[str, tuple[int, ...] | None], Mapping[str, Any]] = {}
    for index, info in metadata.state["storage_data"] or ():
        offset = index.state.get("offset")
        places[index.state["fqn"], None if offset is None else _size(offset)] = info.state
    for name, stored in metadata.state["state_dict_metadata"].items():
        if stored.name != "torch.distributed.checkpoint.metadata.TensorStorageMetadata":
            continue
        dtype = _DTYPE_NAMES.get(stored.state["properties"].state[0])
        if dtype is None:
            continue  # counters and random states
        shape = _size(stored.state["size"])
        chunks = tuple(_chunk(name, each.state, places, path) for each in stored.state["chunks"])
        if any(len(chunk.box.starts) != len(shape) for chunk in chunks):
            raise ValueError(f"{name} has chunks with another number of dimensions")
        inside_all = all(
            0 <= low <= high <= extent
            for chunk in chunks
            for low, high, extent in zip(chunk.box.starts, chunk.box.stops, shape, strict=True)
        )
        problem = (
            tiling_problem(shape, [Extent.whole(chunk.box) for chunk in chunks])
            if inside_all
            else "a part is outside the tensor"
        )
        if problem is not None:
            raise DamagedCheckpointError(f"{path}: the parts of {name!r} do not cover it: {problem}", "unreadable")
        yield DcpTensor(name, shape, dtype, chunks)


def _chunk(
    name: str,
    stored: Mapping[str, Any],
    places: Mapping[tuple[str, tuple[int, ...] | None], Mapping[str, Any]],
    path: Path,
) -> DcpChunk:
    starts, sizes = _size(stored["offsets"]), _size(stored["sizes"])
    info = places[name, starts]
    if info.get("transform_descriptors"):
        raise CheckpointError(
            f"{path}: {name!r} was transformed by {info['transform_descriptors']}; save it again without extensions"
        )
    box = Box(starts, tuple(start + size for start, size in zip(starts, sizes, strict=True)))
    (start, length), file = _size((info["offset"], info["length"])), info["relative_path"]
    if not isinstance(file, str):
        raise TypeError(f"{reprlib.repr(file)} is not a file name")
    return DcpChunk(box, file, start, start + length)


def _size(value: Any) -> tuple[int, ...]:
    """The numbers of a torch.Size."""
    numbers = tuple(value)
    if any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers):
        raise ValueError(f"{reprlib.repr(numbers)} is not a shape")
    return numbers


@dataclass
class DcpWriter:
    """Writes a folder's `.distcp` file chunk by chunk, then `.metadata`.

    nesting: name -> keys of a nested state dict, by which torch's own tools take names apart.
    """

    folder: Path
    nesting: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._position, self._path = 0, self.folder / _DATA
        try:
            self._descriptor = DISK.create(self._path)
        except OSError as error:
            raise CheckpointError(f"cannot write {self._path}: {explained(error, self.folder)}") from error

    def add(self, name: str, shape: Sequence[int], offsets: Sequence[int], values: Tensor) -> None:
        """Write the chunk of a tensor of `shape` that begins at `offsets`."""
        whole = values.contiguous()
        if whole.untyped_storage().nbytes() != whole.nbytes:
            whole = whole.clone()
        stored = self._tensors.setdefault(
            name, TensorStorageMetadata(TensorProperties(dtype=values.dtype), torch.Size(shape), [])
        )
        assert isinstance(stored, TensorStorageMetadata)
        stored.chunks.append(ChunkStorageMetadata(torch.Size(offsets), whole.shape))
        self._item(MetadataIndex(name, offsets, len(stored.chunks) - 1), whole)

    def add_object(self, name: str, value: Any) -> None:
        """Write what is no tensor, as torch.save does."""
        self._tensors[name] = BytesStorageMetadata()
        self._item(MetadataIndex(name), value)

    def _item(self, index: MetadataIndex, value: Any) -> None:
        content = io.BytesIO()
        torch.save(value, content)
        left = content.getbuffer()
        self._places[index] = _StorageInfo(_DATA, self._position, len(left))
        self._position += len(left)
        try:
            while left:
                left = left[DISK.write(self._descriptor, left) :]
        except OSError as error:
            raise CheckpointError(f"cannot write {self._path}: {explained(error, self.folder)}") from error

    def finish(self) -> None:
        """Make the file durable and write `.metadata`."""
        try:
            DISK.flush(self._descriptor)
        except OSError as error:
            raise CheckpointError(f"cannot write {self._path}: {explained(error, self.folder)}") from error
        finally:
            self.close()
        metadata = Metadata(
            self._tensors,
            planner_data=self.nesting or None,
            storage_data=self._places,
            storage_meta=StorageMeta(checkpoint_id=self.folder.name),
            version=_METADATA_VERSION,
        )
        write_file(DISK, self.folder / METADATA, [memoryview(pickle.dumps(metadata))])

    def close(self) -> None:
        """Close the file as it is."""
        if self._descriptor >= 0:
            DISK.close(self._descriptor)
            self._descriptor = -1
