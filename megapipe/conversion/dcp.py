"""torch.distributed.checkpoint: its files, and a plain state dict in them as a source and as a target.

`.metadata` is a pickle that describes every tensor's chunks; each chunk is an archive of torch.save in a `.distcp`
file. Both are written with torch's own classes. They are read by the confined process of `archive.py`, because torch
would run code in `.metadata` when it reads the file.

The state dict has `model.NAME` for weights and `optimizer.state.NAME.KIND` for moments, as torch's get_state_dict
names them, where NAME is a parameter of megapipe. `megapipe.json` in the same folder describes the model and the run.
"""

import io
import json
import os
import pickle
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
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

from megapipe.checkpoint.directory import FreshFolder
from megapipe.checkpoint.manifest import RunState
from megapipe.checkpoint.shards import Extent, box_of, overlaps, tiling_problem
from megapipe.checkpoint.storage import (
    DISK,
    CheckpointError,
    DamagedCheckpointError,
    NewFile,
    inside,
    on_failure,
    read_json,
    write_file,
)
from megapipe.checkpoint.tensor_file import DTYPES
from megapipe.config import nearest
from megapipe.config.files import DECODING_ERRORS
from megapipe.conversion.archive import DTYPE_NAMES, Archive, InertObject, Sandbox, TensorPlace
from megapipe.conversion.formats import METADATA, WEIGHTS, Contents, Index, StoredTensor, TargetOptions
from megapipe.conversion.megapipe_format import model_of, ordered, parameters_of
from megapipe.spec.parameters import Box

_DATA = "__0_0.distcp"
_METADATA_VERSION = "1.0.0"


@dataclass(frozen=True)
class DcpChunk:
    """A box of a tensor and the place of its archive: bytes `start` to `stop` of a file."""

    box: Box
    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class DcpTensor:
    """A tensor that the metadata lists. dtype: its name in safetensors. chunks: disjoint parts that cover it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[DcpChunk, ...]


class DcpFiles:
    """A folder of torch.distributed.checkpoint from any number of ranks. tensors: floating-point tensors by name.

    Raises CheckpointError or DamagedCheckpointError, with the file, for an incomplete folder.
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
        """Return the elements of a tensor inside `index`, contiguous. In addition to them, one chunk at a time is in
        memory."""
        tensor = self.tensors[name]
        box = box_of(index, tensor.shape)
        elements = torch.empty(box.num_elements, dtype=DTYPES[tensor.dtype])
        for chunk in tensor.chunks:
            # Two boxes overlap at most once.
            for overlap in overlaps(Extent.whole(chunk.box), Extent.whole(box)):
                with self._open_chunk(chunk, tensor) as (archive, place):
                    overlap.copy(archive.tensor(place).reshape(-1), elements)
        return elements.reshape(box.shape)

    def verify(self, name: str, first: int | None = None) -> list[str]:
        """Read a tensor, or only its chunks that contain index `first` of the first axis, and return the problems."""
        tensor, problems = self.tensors[name], []
        for chunk in tensor.chunks:
            if first is not None and not chunk.box.starts[0] <= first < chunk.box.stops[0]:
                continue
            try:
                with self._open_chunk(chunk, tensor) as (archive, place):
                    problems += archive.verify(place)
            except CheckpointError as error:
                problems.append(str(error))
        return problems

    @contextmanager
    def _open_chunk(self, chunk: DcpChunk, tensor: DcpTensor) -> Iterator[tuple[Archive, TensorPlace]]:
        """Open the archive of one chunk; yield it with the place of the chunk's elements."""
        path = inside(self._folder, chunk.file)
        expected = str(DTYPES[tensor.dtype]).removeprefix("torch.")
        with closing(Archive(path, self._sandbox, chunk.start, chunk.stop)) as archive:
            place = archive.value
            if not isinstance(place, TensorPlace) or (place.shape, place.dtype) != (chunk.box.shape, tensor.dtype):
                raise DamagedCheckpointError(
                    f"{path}, bytes {chunk.start} to {chunk.stop}, do not hold the part of {tensor.name!r} of shape "
                    f"{chunk.box.shape} and {expected} that {METADATA} lists",
                    "unreadable",
                )
            yield archive, place


