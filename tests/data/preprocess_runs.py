"""Starting tools/preprocess.py in tests, and reading what it wrote."""

import json
import sys
from pathlib import Path

from megapipe.data.preprocess.command import main
from megapipe.data.shards import IndexedDataset
from megapipe.data.tokenizers import open_tokenizer

ROOT = Path(__file__).parents[2]
TOOL = [sys.executable, str(ROOT / "tools" / "preprocess.py")]


def texts_of(prefix: Path | str) -> list[str]:
    dataset, tokenizer = IndexedDataset(prefix), open_tokenizer("bytes")
    return [tokenizer.decode(dataset.document(index).tolist()) for index in range(dataset.num_documents)]


def write_json_lines(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


def preprocess(*arguments: object) -> int:
    return main(["--tokenizer", "bytes", "--workers", "1", *map(str, arguments)])
