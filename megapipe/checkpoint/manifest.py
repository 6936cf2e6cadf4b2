"""The manifest of a checkpoint: all its information except the elements of tensors, in a file that is written last.

The manifest does not depend on the layout: tensors are identified by global name, shape and extent, progress by steps
and samples, random state by named integers (docs/design.md, idea 3).

A folder without manifest.json is not a checkpoint. The file contains a checksum of itself, so that any changed digit
is detected. It contains no paths: files are plain names in its folder.
"""

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from megapipe.checkpoint.shards import Extent
from megapipe.checkpoint.storage import CheckpointError, DamagedCheckpointError
from megapipe.checkpoint.tensor_file import DTYPES, PIECE_BYTES
from megapipe.config.files import DECODING_ERRORS, decode_json, read_bytes
from megapipe.data.identity import DataIdentity
from megapipe.spec.parameters import Box


@dataclass(frozen=True)
class Chunk:
    """Some elements of one tensor, and where their bytes are stored.

    name: global name of the parameter. kind: its weights or one of its moments. shape: shape of the whole tensor.
    file, key: where the elements are stored. dtype: its name in safetensors. checksums: one for each PIECE_BYTES of
    its bytes, hexadecimal.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    extent: Extent
    file: str
    key: str
    dtype: str
    checksums: tuple[str, ...]


@dataclass(frozen=True)
class DataChange:
    """A resume on other samples that checkpoint.accept_other_data accepted.

    step: the last step before the change. differences: one sentence for each field or shard.
    """

    step: int
    differences: tuple[str, ...]


@dataclass(frozen=True)
class RunState:
    """State of a run after a step, without tensors.

    step: completed optimizer steps. consumed_samples: samples that they used, the position in the data. random: named
    integers that determine all random numbers. precision: `fp32`, `bf16` or `fp16`. losses: the last (step, loss)
    pairs. config: the whole configuration as plain values; it always contains "model". loss_scale: state of the loss
    scale of an fp16 run, numbers by name; empty without loss scaling. skipped: half-open ranges [first, end) of
    samples that the run skips because its loss spiked there. data: identity of the data that the run was last trained
    on; None in checkpoints of versions that did not store it. data_changes: accepted changes of the samples, oldest
    first.
    """

    step: int
    consumed_samples: int
    random: Mapping[str, int]
    precision: str
    losses: tuple[tuple[int, float], ...]
    config: Mapping[str, Any]
    loss_scale: Mapping[str, float] = field(default_factory=dict)
    skipped: tuple[tuple[int, int], ...] = ()
    data: DataIdentity | None = None
    data_changes: tuple[DataChange, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with None for a loss that is not finite, because JSON cannot express it."""
        losses = [[step, loss if math.isfinite(loss) else None] for step, loss in self.losses]
        return {**asdict(self), "losses": losses}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], **other_fields: Any) -> "RunState":
        """Read plain values from JSON; `others` are the remaining fields.

        Raises KeyError, TypeError, ValueError or AttributeError for values with an unexpected structure.
        """
        return cls(
            step=int(values["step"]),
            consumed_samples=int(values["consumed_samples"]),
            random={str(name): int(value) for name, value in values["random"].items()},
            precision=str(values["precision"]),
            losses=tuple((int(step), math.nan if loss is None else float(loss)) for step, loss in values["losses"]),
            loss_scale={str(name): float(value) for name, value in values.get("loss_scale", {}).items()},
            **other_fields,
        )


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint folder.

    code_version: version of megapipe that wrote it. applied_updates: parameter name -> optimizer updates that were
    applied, without skipped steps. files: name -> bytes.
    """

    code_version: str
    run: RunState
    applied_updates: Mapping[str, int]
    files: Mapping[str, int]
    chunks: tuple[Chunk, ...]

    def chunks_of(self, name: str, kind: str) -> list[Chunk]:
        """Return the parts of one tensor, in any order; an empty list if it is not stored."""
        return self._tensors.get(name, {}).get(kind, [])

    def kinds_of(self, name: str) -> set[str]:
        """Return the kinds of tensors that are stored for a parameter."""
        return set(self._tensors.get(name, {}))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the global shape of each parameter by name."""
        return {chunk.name: chunk.shape for chunk in self.chunks}

    @cached_property
    def _tensors(self) -> dict[str, dict[str, list[Chunk]]]:
        tensors: dict[str, dict[str, list[Chunk]]] = {}
        for chunk in self.chunks:
            tensors.setdefault(chunk.name, {}).setdefault(chunk.kind, []).append(chunk)
        return tensors


MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
"""Folder in a checkpoint for the tokenizer's files of a Hugging Face model."""
FORMAT = "megapipe checkpoint"
VERSION = 1

_LARGEST_BYTES = 1 << 30
_SELF = "manifest_checksum"


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint folder `path`.

    Raises DamagedCheckpointError if it is missing or has changed since it was written, CheckpointError if it has
    another format version or cannot be read.
    """
    try:
        return read_manifest_file(path / MANIFEST)
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path} is not a checkpoint: it has no {MANIFEST}", "manifest") from None


def read_manifest_file(file: Path) -> Manifest:
    """Return a manifest under any file name. Raises FileNotFoundError if it is missing; see `read_manifest` for other
    errors."""
    try:
        content = read_bytes(file, CheckpointError, _LARGEST_BYTES)
    except NotADirectoryError as error:
        raise FileNotFoundError(str(file)) from error
    return _decoded(decode_json(content, str(file), _damaged), file)


def _damaged(message: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(message, "manifest")


def check_files(path: Path, manifest: Manifest) -> None:
    """Raise DamagedCheckpointError unless every file exists and has the size that it had when it was saved."""
    for name, size in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise DamagedCheckpointError(f"{file} is missing", "files")
        check_size(file, size)


def check_size(file: Path, size: int) -> None:
    """Raise DamagedCheckpointError unless a file has the size that it had when it was saved."""
    num_bytes = file.stat().st_size
    if num_bytes != size:
        raise DamagedCheckpointError(
            f"{file} has {num_bytes:,} bytes instead of {size:,}: it has changed since it was saved", "files"
        )


def encoded(manifest: Manifest) -> bytes:
    """Return the text of manifest.json."""
    run = manifest.run
    document = {
        "format": FORMAT,
        "format_version": VERSION,
        "code_version": manifest.code_version,
        **run.as_dict(),
        "data": None if run.data is None else run.data.as_dict(),
        "applied_updates": dict(manifest.applied_updates),
        "checksums": f"xxh3_64 of every {PIECE_BYTES} bytes of a tensor",
        "files": dict(manifest.files),
        "chunks": [_encoded_chunk(chunk) for chunk in manifest.chunks],
    }
    # Tuples become lists, as in the file.
    plain = json.loads(json.dumps(document, allow_nan=False))
    entries = [f"{json.dumps(key)}: {_lines(value)}" for key, value in {**plain, _SELF: _checksum(plain)}.items()]
    # No newline at the end, so that a file that is cut by a single byte is detected.
    return ("{\n" + ",\n".join(entries) + "\n}").encode()


def _lines(value: Any) -> str:
    """Return JSON with one line per entry of a list of objects, because people read manifests too."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(json.dumps(entry) for entry in value) + "\n]"
    return json.dumps(value)


def _checksum(document: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())


def _encoded_chunk(chunk: Chunk) -> dict[str, Any]:
    extent = chunk.extent
    return {
        "name": chunk.name,
        "kind": chunk.kind,
        "shape": chunk.shape,
        "box": [extent.box.starts, extent.box.stops],
        "range": [extent.start, extent.stop],
        "file": chunk.file,
        "key": chunk.key,
        "dtype": chunk.dtype,
        "checksums": chunk.checksums,
    }


