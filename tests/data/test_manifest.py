"""The manifest of a shard, and its checks against model, tokenizer and shard."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from megapipe.data import DataError
from megapipe.data.manifest import ShardManifest, check_one_tokenizer, manifest_path, read_manifest
from megapipe.data.samples import GptSamples
from megapipe.data.shard_writer import ShardWriter
from megapipe.data.shards import IndexedDataset
from tests.data.shards import shard_manifest, write_shard

MANIFEST = shard_manifest()


def write_described(prefix: Path, manifest: ShardManifest = MANIFEST) -> Path:
    with ShardWriter(prefix, np.dtype("<u2")) as writer:
        writer.add_document([[1, 2, 256]])
        writer.commit(manifest)
    return prefix


def open_samples(prefix: Path, vocabulary_size: int = 257) -> GptSamples:
    return GptSamples(prefix, split="train", shares="1", sequence_length=2, seed=0, vocabulary_size=vocabulary_size)


def test_round_trip_and_absence(tmp_path: Path) -> None:
    prefix = write_described(tmp_path / "shard")
    written = read_manifest(prefix)
    assert written == replace(MANIFEST, bin_checksum=checksum(f"{prefix}.bin"), idx_checksum=checksum(f"{prefix}.idx"))
    write_shard(prefix, [[[1]]])  # a new shard without a manifest does not keep the old one's
    assert read_manifest(prefix) is None


def checksum(path: str) -> str:
    return f"xxh128:{xxhash.xxh3_128_hexdigest(Path(path).read_bytes())}"


@pytest.mark.parametrize("kind", ["bin", "idx"])
def test_a_flipped_bit_is_found(tmp_path: Path, kind: str) -> None:
    prefix = write_described(tmp_path / "shard")
    written = read_manifest(prefix)
    assert written is not None
    written.check_checksums(prefix)
    path = Path(f"{prefix}.{kind}")
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    with pytest.raises(DataError, match=rf"shard\.{kind} is damaged: its checksum is"):
        written.check_checksums(prefix)


def test_a_vocabulary_too_small_is_refused_before_training(tmp_path: Path) -> None:
    prefix = write_described(tmp_path / "shard")
    assert open_samples(prefix, 300).tokens(0).tolist() == [1, 2, 256]
    with pytest.raises(
        DataError, match="bytes of 257 ids, but the model's vocabulary_size is 256; set it to at least"
    ):
        open_samples(prefix, 256)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    MANIFEST.check_tokenizer("bytes", "sha256:1234")
    with pytest.raises(DataError, match=r"tokenized with bytes .*not with gpt2.json"):
        MANIFEST.check_tokenizer("gpt2.json", "sha256:9999")
    one = write_described(tmp_path / "one")
    other = write_described(tmp_path / "other", replace(MANIFEST, tokenizer="x", tokenizer_fingerprint="sha256:77"))
    with pytest.raises(DataError, match="tokenized with x"):
        check_one_tokenizer(map(read_manifest, (one, tmp_path / "without", other)))


def test_a_manifest_of_another_shard_is_refused(tmp_path: Path) -> None:
    prefix = write_described(tmp_path / "shard", replace(MANIFEST, num_tokens=4))
    with pytest.raises(DataError, match="describes another shard"):
        open_samples(prefix)
    MANIFEST.check_shard(IndexedDataset(prefix))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not readable JSON.*preprocess again"),
        ("[]", "is damaged"),
        ("{}", "is damaged.*format_version"),
        ('{"format_version": 2}', "version 2; only version 1 can be read"),
        ('{"format_version": 1}', "is damaged.*tokenizer"),
    ],
)
def test_damaged_manifests_are_refused(tmp_path: Path, content: str, message: str) -> None:
    manifest_path(tmp_path / "shard").write_text(content)
    with pytest.raises(DataError, match=message):
        read_manifest(tmp_path / "shard")
