"""manifest.json: written last into a checkpoint's folder; without it there is no checkpoint.

It carries a checksum of itself, so that a changed digit is noticed as a changed weight is. Nothing in it names a path:
files are plain names in its folder.
"""

import json
import math
import reprlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash

from megapipe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megapipe.checkpoint.extents import Extent
from megapipe.checkpoint.manifest import Chunk, DataChange, Manifest, RunState
from megapipe.checkpoint.tensor_file import DTYPES, PIECE_BYTES
from megapipe.config import untrusted
from megapipe.data.identity import DataIdentity
from megapipe.spec.parameters import Box

MANIFEST = "manifest.json"
FORMAT = "megapipe checkpoint"
VERSION = 1

_LARGEST_BYTES = 1 << 30
_SELF = "manifest_checksum"


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint folder `path`.

    Raises DamagedCheckpointError when there is none or it is not what was written, CheckpointError when it is of
    another format version or may not be read.
    """
    try:
        return read_manifest_file(path / MANIFEST)
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path} is not a checkpoint: it has no {MANIFEST}", "manifest") from None


def read_manifest_file(file: Path) -> Manifest:
    """A manifest under any name. Raises FileNotFoundError when there is none, otherwise as `read_manifest`."""
    try:
        content = untrusted.read_bytes(file, CheckpointError, _LARGEST_BYTES)
    except NotADirectoryError as error:
        raise FileNotFoundError(str(file)) from error
    return _decoded(untrusted.decode_json(content, str(file), _damaged), file)


def _damaged(message: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(message, "manifest")


def check_files(path: Path, manifest: Manifest) -> None:
    """Raise DamagedCheckpointError unless every file is there with the bytes that it had when it was saved."""
    for name, size in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise DamagedCheckpointError(f"{file} is missing", "files")
        found = file.stat().st_size
        if found != size:
            raise DamagedCheckpointError(
                f"{file} has {found:,} bytes instead of {size:,}: it has changed since it was saved", "files"
            )


def encoded(manifest: Manifest) -> bytes:
    """The text of manifest.json."""
    run = manifest.run
    document = {
        "format": FORMAT,
        "format_version": VERSION,
        "code_version": manifest.code_version,
        "step": run.step,
        "consumed_samples": run.consumed_samples,
        "random": dict(run.random),
        "precision": run.precision,
        # JSON has no word for a loss that is not finite.
        "losses": [[step, loss if math.isfinite(loss) else None] for step, loss in run.losses],
        "applied_updates": dict(manifest.applied_updates),
        "config": run.config,
        "loss_scale": dict(run.loss_scale),
        "skipped": run.skipped,
        "data": None if run.data is None else run.data.as_dict(),
        "data_changes": [asdict(change) for change in run.data_changes],
        "checksums": f"xxh3_64 of every {PIECE_BYTES} bytes of a tensor",
        "files": dict(manifest.files),
        "chunks": [_encoded_chunk(chunk) for chunk in manifest.chunks],
    }
    plain = json.loads(json.dumps(document, allow_nan=False))  # tuples become lists, as a reader will see them
    entries = [f"{json.dumps(key)}: {_lines(value)}" for key, value in {**plain, _SELF: _checksum(plain)}.items()]
    # No newline at the end: a file cut by a single byte is to be noticed.
    return ("{\n" + ",\n".join(entries) + "\n}").encode()


def _lines(value: Any) -> str:
    """JSON with each entry of a list of objects on a line of its own: people read manifests too."""
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
    # The checksum is the same in every version, and comes first: a flipped bit in the version is damage.
    stored = document.pop(_SELF, None)
    if stored != _checksum(document):
        raise DamagedCheckpointError(f"{file} has changed since it was saved: its checksum differs", "manifest")
    version = document.get("format_version")
    if version != VERSION:
        raise CheckpointError(_wrong_version(file, version, document.get("code_version")))
    try:
        return _manifest(document)
    except untrusted.DECODING_ERRORS as error:
        raise DamagedCheckpointError(f"{file} is not a valid manifest: {error!r}", "manifest") from error


def _wrong_version(file: Path, version: Any, code_version: Any) -> str:
    if type(version) is not int or not isinstance(code_version, str):
        return f"{file} has format version {reprlib.repr(version)}; this megapipe reads version {VERSION}"
    if version < VERSION:
        return (
            f"{file} has format version {version}, which is older than the version {VERSION} that this megapipe "
            f"reads; resume it with megapipe {code_version}, which wrote it"
        )
    return (
        f"{file} has format version {version}, which is newer than the version {VERSION} that this megapipe "
        f"reads; update megapipe to {code_version} or later"
    )


def _manifest(document: dict[str, Any]) -> Manifest:
    files = {_plain_name(name): int(size) for name, size in document["files"].items()}
    chunks = tuple(_decoded_chunk(entry, files) for entry in document["chunks"])
    config = dict(document["config"])
    if any(chunk.name.endswith(".mlp.router.bias") for chunk in chunks):
        # Version 0.1 knew only this rule, and did not store it.
        config["model"] = {"expert_bias": "scores", **config["model"]}
    run = RunState(
        step=int(document["step"]),
        consumed_samples=int(document["consumed_samples"]),
        random={str(name): int(value) for name, value in document["random"].items()},
        precision=str(document["precision"]),
        losses=tuple((int(step), math.nan if loss is None else float(loss)) for step, loss in document["losses"]),
        config=config,
        loss_scale={str(name): float(value) for name, value in document.get("loss_scale", {}).items()},
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
    if not name or name != Path(name).name or name in (".", "..") or "\0" in name:
        raise ValueError(f"{name!r} is not a file name within the checkpoint's folder")
    return name


def _decoded_chunk(entry: dict[str, Any], files: dict[str, int]) -> Chunk:
    starts, stops = (tuple(int(index) for index in corner) for corner in entry["box"])
    first, last = (int(index) for index in entry["range"])
    shape = tuple(int(length) for length in entry["shape"])
    box = Box(starts, stops)
    inside = all(0 <= start < stop <= length for start, stop, length in zip(starts, stops, shape, strict=True))
    if not inside or not 0 <= first < last <= box.num_elements:
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