def _decoded(document: Any, file: Path) -> Manifest:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise DamagedCheckpointError(f"{file} is not the manifest of a {FORMAT}", "manifest")
    # The checksum is the same in every version. It is checked first: a flipped bit in the version is damage.
    stored = document.pop(_SELF, None)
    if stored != _checksum(document):
        raise DamagedCheckpointError(f"{file} has changed since it was saved: its checksum differs", "manifest")
    version = document.get("format_version")
    if version != VERSION:
        raise CheckpointError(_wrong_version(file, version, document.get("code_version")))
    try:
        return _manifest(document)
    except DECODING_ERRORS as error:
        raise DamagedCheckpointError(f"{file} is not a valid manifest: {error!r}", "manifest") from error


def _wrong_version(file: Path, version: Any, code_version: Any) -> str:
    if type(version) is not int or not isinstance(code_version, str):
        return f"{file} has format version {reprlib.repr(version)}; this megapipe reads version {VERSION}"
    age, advice = "newer", f"update megapipe to {code_version} or later"
    if version < VERSION:
        age, advice = "older", f"resume it with megapipe {code_version}, which wrote it"
    return (
        f"{file} has format version {version}, which is {age} than the version {VERSION} that "
        f"this megapipe reads; {advice}"
    )


def _manifest(document: dict[str, Any]) -> Manifest:
    files = {_plain_name(name): int(size) for name, size in document["files"].items()}
    chunks = tuple(_decoded_chunk(entry, files) for entry in document["chunks"])
    config = dict(document["config"])
    if any(chunk.name.endswith(".mlp.router.bias") for chunk in chunks):
        # Version 0.1 had only this rule, and did not store it.
        config["model"] = {"expert_bias": "scores", **config["model"]}
    run = RunState.from_dict(
        document,
        config=config,
        skipped=tuple((int(first), int(stop)) for first, stop in document.get("skipped", [])),
        data=None if document.get("data") is None else DataIdentity.from_dict(document["data"]),
        data_changes=tuple(
            DataChange(int(change["step"]), tuple(str(each) for each in change["differences"]))
            for change in document.get("data_changes", [])
        ),
    )
    applied = {str(name): int(count) for name, count in document["applied_updates"].items()}
    return Manifest(str(document["code_version"]), run, applied, files, chunks)


def _plain_name(name: str) -> str:
    if name in ("", "..") or name != Path(name).name or "\0" in name:
        raise ValueError(f"{name!r} is not a file name within the checkpoint's folder")
    return name


def _decoded_chunk(entry: dict[str, Any], files: dict[str, int]) -> Chunk:
    starts, stops = (tuple(int(index) for index in corner) for corner in entry["box"])
    first, last = (int(index) for index in entry["range"])
    shape = tuple(int(length) for length in entry["shape"])
    box = Box(starts, stops)
    is_inside = all(0 <= start < stop <= length for start, stop, length in zip(starts, stops, shape, strict=True))
    if not is_inside or not 0 <= first < last <= box.num_elements:
        raise ValueError(f"a chunk of {entry['name']!r} is outside the tensor")
    if entry["file"] not in files:
        raise ValueError(f"a chunk of {entry['name']!r} names a file that is not in the checkpoint")
    dtype = str(entry["dtype"])
    num_bytes = (last - first) * DTYPES[dtype].itemsize
    checksums = tuple(str(checksum) for checksum in entry["checksums"])
    if len(checksums) != -(-num_bytes // PIECE_BYTES):
        raise ValueError(f"a chunk of {entry['name']!r} has {len(checksums)} checksums for {num_bytes} bytes")
    return Chunk(
        name=str(entry["name"]),
        kind=str(entry["kind"]),
        shape=shape,
        extent=Extent(box, first, last),
        file=entry["file"],
        key=str(entry["key"]),
        dtype=dtype,
        checksums=checksums,
    )
