"""Every input format gives the documents of its own library, for any number of workers, also from the hub."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from hashlib import sha1
from pathlib import Path
from unittest.mock import Mock

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megapipe.data import DataError
from megapipe.data.preprocess import inputs, tables, tokenize_part
from megapipe.data.preprocess.documents import read_documents
from megapipe.data.preprocess.inputs import InputFile, cut_into_parts, find_inputs
from megapipe.data.preprocess.tables import DatasetName
from tests.data.commands import ROOT, manifest_of, preprocess, texts_of
from tests.support.hub import serving

TITLES = [f"title {number}" for number in range(2500)]
TEXTS = [f"{number} naïve 東京 " + "words " * (number % 50) for number in range(2500)]
TABLE = pa.table({"id": list(range(2500)), "text": TEXTS, "title": pa.array(TITLES, pa.large_string())})


def json_lines() -> bytes:
    lines = (json.dumps({"text": text, "title": title}) for text, title in zip(TEXTS, TITLES, strict=True))
    return "\n".join(lines).encode()


def write_gzip(folder: Path) -> str:
    half = len(json_lines()) // 2  # two members, as `cat a.gz b.gz` gives
    (folder / "in.jsonl.gz").write_bytes(gzip.compress(json_lines()[:half]) + gzip.compress(json_lines()[half:]))
    return "in.jsonl.gz"


def write_zstandard(folder: Path) -> str:
    with pa.output_stream(folder / "in.jsonl.zst", compression="zstd") as file:
        file.write(json_lines())
    return "in.jsonl.zst"


def write_parquet(folder: Path, name: str = "in.parquet") -> str:
    pyarrow.parquet.write_table(TABLE, folder / name, row_group_size=400)
    return name


def write_arrow_file(folder: Path, new: Callable = pa.ipc.new_file) -> str:
    with new(folder / "in.arrow", TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=300)
    return "in.arrow"


def write_arrow_stream(folder: Path) -> str:
    return write_arrow_file(folder, pa.ipc.new_stream)


def save_dataset(folder: Path) -> str:
    datasets.Dataset.from_dict(TABLE.to_pydict()).save_to_disk(str(folder / "saved"))
    return "saved"


def save_splits(folder: Path) -> str:
    other = datasets.Dataset.from_dict({"text": ["no"], "title": ["no"]})
    splits = {"test": other, "extra": datasets.Dataset.from_dict(TABLE.to_pydict())}
    datasets.DatasetDict(splits).save_to_disk(str(folder / "saved"))
    return f"dataset:{folder / 'saved'}@extra"


def save_chosen_rows(folder: Path) -> str:
    """Rows in reverse, turned back by an index mapping, as filter and shuffle leave one."""
    backwards = list(range(2499, -1, -1))
    rows = datasets.Dataset.from_dict(TABLE.take(backwards).to_pydict()).select(backwards)
    rows.save_to_disk(str(folder / "saved"))
    return "saved"


def write_folder_of_data_files(folder: Path) -> str:
    (folder / "hub").mkdir()
    write_parquet(folder, "hub/train.parquet")
    return f"dataset:{folder / 'hub'}"


FORMATS: list[Callable[[Path], str]] = [
    *(write_gzip, write_zstandard, write_parquet, write_arrow_file, write_arrow_stream),
    *(save_dataset, save_splits, save_chosen_rows, write_folder_of_data_files),
]
"""Functions that write the same documents as a file of a format, and return its name as an input."""


@pytest.fixture(autouse=True)
def _offline(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    tables._load_dataset.cache_clear()  # relative names of earlier tests


@pytest.mark.parametrize("write", FORMATS)
def test_documents_come_in_order_from_small_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], str]
) -> None:
    monkeypatch.chdir(tmp_path)
    files = find_inputs([write(tmp_path)])
    parts = list(cut_into_parts(files, part_bytes=20_000))
    assert len(parts) > 1 or files[0].is_compressed or files[0].path.name == "hub"
    documents = [d for part in parts for piece in part.pieces for d in read_documents(piece, ["title", "text"])]
    assert [document.texts(["title", "text"]) for document in documents] == [
        list(pair) for pair in zip(TITLES, TEXTS, strict=True)
    ]


@pytest.mark.parametrize(
    "write", [pytest.param(each, marks=() if each is write_parquet else pytest.mark.slow) for each in FORMATS]
)
def test_every_format_and_worker_count_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tokenize_part, "PART_BYTES", 20_000)
    (tmp_path / "plain.jsonl").write_bytes(json_lines())
    source = write(tmp_path)
    for name, file, workers in (("plain", "plain.jsonl", 1), ("out1", source, 1), ("out2", source, 2)):
        command = ["--input", file, "--json_keys", "text", "title", "--append-eod", "--workers", workers]
        preprocess(*command, "--output-prefix", name)
    for key in ("text", "title"):
        for kind in ("bin", "idx", "manifest.json"):
            names = ["out1", "out2"] if kind == "manifest.json" else ["out1", "out2", "plain"]
            assert len({Path(f"{name}_{key}_document.{kind}").read_bytes() for name in names}) == 1


def test_datasets_are_identified_by_their_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checksums = []
    for texts in (["one"], ["two"], ["one"]):
        datasets.Dataset.from_dict({"text": texts}).save_to_disk("saved")
        fingerprint = datasets.load_from_disk("saved")._fingerprint
        tables._load_dataset.cache_clear()
        preprocess("--input", "saved", "--output-prefix", "out")
        sources = manifest_of("out_text_document").sources
        assert sources is not None
        assert sources["files"][0]["checksum"] == f"datasets:{fingerprint}"
        checksums.append(sources["checksum"])
    assert checksums[0] == checksums[2] != checksums[1]


def test_idle_workers_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize_part, "PART_BYTES", 1000)
    monkeypatch.chdir(tmp_path)
    command = ["--input", write_zstandard(tmp_path), "--output-prefix", "out"]
    assert "workers busy" not in preprocess(*command).err
    messages = preprocess(*command, "--workers", 2).err
    (note,) = (line for line in messages.splitlines() if line.startswith("note"))
    assert "in.jsonl.zst keeps 1 of 2 workers busy" in note
    assert "several files" in note
    large = 10_000
    whole = [InputFile(Path(f"{number}.txt"), large) for number in range(3)]
    assert inputs.idle_workers(whole, 3, 1000) is None
    assert "3 files keep 3 of 4 workers busy" in str(inputs.idle_workers(whole, 4, 1000))
    assert inputs.idle_workers([InputFile(Path("a.jsonl"), large)], 8, 1000) is None
    assert inputs.idle_workers([InputFile(Path("a.jsonl.gz"), 100)], 8, 1000) is None


def test_dataset_names_without_a_network_give_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # what it sets ends with the test
    no_such_host = Mock(side_effect=OSError(-2, "Name or service not known"))
    monkeypatch.setattr(tables.socket, "getaddrinfo", no_such_host)
    monkeypatch.setattr(tables.urllib.request, "getproxies", dict)
    not_there = Mock(side_effect=ConnectionError("Couldn't reach the Hugging Face Hub\nat all"))
    monkeypatch.setattr(datasets, "load_dataset", not_there)
    command = ["--input", "dataset:missing/missing@train", "--output-prefix", tmp_path / "out"]
    (message,) = preprocess(*command, status=2).err.splitlines()
    assert "huggingface.co cannot be reached (Name or service not known)" in message
    assert "dataset:FOLDER" in message


def test_compressed_text_and_joined_fields_are_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\ntwo\n"))
    preprocess("--input", tmp_path / "a.txt.gz", "--output-prefix", tmp_path / "gz")
    assert texts_of(tmp_path / "gz_text_document") == ["one\ntwo\n"]
    (tmp_path / "in.jsonl").write_text('{"title": "T", "text": "x"}\n{"title": "", "text": "y"}\n')
    arguments = ["--json-keys", "title", "text", "--join-keys", ": ", "--output-prefix", tmp_path / "out"]
    preprocess("--input", tmp_path / "in.jsonl", *arguments)
    assert texts_of(tmp_path / "out_title_text_document") == ["T: x", ": y"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=9), max_size=9), rows=st.integers(1, 4)
)
def test_any_texts_are_read_from_tables(tmp_path: Path, texts: list[str], rows: int) -> None:
    table = pa.table({"text": pa.array(texts, pa.string())})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet", row_group_size=rows)
    with pa.ipc.new_file(tmp_path / "in.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    for name in ("in.parquet", "in.arrow"):
        parts = cut_into_parts([InputFile(tmp_path / name, 1)], 1)
        read = [d.texts(["text"])[0] for p in parts for piece in p.pieces for d in read_documents(piece, ["text"])]
        assert read == texts


def broken_rows(folder: Path) -> Path:
    """Write a table with a row that is not UTF-8 and one that is null."""
    offsets, content = np.array([0, 1, 3, 4, 4], np.int32), b"a\xff\xfeb"
    buffers = [pa.py_buffer(b"\x07"), pa.py_buffer(offsets.tobytes()), pa.py_buffer(content)]
    table = pa.table({"text": pa.Array.from_buffers(pa.string(), 4, buffers)})
    pyarrow.parquet.write_table(table, folder / "in.parquet")
    return folder / "in.parquet"


def unreadable(folder: Path) -> Path:
    """Return memory that is not mapped: reading gives an input/output error, as a broken disk does."""
    (folder / "b.txt").symlink_to("/proc/self/mem")
    return folder / "b.txt"


def truncated(write: Callable[[Path], str], folder: Path) -> Path:
    path = folder / write(folder)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    return path


@pytest.mark.parametrize(
    ("damaged", "message", "skipped", "texts"),
    [
        (broken_rows, ", row 1: field 'text' is not UTF-8", ", row 3: field 'text' is null, but must be", ["a", "b"]),
        (unreadable, " cannot be read (Input/output error)", " cannot be read", []),
        *(
            (partial(truncated, write), ": the compressed data is damaged or cut off after line", "", TEXTS)
            for write in (write_gzip, write_zstandard)
        ),
    ],
    ids=["rows", "disk", "gzip", "zstandard"],
)
def test_damage_is_named_and_can_be_skipped(
    tmp_path: Path, damaged: Callable[[Path], Path], message: str, skipped: str, texts: list[str]
) -> None:
    path = damaged(tmp_path)
    (tmp_path / "z.jsonl").write_text('{"text": "after"}\n')
    arguments = ["--input", path, tmp_path / "z.jsonl", "--output-prefix", tmp_path / "out"]
    assert f"{path}{message}" in preprocess(*arguments, status=2).err
    assert f"{path}{skipped}" in preprocess(*arguments, "--on-error", "skip").err
    *before, last = texts_of(tmp_path / "out_text_document")
    assert last == "after"
    assert before == texts[: len(before)]
    assert len(before) >= min(len(texts), 100)


@pytest.mark.parametrize("write", [write_parquet, write_arrow_file, save_dataset])
def test_missing_columns_are_named(tmp_path: Path, write: Callable[[Path], str]) -> None:
    arguments = ["--input", tmp_path / write(tmp_path), "--json-keys", "body", "--output-prefix", tmp_path / "out"]
    assert "has no column 'body', only 'id', 'text', 'title'" in preprocess(*arguments, status=2).err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("in.jsonl.gz", "the compressed data is damaged"),
        ("in.jsonl.zst", "the compressed data is damaged"),
        ("in.parquet", "cannot be read as Parquet"),
        ("in.arrow", "cannot be read as Arrow"),
        ("dataset:empty", "cannot be opened as a dataset; check the folder"),
        ("saved", "has the splits test, extra: name one"),
    ],
)
def test_a_source_of_another_format_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if name.startswith("in."):
        Path(name).write_bytes(b'{"text": "plain"}\n' * 20)
    Path("empty").mkdir()
    save_splits(tmp_path)
    assert message in preprocess("--input", name, "--output-prefix", "out", status=2).err
    assert not list(tmp_path.glob("out*"))


RUN_ALL = "import json, sys; from megapipe.data.preprocess.command import main; " + (
    "print([main(command) for command in json.loads(sys.argv[1])])"
)


def text_lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


PARTS = [text_lines("a", "b"), text_lines("c"), text_lines("d", "e")]
REVISIONS = {
    "main": {f"train-{number}.jsonl": part for number, part in enumerate(PARTS)},
    "v1": {"train-0.jsonl": text_lines("old")},
}


@pytest.mark.parametrize("name", ["letters", "letters?v1", "letters&stream", "a@b:c"])
def test_options_of_the_hub_are_refused_for_folders(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    assert DatasetName.of(f"dataset:{folder}") == DatasetName(str(folder))
    for options in ({"revision": "v1"}, {"stream": True}):
        with pytest.raises(DataError, match="is a folder, but --dataset-revision"):
            find_inputs([f"dataset:{folder}"], **options)  # type: ignore[arg-type]
        with pytest.raises(DataError, match="need an input dataset:NAME"):
            find_inputs(["python-stdlib"], **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_datasets_by_name_and_revision_downloaded_and_streamed(tmp_path: Path) -> None:
    names = ["main-stream", "v1-stream", "main-copy", "v1-copy"]
    commands = []
    for name in [*names, "v2-copy", "v2-stream"]:
        revision, kind = name.split("-")
        command = ["--input", "dataset:someone/letters", "--tokenizer", "bytes", "--workers", "1"]
        command += ["--output-prefix", str(tmp_path / name), "--dataset-revision", revision]
        commands.append([*command, "--dataset-streaming"] if kind == "stream" else command)
    with serving("someone/letters", REVISIONS) as endpoint:
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "no_proxy": "*"}
        environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        # In one process: importing the datasets library takes longer than all of this.
        program = [sys.executable, "-c", RUN_ALL, json.dumps(commands)]
        done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0, 2, 2]", done.stderr
    for name in names:
        revision, kind = name.split("-")
        assert texts_of(tmp_path / f"{name}_text_document") == (["old"] if revision == "v1" else list("abcde"))
        sources = manifest_of(tmp_path / f"{name}_text_document").sources
        assert sources is not None
        commit = f"commit:{sha1(revision.encode()).hexdigest()}"
        assert (sources["files"][0]["checksum"] == commit) == (kind == "stream")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 2
    assert all("check name and revision" in error or "check the name and revision" in error for error in errors)
