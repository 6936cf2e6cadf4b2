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

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megapipe.data import DataError
from megapipe.data.manifest import read_manifest
from megapipe.data.preprocess import inputs, run, tables
from megapipe.data.preprocess.documents import read_documents
from megapipe.data.preprocess.inputs import InputFile, cut_into_parts, find_inputs
from megapipe.data.preprocess.tables import DatasetName
from tests.data.format_files import (
    FORMATS,
    TEXTS,
    TITLES,
    json_lines,
    save_dataset,
    save_splits,
    write_arrow_file,
    write_gzip,
    write_parquet,
    write_zstandard,
)
from tests.data.preprocess_runs import ROOT, preprocess, texts_of
from tests.support.hub import serving


@pytest.fixture(autouse=True)
def _offline(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


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
    monkeypatch.setattr(run, "cut_into_parts", partial(cut_into_parts, part_bytes=20_000))
    source = write(tmp_path)
    (tmp_path / "plain.jsonl").write_bytes(json_lines())
    plain = ["--input", "plain.jsonl", "--json-keys", "text", "title", "--append-eod", "--output-prefix", "plain"]
    assert preprocess(*plain) == 0
    for workers in (1, 2):
        command = ["--input", source, "--json_keys", "text", "title", "--append-eod", "--workers", workers]
        assert preprocess(*command, "--output-prefix", f"out{workers}") == 0
    for key in ("text", "title"):
        for kind in ("bin", "idx", "manifest.json"):
            names = ["out1", "out2"] if kind == "manifest.json" else ["out1", "out2", "plain"]
            assert len({Path(f"{name}_{key}_document.{kind}").read_bytes() for name in names}) == 1


def test_datasets_are_identified_by_their_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fingerprints = []
    for texts in (["one"], ["two"], ["one"]):
        datasets.Dataset.from_dict({"text": texts}).save_to_disk("saved")
        fingerprint = datasets.load_from_disk("saved")._fingerprint
        tables._opened.cache_clear()
        assert preprocess("--input", "saved", "--output-prefix", "out") == 0
        manifest = read_manifest("out_text_document")
        assert manifest is not None
        assert manifest.sources is not None
        assert manifest.sources["files"][0]["checksum"] == f"datasets:{fingerprint}"
        fingerprints.append(manifest.sources["checksum"])
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]


def test_idle_workers_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inputs, "PART_BYTES", 1000)
    monkeypatch.chdir(tmp_path)
    command = ["--input", write_zstandard(tmp_path), "--output-prefix", "out"]
    assert preprocess(*command) == 0
    assert "workers busy" not in capsys.readouterr().err
    assert preprocess(*command, "--workers", 2) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note")]
    assert len(notes) == 1
    assert "in.jsonl.zst keeps 1 of 2 workers busy" in notes[0]
    assert "several files" in notes[0]
    large = 10 * inputs.PART_BYTES
    whole = [InputFile(Path(f"{number}.txt"), large) for number in range(3)]
    assert inputs.idle_workers(whole, 3) is None
    assert "3 files keep 3 of 4 workers busy" in str(inputs.idle_workers(whole, 4))
    assert inputs.idle_workers([InputFile(Path("a.jsonl"), large)], 8) is None
    assert inputs.idle_workers([InputFile(Path("a.jsonl.gz"), 100)], 8) is None


def test_dataset_names_without_a_network_give_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_such_host(*arguments: object) -> None:
        raise OSError(-2, "Name or service not known")

    def not_there(*arguments: object, **options: object) -> None:
        raise ConnectionError("Couldn't reach the Hugging Face Hub\nat all")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # what it sets ends with the test
    monkeypatch.setattr(tables.socket, "getaddrinfo", no_such_host)
    monkeypatch.setattr(tables.urllib.request, "getproxies", dict)
    monkeypatch.setattr(datasets, "load_dataset", not_there)
    monkeypatch.chdir(tmp_path)
    assert preprocess("--input", "dataset:missing/missing@train", "--output-prefix", "out") == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert "huggingface.co cannot be reached (Name or service not known)" in message
    assert "dataset:FOLDER" in message


def test_compressed_text_and_joined_fields_are_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\ntwo\n"))
    assert preprocess("--input", tmp_path / "a.txt.gz", "--output-prefix", tmp_path / "gz") == 0
    assert texts_of(tmp_path / "gz_text_document") == ["one\ntwo\n"]
    (tmp_path / "in.jsonl").write_text('{"title": "T", "text": "x"}\n{"title": "", "text": "y"}\n')
    arguments = ["--json-keys", "title", "text", "--join-keys", ": ", "--output-prefix", tmp_path / "out"]
    assert preprocess("--input", tmp_path / "in.jsonl", *arguments) == 0
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


