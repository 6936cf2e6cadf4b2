"""The peers: datasets.map, and a pool that passes lists of ids to one writer, as Megatron-LM's tool does.

python benchmarks/preprocess_contest/peers.py pool corpus.jsonl tokenizer.json 2 output.bin
"""

import json
import multiprocessing
import os
import sys
from typing import Any

import numpy as np

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import Tokenizer

CHUNK = 32


class Encoder:
    tokenizer: Any = None

    @classmethod
    def open(cls, path: str) -> None:
        cls.tokenizer = Tokenizer.from_file(path)

    @classmethod
    def encode(cls, line: str) -> list[int]:
        ids: list[int] = cls.tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids
        return [*ids, 0] if ids else ids


def pool(corpus: str, tokenizer: str, workers: int, output: str) -> None:
    with (
        open(corpus, encoding="utf-8") as lines,
        open(output, "wb") as file,
        multiprocessing.Pool(workers, Encoder.open, (tokenizer,)) as processes,
    ):
        for ids in processes.imap(Encoder.encode, lines, CHUNK):
            file.write(np.array(ids, dtype=np.uint16).tobytes())


def hugging_face_map(corpus: str, tokenizer: str, workers: int, output: str) -> None:
    import datasets

    datasets.disable_progress_bars()
    Encoder.open(tokenizer)
    dataset = datasets.load_dataset("json", data_files=corpus, split="train", cache_dir=f"{output}.cache")
    dataset.map(
        encode_batch, batched=True, num_proc=workers if workers > 1 else None, remove_columns=["text"]
    ).save_to_disk(output)


def encode_batch(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
    encoded = Encoder.tokenizer.encode_batch(batch["text"], add_special_tokens=False)
    return {"ids": [[*each.ids, 0] if each.ids else [] for each in encoded]}


if __name__ == "__main__":
    contestant, corpus, tokenizer, workers, output = sys.argv[1:]
    {"pool": pool, "map": hugging_face_map}[contestant](corpus, tokenizer, int(workers), output)
