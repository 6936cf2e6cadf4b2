"""Shards: byte for byte those of Megatron-LM, whole or absent, with clear errors for damage, and manifests; they read
only the pages of a file that they need."""

import itertools
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megapipe.data import DataError, files
from megapipe.data.files import drop_from_page_cache, resident_share
from megapipe.data.manifest import check_one_tokenizer, manifest_path, read_manifest
from megapipe.data.samples import GptSamples, PackedSamples
from megapipe.data.shard_writer import ShardWriter
from megapipe.data.shards import DTYPE_OF_CODE, HEADER, MAGIC, VERSION, IndexedDataset, bin_path, idx_path, token_dtype
from megapipe.training.loop.batches import open_samples
from tests.checkpoint.disks import Killed, no_larger_files
from tests.data.commands import manifest_of
from tests.data.shards import joined, shard_manifest, write_shard
from tests.support.bert_runs import make_bert_config, write_corpus
from tests.support.gpt_runs import GPT2_SHAPE, make_config
from tests.support.gpt_runs import write_shard as write_random_shard

REFERENCE_DOCUMENTS = [[[1, 2, 3], [4, 5]], [[6]]]
REFERENCE_BIN = bytes.fromhex("010002000300040005000600")
REFERENCE_IDX = bytes.fromhex(
    "4d4d49444944580000 0100000000000000 08 0300000000000000 0300000000000000"
    "030000000200000001000000"
    "000000000000000006000000000000000a00000000000000"
    "000000000000000002000000000000000300000000000000"
)


def documents_of(dataset: IndexedDataset) -> list[list[int]]:
    return [dataset.document(index).tolist() for index in range(dataset.num_documents)]


def test_reference_bytes(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", REFERENCE_DOCUMENTS)
    assert (tmp_path / "shard.bin").read_bytes() == REFERENCE_BIN
    assert (tmp_path / "shard.idx").read_bytes() == REFERENCE_IDX
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard.bin", "shard.idx"]
    dataset = IndexedDataset(tmp_path / "shard")
    assert [dataset[index].tolist() for index in range(len(dataset))] == [[1, 2, 3], [4, 5], [6]]
    assert documents_of(dataset) == [[1, 2, 3, 4, 5], [6]]
    with ShardWriter(tmp_path / "wide", np.dtype("<i4")) as writer, pytest.raises(DataError, match=r"uint16.*int32"):
        writer.append_shard(tmp_path / "shard")
    assert len(list(tmp_path.iterdir())) == 2, "without a commit, nothing is left"


documents_strategy = st.lists(st.lists(st.lists(st.integers(0, 127), max_size=5), max_size=3), max_size=8)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(documents_strategy, min_size=1, max_size=3), code=st.sampled_from(sorted(DTYPE_OF_CODE)))
def test_round_trip_and_joining(tmp_path: Path, parts: list, code: int) -> None:
    dtype = DTYPE_OF_CODE[code]
    with ShardWriter(tmp_path / "joined", dtype) as writer:
        for index, documents in enumerate(parts):
            write_shard(tmp_path / f"part{index}", documents, dtype.str)
            writer.append_shard(tmp_path / f"part{index}")
        writer.commit()
    everything = [document for documents in parts for document in documents]
    write_shard(tmp_path / "whole", everything, dtype.str)
    for kind in ("bin", "idx"):
        assert (tmp_path / f"joined.{kind}").read_bytes() == (tmp_path / f"whole.{kind}").read_bytes()
    dataset = IndexedDataset(tmp_path / "whole")
    assert dataset.dtype == dtype
    assert documents_of(dataset) == list(map(joined, everything))
    sequences = [sequence for document in everything for sequence in document if sequence]
    assert [dataset[index].tolist() for index in range(len(dataset))] == sequences
    starts = {dataset.document_start(index) for index in range(dataset.num_documents)}
    for begin in range(dataset.num_tokens):
        expected = [start for start in sorted(starts) if begin < start < dataset.num_tokens]
        assert dataset.document_starts_between(begin, dataset.num_tokens).tolist() == expected


