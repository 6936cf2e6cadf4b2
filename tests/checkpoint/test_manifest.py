"""manifest.json: a round trip, changed bytes are detected, and nothing in it leaves its folder."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megapipe.checkpoint.manifest import (
    MANIFEST,
    Chunk,
    DataChange,
    Manifest,
    RunState,
    _checksum,
    encoded,
    read_manifest,
)
from megapipe.checkpoint.shards import Extent
from megapipe.checkpoint.storage import CheckpointError, DamagedCheckpointError, inside
from megapipe.data.identity import DataIdentity, ShardIdentity
from megapipe.spec.parameters import Box

FILE = "rank-00000.safetensors"
SHARD = ShardIdentity(dtype="uint16", num_documents=2, num_sequences=2, num_tokens=9, bin_sample="a", idx_sample="b")


def manifest() -> Manifest:
    extent = Extent(Box((0, 0), (2, 3)), 0, 6)
    chunks = tuple(
        Chunk("blocks.0.w", kind, (4, 3), extent, FILE, f"{kind}/w", "F32", ("ab",))
        for kind in ("weights", "first_moment")
    )
    config = {"model": {"hidden_size": 3, "betas": [0.9, 0.95]}, "init_from": ""}
    run = RunState(
        10,
        80,
        {"seed": 2**62},
        "bf16",
        ((9, 5.25), (10, 1e-3)),
        config,
        data=DataIdentity(prefixes=("data/web",), shards=(SHARD,), vocabulary="xxh128:0", end_of_document=7),
        data_changes=(DataChange(5, ("data.split is '1' and was '9,1'",)),),
    )
    return Manifest("0.1.0", run, {"blocks.0.w": 9}, {FILE: 100}, chunks)


def test_round_trip(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(encoded(manifest()))
    assert read_manifest(tmp_path) == manifest()


def test_losses_that_are_not_finite_survive_as_strict_json(tmp_path: Path) -> None:
    run = RunState(1, 1, {}, "fp32", ((1, math.nan), (2, math.inf)), {})
    text = encoded(Manifest("0", run, {}, {}, ()))
    json.loads(text, parse_constant=pytest.fail)
    (tmp_path / MANIFEST).write_bytes(text)
    assert all(math.isnan(loss) for _, loss in read_manifest(tmp_path).run.losses)


def test_damage_is_detected(tmp_path: Path) -> None:
    text = encoded(manifest())
    detected = 0
    for position in range(0, len(text), 5):
        damaged = bytearray(text)
        damaged[position] ^= 1 << (position % 7)
        (tmp_path / MANIFEST).write_bytes(damaged)
        try:
            assert read_manifest(tmp_path) == manifest(), f"byte {position} changed the meaning unnoticed"
        except DamagedCheckpointError:  # any other error would end the job instead of falling back
            detected += 1
    assert detected > 0.9 * len(text) / 5
    for content in (b"", text[: len(text) // 2], text[:-1], b"[" * 100_000):
        (tmp_path / MANIFEST).write_bytes(content)
        with pytest.raises(DamagedCheckpointError, match=MANIFEST):
            read_manifest(tmp_path)
    for folder in (tmp_path / "nowhere", tmp_path.parent):
        with pytest.raises(DamagedCheckpointError, match="has no manifest"):
            read_manifest(folder)


REMOVED = "an entry that is removed"
REQUIRED = ("step", "consumed_samples", "random", "files", "chunks", "config", "applied_updates")
"""Entries of every version."""


def rewrite(folder: Path, **changes: Any) -> None:
    """Write a manifest with other content and its right checksum; REMOVED removes an entry."""
    document = json.loads(encoded(manifest()))
    del document["manifest_checksum"]
    document = {name: value for name, value in {**document, **changes}.items() if value is not REMOVED}
    document["manifest_checksum"] = _checksum(document)
    (folder / MANIFEST).write_text(json.dumps(document))


def chunk(**changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(encoded(manifest()))["chunks"][0]
    return {**document, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "pickle"}, "not the manifest"),
        ({"format_version": 2}, r"version 2, which is newer than the version 1.*update megapipe to 0\.1\.0 or later"),
        ({"format_version": "2"}, r"has format version '2'; this megapipe reads version 1"),
        ({"format_version": 0}, r"version 0, which is older than the version 1.*with megapipe 0\.1\.0, which wrote"),
        ({"data": {"shards": [{"prefix": "web"}], "vocabulary": None}}, "num_documents"),
        ({"data": 5}, "int"),
        ({"data_changes": [5]}, "int"),
        ({"step": None}, "step|int"),
        ({"files": {"../../etc/passwd": 1}}, "etc/passwd"),
        ({"files": {"/etc/passwd": 1}}, "etc/passwd"),
        ({"files": {"..": 1}}, "file name"),
        ({"chunks": [chunk(file="elsewhere")]}, "a file that is not in the checkpoint"),
        ({"chunks": [chunk(box=[[0, 0], [5, 3]])]}, "outside"),
        ({"chunks": [chunk(box=[[0], [2]])]}, "zip"),
        ({"chunks": [chunk(range=[0, 7])]}, "outside"),
        ({"chunks": [chunk(range=[-1, 3])]}, "outside"),
        ({"chunks": [chunk(dtype="object")]}, "object"),
        ({"chunks": [chunk(checksums=[])]}, "0 checksums"),
        ({"chunks": 5}, "int"),
        ({"losses": [[1, 2, 3]]}, "unpack"),
        *(({name: REMOVED}, name) for name in REQUIRED),
    ],
    ids=str,
)
def test_invalid_content_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    rewrite(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "below/file", "/etc/passwd", "a\0b", "x" * 256])
def test_names_with_paths_are_not_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="which is not in its folder; it is not read"):
        inside(tmp_path, name)
    assert inside(tmp_path, "file") == tmp_path / "file"
