"""Datasets by their name on the hub: by revision, downloaded or streamed, from a hub on this machine."""

import json
import os
import subprocess
import sys
from hashlib import sha1
from pathlib import Path

import pytest

from megapipe.data.errors import DataError
from megapipe.data.manifest import read_manifest
from megapipe.data.preprocess.hub_datasets import DatasetName
from megapipe.data.preprocess.inputs import find_inputs
from tests.data.preprocess_runs import ROOT, texts_of
from tests.support.hub import serving

RUN_ALL = "import json, sys; from megapipe.data.preprocess.command import main; " + (
    "print([main(command) for command in json.loads(sys.argv[1])])"
)


def lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


REVISIONS = {
    "main": {"train-0.jsonl": lines("a", "b"), "train-1.jsonl": lines("c"), "train-2.jsonl": lines("d", "e")},
    "v1": {"train-0.jsonl": lines("old")},
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