@pytest.mark.parametrize("code", sorted(DTYPE_OF_CODE))
def test_extreme_tokens_fit_and_wider_ones_are_refused(tmp_path: Path, code: int) -> None:
    dtype = DTYPE_OF_CODE[code]
    limits = np.iinfo(dtype)
    write_shard(tmp_path / "shard", [[[limits.min, limits.max]]], dtype.str)
    assert IndexedDataset(tmp_path / "shard").document(0).tolist() == [limits.min, limits.max]
    if dtype.itemsize < 8:
        with pytest.raises(DataError, match=str(limits.max + 1)):
            write_shard(tmp_path / "other", [[[0, limits.max + 1]]], dtype.str)
        assert not list(tmp_path.glob("other*"))


@pytest.mark.parametrize(("vocabulary_size", "name"), [(257, "uint16"), (65_499, "uint16"), (65_500, "int32")])
def test_dtype_follows_the_vocabulary(vocabulary_size: int, name: str) -> None:
    assert token_dtype(vocabulary_size).name == name


def damage(path: Path, keep: int | None = None, at: int = 0, patch: bytes = b"") -> None:
    content = bytearray(path.read_bytes()[:keep])
    content[at : at + len(patch)] = patch
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("idx", {"patch": b"TNTIDX"}, "not the index"),
        ("idx", {"patch": b"\x02", "at": 9}, "version 2"),
        ("idx", {"patch": b"\x06", "at": 17}, "dtype code 6.*float"),
        ("idx", {"patch": b"\x07", "at": 17}, "dtype code 7.*float"),
        ("idx", {"patch": b"\x09", "at": 17}, "unknown dtype code 9"),
        ("idx", {"keep": 0}, "truncated: 0 bytes"),
        ("idx", {"keep": 5}, "truncated: 5 bytes"),
        ("idx", {"keep": 33}, "truncated: 33 bytes"),
        ("idx", {"keep": 93}, "truncated: 93 bytes, but its header announces 94"),
        ("idx", {"patch": b"\x00" * 3, "at": 94}, "multimodal"),
        ("idx", {"patch": b"\x00" * 2, "at": 94}, "96 bytes.*announces 94"),
        ("idx", {"patch": b"\x04", "at": 86}, "damaged.*0 to 4"),
        ("idx", {"patch": b"\x00" * 8, "at": 26}, "no document boundaries"),
        ("bin", {"keep": 11}, "truncated: 11 bytes.*describes 12"),
        ("bin", {"patch": b"\x00\x00", "at": 12}, "belong to different shards"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, kind: str, change: dict, message: str) -> None:
    prefix = write_shard(tmp_path / "shard", REFERENCE_DOCUMENTS)
    damage(tmp_path / f"shard.{kind}", **change)
    with pytest.raises(DataError, match=message) as caught:
        IndexedDataset(prefix)
    assert f"shard.{kind}" in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path / "corpus_text_document", REFERENCE_DOCUMENTS)
    with pytest.raises(DataError, match=r"corpus.idx does not exist.*contains corpus_text_document"):
        IndexedDataset(tmp_path / "corpus")
    (tmp_path / "corpus_text_document.bin").unlink()
    with pytest.raises(DataError, match=r"corpus_text_document.bin does not exist"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("limit", [100_000, 1_000_000])
def test_a_full_disk_keeps_the_old_shard(tmp_path: Path, limit: int) -> None:
    """Within the buffer and beyond it."""
    prefix = write_shard(tmp_path / "shard", [[[1, 2]], [[3]]])
    with no_larger_files(100_000), pytest.raises(OSError, match="too large"):
        write_shard(prefix, [[range(limit)]], "<i4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard.bin", "shard.idx"]
    assert documents_of(IndexedDataset(prefix)) == [[1, 2], [3]]


def test_a_kill_leaves_the_old_no_or_the_new_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before every change of the disk."""
    old, new = [[[1, 2]], [[3]]], [[[7, 8, 9, 10]]] * 5
    seen = []
    for step in itertools.count():
        prefix = write_shard(tmp_path / f"shard{step}", old)
        calls = itertools.count()

        def killing(function: Callable[..., object], step: int = step, calls: Iterator[int] = calls) -> object:
            def run(*arguments: object, **named: object) -> object:
                if next(calls) >= step:
                    raise Killed
                return function(*arguments, **named)

            return run

        with monkeypatch.context() as patch, suppress(Killed):
            for owner, name in ((os, "fsync"), (os, "replace"), (Path, "unlink")):
                patch.setattr(owner, name, killing(getattr(owner, name)))
            write_shard(prefix, new)
        if not Path(f"{prefix}.idx").exists():
            seen.append("none")
            continue
        documents = documents_of(IndexedDataset(prefix))
        assert documents in ([[1, 2], [3]], [[7, 8, 9, 10]] * 5)
        seen.append("old" if documents == [[1, 2], [3]] else "new")
        if next(calls) <= step:
            break
    assert list(dict.fromkeys(seen)) == ["old", "none", "new"]
    assert documents_of(IndexedDataset(write_shard(tmp_path / "shard0", old))) == [[1, 2], [3]]


def test_offsets_beyond_four_gigabytes(tmp_path: Path) -> None:
    """A sparse .bin of 6 GiB of zeros: offsets are 64 bits wide throughout."""
    length = 2**30
    lengths, offsets = np.full(3, length, dtype="<i4"), np.arange(3, dtype="<i8") * length * 2
    arrays = (lengths, offsets, np.arange(4, dtype="<i8"))
    header = HEADER.pack(MAGIC, VERSION, 8, 3, 4)
    (tmp_path / "shard.idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    with (tmp_path / "shard.bin").open("wb") as file:
        file.seek(3 * length * 2 - 2)
        file.write(b"\x2a\x00")
    dataset = IndexedDataset(tmp_path / "shard")
    assert dataset.num_tokens == 3 * length
    assert dataset.document(2)[-2:].tolist() == [0, 42]
    assert dataset.document_starts_between(1, 3 * length).tolist() == [length, 2 * length]


def read_all(samples: Any) -> None:
    for ordinal in range(len(samples)):
        if hasattr(samples, "batch"):
            samples.batch([ordinal])
        else:
            samples.tokens([ordinal]), samples.boundaries([ordinal])


@pytest.mark.parametrize("suffix", ["bin", "idx"])
@pytest.mark.parametrize("data", [{}, {"pack": "best_fit"}, {"order": "megatron"}, {"pairs": "next"}], ids=str)
def test_a_truncated_file_is_named(tmp_path: Path, data: dict[str, Any], suffix: str) -> None:
    if "pairs" in data:
        config = make_bert_config(replace(write_corpus(tmp_path), **data))
    else:
        config = make_config(write_random_shard(tmp_path), GPT2_SHAPE, data=data)
    samples = open_samples(config, "train")
    read_all(samples)
    path = f"{config.data.prefix}.{suffix}"
    size = os.path.getsize(path)
    os.truncate(path, 0)
    if "pack" in data and suffix == "idx":  # its pieces are in memory: the index is not read again
        read_all(samples)
        return
    message = rf"{path} has 0 bytes now and had {size:,} when it was opened.*restore the file"
    with pytest.raises(DataError, match=message):
        read_all(samples)


def test_files_that_grew_are_named_and_replaced_ones_not(tmp_path: Path) -> None:
    prefix = write_random_shard(tmp_path)
    shard = IndexedDataset(prefix)
    content = Path(f"{prefix}.bin").read_bytes()
    copy = tmp_path / "copy"
    copy.write_bytes(content[:-2])
    copy.rename(f"{prefix}.bin")  # the mapped file is still whole
    assert shard.tokens.tobytes() == content
    with Path(f"{prefix}.idx").open("ab") as file:
        file.write(b"more")
    with pytest.raises(DataError, match=r"corpus.idx has .* it was changed while in use"):
        shard.document(0)


MANIFEST = shard_manifest()


def write_described(prefix: Path, **fields: Any) -> Path:
    with ShardWriter(prefix, np.dtype("<u2")) as writer:
        writer.add_document([[1, 2, 256]])
        writer.commit(replace(MANIFEST, **fields))
    return prefix


def open_described(prefix: Path, vocabulary_size: int = 257) -> GptSamples:
    return GptSamples(prefix, split="train", shares="1", sequence_length=2, seed=0, vocabulary_size=vocabulary_size)


def test_a_manifest_has_checksums_which_find_a_flipped_bit(tmp_path: Path) -> None:
    prefix = write_described(tmp_path / "shard")
    paths = {kind: Path(f"{prefix}.{kind}") for kind in ("bin", "idx")}
    hashes = {kind: xxhash.xxh3_128_hexdigest(path.read_bytes()) for kind, path in paths.items()}
    checksums = {f"{kind}_checksum": f"xxh128:{digest}" for kind, digest in hashes.items()}
    manifest = manifest_of(prefix)
    assert manifest == replace(MANIFEST, **checksums)
    for kind, path in paths.items():
        manifest.check_checksums(prefix)
        content = path.read_bytes()
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        with pytest.raises(DataError, match=rf"shard\.{kind} is damaged: its checksum is"):
            manifest.check_checksums(prefix)
        path.write_bytes(content)
    write_shard(prefix, [[[1]]])  # a new shard without a manifest does not keep the old one's
    assert read_manifest(prefix) is None


def test_a_shard_of_another_vocabulary_or_manifest_is_refused(tmp_path: Path) -> None:
    prefix = write_described(tmp_path / "shard")
    assert open_described(prefix, 300).tokens(0).tolist() == [1, 2, 256]
    message = "bytes of 257 ids, but the model's vocabulary_size is 256; set it to at least"
    with pytest.raises(DataError, match=message):
        open_described(prefix, 256)
    write_described(prefix, num_tokens=4)
    with pytest.raises(DataError, match="describes another shard"):
        open_described(prefix)
    MANIFEST.check_shard(IndexedDataset(prefix))


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    MANIFEST.check_tokenizer("bytes", "sha256:1234")
    with pytest.raises(DataError, match=r"tokenized with bytes .*not with gpt2.json"):
        MANIFEST.check_tokenizer("gpt2.json", "sha256:9999")
    one = write_described(tmp_path / "one")
    other = write_described(tmp_path / "other", tokenizer="x", tokenizer_fingerprint="sha256:77")
    with pytest.raises(DataError, match="tokenized with x"):
        check_one_tokenizer(map(read_manifest, (one, tmp_path / "without", other)))


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


PAGES = 300


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file that was just written, and is therefore in memory."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(PAGES * mmap.PAGESIZE - 5))
    assert resident_share([path]) == 1.0
    return path


def make_cold(path: Path) -> None:
    """Remove a file from the page cache; skip where that does not work, as in a file system in memory."""
    drop_from_page_cache([path])
    if resident_share([path]) == 1.0:
        pytest.skip("this folder's file system keeps its files in memory")


def test_a_dropped_file_is_read_again(file: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    assert (resident_share([empty]), resident_share([file, empty])) == (0.0, 1.0)
    with pytest.raises(OSError, match="missing"):
        drop_from_page_cache([tmp_path / "missing"])
    make_cold(file)
    assert resident_share([file]) == 0.0
    assert len(file.read_bytes()) == PAGES * mmap.PAGESIZE - 5
    assert resident_share([file]) == 1.0


def test_large_files_are_sampled(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SAMPLED_RUNS", 7)
    monkeypatch.setattr(files, "PAGES_IN_A_RUN", 4)
    assert resident_share([file]) == 1.0
    make_cold(file)
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # disable readahead
        opened.seek(PAGES // 2 * mmap.PAGESIZE)
        while opened.read(mmap.PAGESIZE):
            pass
    assert resident_share([file]) == pytest.approx(0.5, abs=0.2)


def test_index_searches_read_only_the_pages_they_touch(tmp_path: Path) -> None:
    prefix = tmp_path / "shard"
    piece = write_shard(tmp_path / "piece", [[[1]]] * 10_000)
    with ShardWriter(prefix, np.dtype("<u2")) as writer:
        for _ in range(10):
            writer.append_shard(piece)
        writer.commit()
    index = idx_path(prefix)
    pages = index.stat().st_size / mmap.PAGESIZE
    assert pages > 400
    make_cold(index)
    shard = IndexedDataset(prefix)
    shard.advise_random_index()
    for position in (10_000, 50_000, 90_000):
        assert shard.document_starts_between(position - 1, position + 2).tolist() == [position, position + 1]
    assert resident_share([index]) * pages <= 100


@pytest.mark.parametrize("kind", [GptSamples, PackedSamples])
def test_shuffled_samples_read_their_own_pages(tmp_path: Path, kind: type[GptSamples | PackedSamples]) -> None:
    prefix = write_shard(tmp_path / "shard", [[list(range(2000))]] * 2000)
    tokens = bin_path(prefix)
    make_cold(tokens)
    samples = kind(prefix, split="train", shares="1", sequence_length=2048, seed=3)
    drawn = samples.tokens(np.arange(20))
    pages = tokens.stat().st_size / mmap.PAGESIZE
    assert pages > 1900
    assert resident_share([tokens]) * pages <= 20 * 3  # of 2 pages, across 3
    assert np.array_equal(drawn, samples.tokens(np.arange(20)))