def test_broken_rows_are_named_and_can_be_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    offsets, content = np.array([0, 1, 3, 4, 4], np.int32), b"a\xff\xfeb"
    buffers = [pa.py_buffer(b"\x07"), pa.py_buffer(offsets.tobytes()), pa.py_buffer(content)]
    table = pa.table({"text": pa.Array.from_buffers(pa.string(), 4, buffers)})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    arguments = ["--input", tmp_path / "in.parquet", "--output-prefix", tmp_path / "out"]
    assert preprocess(*arguments) == 2
    assert "in.parquet, row 1: field 'text' is not UTF-8" in capsys.readouterr().err
    assert preprocess(*arguments, "--on-error", "skip") == 0
    assert "in.parquet, row 3: field 'text' is null, but must be text" in capsys.readouterr().err
    assert texts_of(tmp_path / "out_text_document") == ["a", "b"]


def test_missing_columns_splits_and_datasets_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for write, name in ((write_parquet, "in.parquet"), (write_arrow_file, "in.arrow"), (save_dataset, "saved")):
        write(tmp_path)
        arguments = ["--json-keys", "body", "--output-prefix", tmp_path / "out"]
        assert preprocess("--input", tmp_path / name, *arguments) == 2
        assert "has no column 'body', only 'id', 'text', 'title'" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    (tmp_path / "splits").mkdir()
    save_splits(tmp_path / "splits")
    for source, message in (
        (f"dataset:{tmp_path / 'empty'}", "cannot be opened as a dataset; check the folder"),
        (str(tmp_path / "splits/saved"), "has the splits test, extra: name one"),
    ):
        assert preprocess("--input", source, "--output-prefix", tmp_path / "out") == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("write", [write_gzip, write_zstandard])
def test_a_truncated_compressed_file_gives_its_beginning(
    tmp_path: Path, write: Callable[[Path], str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / write(tmp_path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    (tmp_path / "z.jsonl").write_text('{"text": "after"}\n')
    arguments = ["--input", path, tmp_path / "z.jsonl", "--output-prefix", tmp_path / "out"]
    assert preprocess(*arguments) == 2
    assert f"{path}: the compressed data is damaged or cut off after line" in capsys.readouterr().err
    assert preprocess(*arguments, "--on-error", "skip") == 0
    *before, last = texts_of(tmp_path / "out_text_document")
    assert last == "after"
    assert before == TEXTS[: len(before)]
    assert len(before) > 100


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("in.jsonl.gz", "the compressed data is damaged"),
        ("in.jsonl.zst", "the compressed data is damaged"),
        ("in.parquet", "cannot be read as Parquet"),
        ("in.arrow", "cannot be read as Arrow"),
    ],
)
def test_a_file_of_another_format_is_refused(
    tmp_path: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(b'{"text": "plain"}\n' * 20)
    assert preprocess("--input", tmp_path / name, "--output-prefix", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_unreadable_file_is_named_and_can_be_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("good")
    # Memory that is not mapped: reading gives an input/output error, as a broken disk does.
    (tmp_path / "b.txt").symlink_to("/proc/self/mem")
    arguments = ["--input", tmp_path / "a.txt", tmp_path / "b.txt", "--output-prefix", tmp_path / "out"]
    assert preprocess(*arguments) == 2
    assert "b.txt cannot be read (Input/output error)" in capsys.readouterr().err
    assert preprocess(*arguments, "--on-error", "skip") == 0
    assert "b.txt cannot be read" in capsys.readouterr().err
    assert texts_of(tmp_path / "out_text_document") == ["good"]


RUN_ALL = "import json, sys; from megapipe.data.preprocess.command import main; " + (
    "print([main(command) for command in json.loads(sys.argv[1])])"
)


def text_lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


REVISIONS = {
    "main": {
        "train-0.jsonl": text_lines("a", "b"),
        "train-1.jsonl": text_lines("c"),
        "train-2.jsonl": text_lines("d", "e"),
    },
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
        done = subprocess.run(
            [sys.executable, "-c", RUN_ALL, json.dumps(commands)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0, 2, 2]", done.stderr
    for name in names:
        revision, kind = name.split("-")
        assert texts_of(tmp_path / f"{name}_text_document") == (["old"] if revision == "v1" else list("abcde"))
        manifest = read_manifest(tmp_path / f"{name}_text_document")
        assert manifest is not None
        assert manifest.sources is not None
        commit = f"commit:{sha1(revision.encode()).hexdigest()}"
        assert (manifest.sources["files"][0]["checksum"] == commit) == (kind == "stream")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 2
    assert all("check name and revision" in error or "check the name and revision" in error for error in errors)