def _tensors(metadata: InertObject, path: Path) -> Iterator[DcpTensor]:
    """Yield every floating-point tensor of the metadata, after a check that its chunks cover it exactly once."""
    places: dict[tuple[str, tuple[int, ...] | None], Mapping[str, Any]] = {}
    for index, storage_info in metadata.state["storage_data"] or ():
        offset = index.state.get("offset")
        places[index.state["fqn"], None if offset is None else _size(offset)] = storage_info.state
    for name, stored in metadata.state["state_dict_metadata"].items():
        if stored.name != "torch.distributed.checkpoint.metadata.TensorStorageMetadata":
            continue
        dtype = DTYPE_NAMES.get(str(stored.state["properties"].state[0]).removeprefix("torch."))
        if dtype is None:
            continue  # counters and random states
        shape = _size(stored.state["size"])
        chunks = tuple(_chunk(name, each.state, places, path) for each in stored.state["chunks"])
        if any(len(chunk.box.starts) != len(shape) for chunk in chunks):
            raise ValueError(f"{name} has chunks with another number of dimensions")
        boxes = [chunk.box for chunk in chunks]
        if all(high <= extent for box in boxes for high, extent in zip(box.stops, shape, strict=True)):
            problem = tiling_problem(shape, [Extent.whole(box) for box in boxes])
        else:
            problem = "a part is outside the tensor"
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
    """Return the numbers of a torch.Size."""
    numbers = tuple(value)
    if any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers):
        raise ValueError(f"{reprlib.repr(numbers)} is not a shape")
    return numbers


@dataclass
class DcpWriter:
    """Writes a folder's `.distcp` file chunk by chunk, then `.metadata`.

    nesting: name -> keys of a nested state dict, from which torch's own tools restore the nesting.
    """

    folder: Path
    nesting: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tensors: dict[str, Any] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._position, self._file = 0, NewFile(self.folder / _DATA)

    def add(self, name: str, shape: Sequence[int], offsets: Sequence[int], values: Tensor) -> None:
        """Write the chunk of a tensor of `shape` that starts at `offsets`."""
        chunk = values.contiguous()
        if chunk.untyped_storage().nbytes() != chunk.nbytes:
            chunk = chunk.clone()
        stored = self._tensors.setdefault(
            name, TensorStorageMetadata(TensorProperties(dtype=values.dtype), torch.Size(shape), [])
        )
        stored.chunks.append(ChunkStorageMetadata(torch.Size(offsets), chunk.shape))
        self._write_item(MetadataIndex(name, offsets, len(stored.chunks) - 1), chunk)

    def add_object(self, name: str, value: Any) -> None:
        """Write an object other than a tensor, as torch.save does."""
        self._tensors[name] = BytesStorageMetadata()
        self._write_item(MetadataIndex(name), value)

    def _write_item(self, index: MetadataIndex, value: Any) -> None:
        content = io.BytesIO()
        torch.save(value, content)
        buffer = content.getbuffer()
        self._places[index] = _StorageInfo(_DATA, self._position, len(buffer))
        self._position += len(buffer)
        self._file.write(buffer)

    def finish(self) -> None:
        """Make the file durable and write `.metadata`."""
        self._file.close()
        metadata = Metadata(
            self._tensors,
            planner_data=self.nesting or None,
            storage_data=self._places,
            storage_meta=StorageMeta(checkpoint_id=self.folder.name),
            version=_METADATA_VERSION,
        )
        write_file(DISK, self.folder / METADATA, pickle.dumps(metadata))

    def abandon(self) -> None:
        """Close the file without completing it."""
        self._file.abandon()


CONFIG = "megapipe.json"
_MODEL, _OPTIMIZER = "model.", "optimizer.state."


