"""manifest.json: round trip, every changed byte noticed, nothing in it leaves its folder."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megapipe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megapipe.checkpoint.extents import Extent
from megapipe.checkpoint.manifest import Chunk, DataChange, Manifest, RunState
from megapipe.checkpoint.manifest_file import MANIFEST, _checksum, check_files, encoded, read_manifest
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


def test_no_flipped_bit_changes_what_is_read(tmp_path: Path) -> None:
    text = encoded(manifest())
    found = 0
    for position in range(len(text)):
        damaged = bytearray(text)
        damaged[position] ^= 1 << (position % 7)
        (tmp_path / MANIFEST).write_bytes(damaged)
        try:
            assert read_manifest(tmp_path) == manifest(), f"byte {position} changed the meaning unnoticed"
        except DamagedCheckpointError:  # any other error would end the job instead of falling back
            found += 1
    assert found > 0.9 * len(text)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_manifest_is_damaged(tmp_path: Path, share: float) -> None:
    text = encoded(manifest())
    (tmp_path / MANIFEST).write_bytes(text[: int(len(text) * share)])
    with pytest.raises(DamagedCheckpointError, match=MANIFEST):
        read_manifest(tmp_path)


def rewrite(folder: Path, **changes: Any) -> None:
    """A manifest with other content and the checksum that belongs to it, as a hostile or foreign writer could make."""
    document = json.loads(encoded(manifest()))
    del document["manifest_checksum"]
    document.update(changes)
    document["manifest_checksum"] = _checksum(document)
    (folder / MANIFEST).write_text(json.dumps(document))


def chunk(**changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(encoded(manifest()))["chunks"][0]
    return {**document, **changes}


@pytest.mark.parametrize(
    ("changes", "told"),
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
    ],
    ids=str,
)
def test_strange_content_is_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    rewrite(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=told):
        read_manifest(tmp_path)


def test_no_manifest_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpointError, match="has no manifest"):
        read_manifest(tmp_path)
    with pytest.raises(DamagedCheckpointError, match="has no manifest"):
        read_manifest(tmp_path / "nowhere")


def test_deep_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("[" * 100_000)
    with pytest.raises(DamagedCheckpointError, match="JSON"):
        read_manifest(tmp_path)


def test_files_must_be_there_with_their_sizes(tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpointError, match="missing"):
        check_files(tmp_path, manifest())
    (tmp_path / FILE).write_bytes(bytes(99))
    with pytest.raises(DamagedCheckpointError, match="99 bytes instead of 100"):
        check_files(tmp_path, manifest())
    (tmp_path / FILE).write_bytes(bytes(100))
    check_files(tmp_path, manifest())
