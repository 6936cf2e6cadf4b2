"""Shards: byte for byte Megatron-LM's, whole or absent, and clear about damage."""

import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megapipe.data.errors import DataError
from megapipe.data.index_writer import ShardWriter
from megapipe.data.indexed_dataset import IndexedDataset
from megapipe.data.shard_format import DTYPE_OF_CODE, token_dtype
from tests.data.shards import joined, write_shard

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


def test_reference_bytes_are_read(tmp_path: Path) -> None:
    (tmp_path / "shard.bin").write_bytes(REFERENCE_BIN)
    (tmp_path / "shard.idx").write_bytes(REFERENCE_IDX)
    dataset = IndexedDataset(tmp_path / "shard")
    assert [dataset[index].tolist() for index in range(len(dataset))] == [[1, 2, 3], [4, 5], [6]]
    assert documents_of(dataset) == [[1, 2, 3, 4, 5], [6]]
    assert dataset.num_tokens == 6
    assert dataset.document_starts_between(0, 6).tolist() == [5]
    assert dataset.document_starts_between(0, 5).tolist() == []
    assert dataset.document_starts_between(5, 6).tolist() == []


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
def test_extreme_tokens_of_each_dtype_survive_and_wider_ones_are_refused(tmp_path: Path, code: int) -> None:
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
        ("bin", {"patch": b"\x00\x00", "at": 12}, "not of the same shard"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, kind: str, change: dict, message: str) -> None:
    prefix = write_shard(tmp_path / "shard", REFERENCE_DOCUMENTS)
    damage(tmp_path / f"shard.{kind}", **change)
    with pytest.raises(DataError, match=message) as caught:
        IndexedDataset(prefix)
    assert f"shard.{kind}" in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    write_shard(tmp_path / "corpus_text_document", REFERENCE_DOCUMENTS)
    with pytest.raises(DataError, match=r"corpus.idx does not exist.*contains corpus_text_document"):
        IndexedDataset(tmp_path / "corpus")
    (tmp_path / "corpus_text_document.bin").unlink()
    with pytest.raises(DataError, match=r"corpus_text_document.bin does not exist"):
        IndexedDataset(tmp_path / "corpus_text_document")


def test_a_shard_of_another_dtype_is_not_joined(tmp_path: Path) -> None:
    write_shard(tmp_path / "wide", REFERENCE_DOCUMENTS, "<i4")
    with ShardWriter(tmp_path / "narrow", np.dtype("<u2")) as writer, pytest.raises(DataError, match=r"int32.*uint16"):
        writer.append_shard(tmp_path / "wide")


def test_leaving_without_commit_leaves_nothing(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "shard", np.dtype("<u2")) as writer:
        writer.add_document([[1, 2]])
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files cannot grow beyond 100,000 bytes."""
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, previous[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, previous)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("tokens", [60_000, 600_000])  # within the buffer, beyond it
def test_a_full_disk_leaves_the_old_shard_alone(tmp_path: Path, small_files: None, tokens: int) -> None:
    prefix = write_shard(tmp_path / "shard", REFERENCE_DOCUMENTS)
    with pytest.raises(OSError, match="too large"):
        write_shard(prefix, [[range(tokens)]], "<i4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard.bin", "shard.idx"]
    assert documents_of(IndexedDataset(prefix)) == [[1, 2, 3, 4, 5], [6]]


KILLED_WRITER = """
import os, sys
from pathlib import Path
from tests.data.shards import write_shard

calls = 0
def killing(function):
    def wrapped(*arguments, **named):
        global calls
        if calls == int(sys.argv[2]):
            os._exit(9)
        calls += 1
        return function(*arguments, **named)
    return wrapped

os.fsync, os.replace, Path.unlink = killing(os.fsync), killing(os.replace), killing(Path.unlink)
write_shard(Path(sys.argv[1]), [[[7, 8, 9, 10]]] * 5)
"""


def test_killed_at_any_step_of_publishing_there_is_the_old_shard_none_or_the_new(tmp_path: Path) -> None:
    old, new = [[[1, 2]], [[3]]], [[7, 8, 9, 10]] * 5
    seen = []
    for step in range(40):
        prefix = write_shard(tmp_path / f"shard{step}", old)
        command = [sys.executable, "-c", KILLED_WRITER, str(prefix), str(step)]
        finished = subprocess.run(command, timeout=60, cwd=Path(__file__).parents[2])
        if (tmp_path / f"shard{step}.idx").exists():
            state = documents_of(IndexedDataset(prefix))
            assert state in ([[1, 2], [3]], new)
            seen.append("old" if state == [[1, 2], [3]] else "new")
        else:
            seen.append("none")
        if finished.returncode == 0:
            break
        assert finished.returncode == 9
    assert seen == sorted(seen, key=["old", "none", "new"].index)
    assert {"old", "none", "new"} == set(seen)
    assert documents_of(IndexedDataset(write_shard(tmp_path / "shard0", old))) == [[1, 2], [3]]


def test_offsets_beyond_four_gigabytes(tmp_path: Path) -> None:
    """A sparse .bin of 6 GiB of zeros: offsets are 64 bits wide throughout."""
    length = 2**30
    lengths = np.full(3, length, dtype="<i4")
    offsets = np.arange(3, dtype="<i8") * length * 2
    header = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + b"\x08" + (3).to_bytes(8, "little") * 1
    header += (4).to_bytes(8, "little")
    (tmp_path / "shard.idx").write_bytes(
        header + lengths.tobytes() + offsets.tobytes() + np.arange(4, dtype="<i8").tobytes()
    )
    with (tmp_path / "shard.bin").open("wb") as file:
        file.seek(3 * length * 2 - 2)
        file.write(b"\x2a\x00")
    dataset = IndexedDataset(tmp_path / "shard")
    assert dataset.num_tokens == 3 * length
    assert dataset.document(2)[-2:].tolist() == [0, 42]
    assert dataset.document_starts_between(1, 3 * length).tolist() == [length, 2 * length]