class DcpSource:
    """Reads a state dict. `megapipe.json` is required, because no other file describes the model."""

    def __init__(self, path: Path, allow_pickle: bool) -> None:
        if not (path / CONFIG).is_file():
            raise CheckpointError(
                f"{path} has no {CONFIG}, which describes the model of its tensors; write one with the `model` "
                'section of the configuration: {"model": {"num_layers": 12, ...}}'
            )
        document = read_json(path / CONFIG)
        if not isinstance(document.get("model"), dict):
            raise CheckpointError(f"{path / CONFIG} has no `model` section")
        model = model_of(document["model"])
        run, applied = _run_of(document, path / CONFIG)
        self._sandbox = Sandbox(allow_pickle, path)
        with on_failure(self.close):
            self._files = DcpFiles(path, self._sandbox)
            specs = parameters_of(model)
            self._keys: dict[tuple[str, str], str] = {}
            for key, tensor in self._files.tensors.items():
                name, kind = _parse_key(key)
                if name not in specs:
                    raise CheckpointError(
                        f"{path} contains {key!r}, which is not a parameter of the model in {CONFIG}"
                        f"{nearest(name, specs)}; tensors need megapipe's names: rename or remove this one"
                    )
                if tensor.shape != specs[name].shape:
                    raise CheckpointError(f"{path}: {key!r} has shape {tensor.shape} instead of {specs[name].shape}")
                if (name, kind) in self._keys:
                    raise CheckpointError(f"{path} has {kind} of {name} twice: {key!r}, {self._keys[name, kind]!r}")
                self._keys[name, kind] = key
            missing = [name for name in specs if (name, WEIGHTS) not in self._keys]
            if missing:
                raise CheckpointError(f"{path} lacks {_MODEL}{missing[0]}")
        stored = ((name, kind, self._files.tensors[key]) for (name, kind), key in self._keys.items())
        tensors = (StoredTensor(name, kind, tensor.shape, tensor.dtype) for name, kind, tensor in stored)
        self.contents = Contents(model, ordered(tensors, model), run, applied)

    def read(self, tensor: StoredTensor, index: Index = ()) -> Tensor:
        return self._files.read(self._keys[tensor.name, tensor.kind], index)

    def verify(self, tensor: StoredTensor) -> list[str]:
        return self._files.verify(self._keys[tensor.name, tensor.kind])

    def close(self) -> None:
        self._sandbox.close()


def _parse_key(key: str) -> tuple[str, str]:
    """Return the parameter and the kind that a key names."""
    if key.startswith(_OPTIMIZER):
        name, _, kind = key.removeprefix(_OPTIMIZER).rpartition(".")
        return name, kind
    return key.removeprefix(_MODEL), WEIGHTS


def _run_of(document: Mapping[str, Any], path: Path) -> tuple[RunState | None, dict[str, int]]:
    if document.get("run") is None:
        return None, {}
    try:
        run = RunState.from_dict(document["run"], config=dict(document["run"]["config"]))
        return run, {str(name): int(count) for name, count in document["applied_updates"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} has an unreadable training position in `run`: {error!r}; remove `run`"
        ) from error


class DcpTarget:
    """Writes a state dict to a new folder, which torch.distributed.checkpoint loads on any number of ranks."""

    def __init__(self, path: Path, contents: Contents, options: TargetOptions) -> None:
        self._contents = contents
        self._folder = FreshFolder(path)
        with on_failure(self._folder.abandon):
            self._writer = DcpWriter(self._folder.partial)

    def add(self, tensor: StoredTensor, values: Tensor) -> None:
        nesting: tuple[str, ...] = ("model", tensor.name)
        if tensor.kind != WEIGHTS:
            nesting = ("optimizer", "state", tensor.name, tensor.kind)
        key = ".".join(nesting)
        self._writer.nesting[key] = nesting
        self._writer.add(key, values.shape, (0,) * values.ndim, values)

    def finish(self) -> list[str]:
        self._writer.finish()
        document: dict[str, Any] = {"model": asdict(self._contents.model)}
        run = self._contents.run
        if run is not None:
            document["run"] = run.as_dict()
            document["applied_updates"] = dict(self._contents.applied_updates)
        self._folder.write(CONFIG, json.dumps(document, indent=1, allow_nan=False))
        self._folder.finish()
        return [f"a state dict of model.NAME and optimizer.state.NAME.KIND; the model is described in {CONFIG}"]

    def abandon(self) -> None:
        self._writer.abandon()
        self._folder.abandon()
