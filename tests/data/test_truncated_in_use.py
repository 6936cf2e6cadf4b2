"""A shard that is cut off while a run reads it ends the run with an error that names the file, not with SIGBUS."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.config.run import PretrainConfig
from megapipe.data.errors import DataError
from megapipe.data.indexed_dataset import IndexedDataset
from megapipe.training.sources import open_samples
from tests.support.bert_runs import make_bert_config, write_corpus
from tests.support.gpt_runs import GPT2_SHAPE, make_config, write_shard

KINDS: dict[str, dict[str, Any]] = {
    "concat": {},
    "best_fit": {"pack": "best_fit"},
    "megatron": {"order": "megatron"},
    "bert": {"pairs": "next"},
}


def configured(kind: str, folder: Path) -> PretrainConfig:
    if kind == "bert":
        return make_bert_config(replace(write_corpus(folder), **KINDS[kind]))
    return make_config(write_shard(folder), GPT2_SHAPE, data=KINDS[kind])


def read_all(samples: Any) -> None:
    for ordinal in range(len(samples)):
        if hasattr(samples, "batch"):
            samples.batch([ordinal])
        else:
            samples.tokens([ordinal]), samples.boundaries([ordinal])


@pytest.mark.parametrize("suffix", ["bin", "idx"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_file_is_named(tmp_path: Path, kind: str, suffix: str) -> None:
    config = configured(kind, tmp_path)
    samples = open_samples(config, "train")
    read_all(samples)
    path = f"{config.data.prefix}.{suffix}"
    size = os.path.getsize(path)
    os.truncate(path, 0)
    if (kind, suffix) == ("best_fit", "idx"):  # its pieces are in memory: the index is not read again
        read_all(samples)
        return
    message = rf"{path} has 0 bytes now and had {size:,} when it was opened.*restore the file"
    with pytest.raises(DataError, match=message):
        read_all(samples)


def test_a_file_that_grew_is_named_and_a_replaced_one_is_not(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path)
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
