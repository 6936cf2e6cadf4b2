"""Running commands in this process, and reading the shards that preprocessing wrote."""

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megapipe.data.manifest import ShardManifest, read_manifest
from megapipe.data.preprocess.command import main
from megapipe.data.shards import IndexedDataset
from megapipe.data.tokenizers import open_tokenizer

ROOT = Path(__file__).parents[2]
TOOL = [sys.executable, str(ROOT / "tools" / "preprocess.py")]


class Printed(NamedTuple):
    """The text that a command wrote to standard output and standard error."""

    out: str
    err: str


def run_command(program: Callable[[list[str]], int], *words: object, status: int = 0) -> Printed:
    """Run a command that must end with `status`."""
    output, messages = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(messages):
        ended = program([str(word) for word in words])
    assert ended == status, messages.getvalue()
    return Printed(output.getvalue(), messages.getvalue())


def preprocess(*words: object, status: int = 0) -> Printed:
    return run_command(main, "--tokenizer", "bytes", "--workers", 1, *words, status=status)


def texts_of(prefix: Path | str) -> list[str]:
    dataset, tokenizer = IndexedDataset(prefix), open_tokenizer("bytes")
    return [tokenizer.decode(dataset.document(index).tolist()) for index in range(dataset.num_documents)]


def manifest_of(prefix: Path | str) -> ShardManifest:
    """Return the manifest that a shard must have."""
    manifest = read_manifest(prefix)
    assert manifest is not None
    return manifest


def write_json_lines(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path
