"""Compare the data order with megatron-core's indices, and loading with torch's DataLoader.

1. Corpora of 10^6, 10^9 and 10^13 tokens (sparse files of zeros, so nothing is read from a disk): time until the first
   sample, and time per sample for the order only and with token ids. megatron-core builds its document, sample and
   shuffle index for one epoch; if they would not fit in memory, only their size is computed.
2. A blend of 1,000 corpora: time to build the order, time per sample.
3. Loading micro-batches from a real file in the page cache: tokens per second.
4. With --documents: corpora with these numbers of documents, of 1,000 tokens each. Their index is a real file with 20
   bytes per document (20 GB for 10^9), which is dropped from the page cache before it is opened. Their tokens are a
   sparse file. Time until the first sample, memory that the process takes for it, and bytes of the index that are
   read.

    python benchmarks/sample_order.py --folder /tmp --tokens 1000000 1000000000 10000000000000
"""

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from megapipe.data.batches import MicrobatchSource, Prefetcher
from megapipe.data.files import drop_from_page_cache, resident_share
from megapipe.data.mixing import BlendOrder
from megapipe.data.samples import GptSamples
from megapipe.data.shards import CODE_OF_DTYPE, HEADER, MAGIC, VERSION, bin_path, idx_path

with warnings.catch_warnings():  # ignore warnings about optional packages
    warnings.simplefilter("ignore")
    from megatron.core.datasets import helpers_cpp
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

LENGTH = 2048
LARGEST_BUILT = 10**10
"""Largest number of tokens for which megatron-core's indices are built."""
CHUNK = 10**7


def sparse_shard(prefix: Path, num_documents: int, length: int) -> Path:
    """Write a shard of uint8 zeros in documents of equal length, and return its prefix."""
    with bin_path(prefix).open("wb") as file:
        file.truncate(length * num_documents)
    with idx_path(prefix).open("wb") as file:
        code = CODE_OF_DTYPE[np.dtype("<u1")]
        file.write(HEADER.pack(MAGIC, VERSION, code, num_documents, num_documents + 1))
        for chunk in _chunks(num_documents):
            np.full(len(chunk), length, dtype="<i4").tofile(file)
        for chunk in _chunks(num_documents):
            (chunk * length).tofile(file)
        for chunk in _chunks(num_documents + 1):
            chunk.tofile(file)
    return prefix


def _chunks(count: int) -> Iterator[np.ndarray]:
    """Yield the numbers from 0 to count - 1 in arrays of at most CHUNK numbers."""
    for begin in range(0, count, CHUNK):
        yield np.arange(begin, min(begin + CHUNK, count), dtype="<i8")


def seconds_of(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call, and its result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def best_of(repeats: int, work: Callable[[], Any]) -> float:
    """Return the seconds of the shortest of several calls, which is least affected by other load of the machine."""
    return min(seconds_of(work)[0] for _ in range(repeats))


def open_samples(prefix: Path) -> GptSamples:
    """Open the training split, and read its first sample."""
    samples = GptSamples(prefix, split="train", shares="100", sequence_length=LENGTH, seed=1)
    samples.tokens(0)
    return samples


def open_megatron(prefix: Path, num_tokens: int) -> Any:
    """Build megatron-core's GPTDataset for one epoch without cached indices, and read its first sample."""
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=LENGTH,
        blend=([str(prefix)], None),
        split="100,0,0",
        tokenizer=SimpleNamespace(unique_identifiers={"name": "none"}, eod=250, pad=251, vocab_size=256),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=tempfile.mkdtemp(dir=prefix.parent),
    )
    low_level = GPTDataset.build_low_level_dataset(str(prefix), config)
    documents = np.arange(low_level.sequence_lengths.shape[0], dtype=np.int32)
    dataset = GPTDataset(low_level, str(prefix), documents, (num_tokens - 1) // LENGTH, Split.train, config)
    dataset[0]
    return dataset


def index_bytes(num_documents: int, num_samples: int) -> int:
    """Return the bytes of megatron-core's three indices for one epoch."""
    wide = 8 if num_documents > 2**31 else 4
    return 4 * num_documents + 2 * wide * (num_samples + 1) + (4 if num_samples < 2**32 - 2 else 8) * num_samples


def compare_orders(folder: Path, num_tokens: int) -> dict[str, Any]:
    """Measure both orders with a corpus of this size."""
    num_documents = min(num_tokens // 1000, 10**6)
    prefix = sparse_shard(folder / f"corpus{num_tokens}", num_documents, num_tokens // num_documents)
    start, samples = seconds_of(lambda: open_samples(prefix))
    ordinals = np.random.default_rng(0).integers(0, len(samples), size=2000)
    row: dict[str, Any] = {
        "tokens": num_tokens,
        "start_ms": 1e3 * start,
        "order_us": 1e6 * best_of(5, lambda: samples.windows(ordinals)) / len(ordinals),
        "sample_us": 1e6 * best_of(5, lambda: [samples.tokens(one) for one in ordinals]) / len(ordinals),
        "megatron_index_bytes": index_bytes(num_documents, len(samples)),
    }
    if num_tokens <= LARGEST_BUILT:
        start, dataset = seconds_of(lambda: open_megatron(prefix, num_tokens))
        built = ordinals[ordinals < len(dataset)].tolist()
        row["megatron_start_ms"] = 1e3 * start
        row["megatron_sample_us"] = 1e6 * best_of(5, lambda: [dataset[one] for one in built]) / len(built)
    return row


def start_with_documents(folder: Path, num_documents: int) -> dict[str, Any]:
    """Measure the start with a corpus of `num_documents` documents, and the search for document boundaries in
    samples."""
    prefix = sparse_shard(folder / f"documents{num_documents}", num_documents, 1000)
    index = idx_path(prefix)
    drop_from_page_cache([index])
    anonymous = _anonymous_bytes()
    start, samples = seconds_of(lambda: open_samples(prefix))
    ordinals = np.random.default_rng(0).integers(0, len(samples), size=1000)
    draw, boundaries = seconds_of(lambda: [samples.boundaries(one) for one in ordinals])
    assert all(2 <= len(starts[0]) <= 3 for starts in boundaries)  # a sample has LENGTH tokens, a document 1,000
    row = {
        "documents": num_documents,
        "start_ms": 1e3 * start,
        "boundaries_us": 1e6 * draw / len(ordinals),
        "memory_bytes": _anonymous_bytes() - anonymous,
        "index_bytes": index.stat().st_size,
        "index_bytes_read": round(resident_share([index]) * index.stat().st_size),
    }
    index.unlink()
    return row


def _anonymous_bytes() -> int:
    """Return the bytes of this process's memory that do not belong to files."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("this system does not report the memory of a process")


def compare_blends(num_corpora: int, num_samples: int) -> dict[str, Any]:
    """Measure the order of a blend of many corpora with log-normal weights. num_samples: size of megatron-core's
    index."""
    weights = np.random.default_rng(0).lognormal(0, 1.5, size=num_corpora)
    build, order = seconds_of(lambda: BlendOrder(weights.tolist()))
    ordinals = np.random.default_rng(1).integers(0, 10**13, size=100_000)
    single = ordinals[:1000].tolist()
    corpora, within = np.zeros(num_samples, dtype=np.int16), np.zeros(num_samples, dtype=np.int64)
    shares = (weights / weights.sum()).tolist()
    build_seconds, _ = seconds_of(
        lambda: helpers_cpp.build_blending_indices(corpora, within, shares, num_corpora, num_samples, False)
    )
    return {
        "corpora": num_corpora,
        "build_s": build,
        "period": order.period,
        "ns_per_sample_in_batches": 1e9 * best_of(5, lambda: order.assign(ordinals)) / len(ordinals),
        "us_per_single_sample": 1e6 * best_of(5, lambda: [order.assign(one) for one in single]) / len(single),
        "megatron_build_s": build_seconds,
        "megatron_samples": num_samples,
        "megatron_ns_per_sample": 1e9 * build_seconds / num_samples,
    }


class _Windows(Dataset[Any]):
    """The same samples as a dataset for torch's DataLoader."""

    def __init__(self, samples: GptSamples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.from_numpy(self._samples.tokens(index))
        return window[:-1], window[1:]


def compare_loaders(folder: Path, num_bytes: int, micro_size: int) -> dict[str, float]:
    """Return the million tokens per second that are loaded from a file of random uint16 ids in the page cache."""
    prefix = folder / "real"
    num_tokens = num_bytes // 2
    np.random.default_rng(0).integers(0, 50_000, size=num_tokens, dtype=np.uint16).tofile(bin_path(prefix))
    with idx_path(prefix).open("wb") as file:
        num_documents, length = num_tokens // 1000, 1000
        file.write(HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[np.dtype("<u2")], num_documents, num_documents + 1))
        np.full(num_documents, length, dtype="<i4").tofile(file)
        (np.arange(num_documents, dtype="<i8") * length * 2).tofile(file)
        np.arange(num_documents + 1, dtype="<i8").tofile(file)
    os.truncate(bin_path(prefix), num_documents * length * 2)
    samples = GptSamples(prefix, split="train", shares="100", sequence_length=LENGTH, seed=1, vocabulary_size=50_000)
    count = min(len(samples) // micro_size, 1500)
    tokens = count * micro_size * LENGTH / 1e6
    rates: dict[str, float] = {}

    def read_megapipe(isolate: bool) -> None:
        source = MicrobatchSource(
            samples,
            data_rank=0,
            data_size=1,
            micro_size=micro_size,
            mask_end_of_document=isolate,
            isolate_documents=isolate,
        )
        requests = range(0, count * micro_size, micro_size)
        with Prefetcher(lambda consumed: source.microbatch(consumed, 0, 1), requests) as loaded:
            for batch in loaded:
                torch.from_numpy(batch.tokens)

    def read_torch(workers: int) -> None:
        loader = DataLoader(_Windows(samples), batch_size=micro_size, num_workers=workers, shuffle=True)
        for index, _ in enumerate(loader):
            if index == count - 1:
                break

    read_megapipe(False)
    rates["megapipe"] = tokens / best_of(3, lambda: read_megapipe(False))
    rates["megapipe, documents kept apart"] = tokens / best_of(3, lambda: read_megapipe(True))
    for workers in (0, 1, 2):
        rates[f"torch DataLoader, {workers} workers"] = tokens / best_of(2, lambda n=workers: read_torch(n))
    return rates


def main() -> int:
    """Run all measurements and print them; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=None, help="where sparse and real files go (default: a temporary folder)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[10**6, 10**9, 10**13])
    parser.add_argument("--documents", type=int, nargs="*", default=[], help="numbers of documents (none)")
    parser.add_argument("--corpora", type=int, default=1000)
    parser.add_argument("--blend-samples", type=int, default=1_000_000, help="samples of megatron-core's blend index")
    parser.add_argument("--loader-bytes", type=int, default=200_000_000)
    parser.add_argument("--micro-size", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        orders = [compare_orders(Path(name), num_tokens) for num_tokens in arguments.tokens]
        blend = compare_blends(arguments.corpora, arguments.blend_samples)
        loaders = compare_loaders(Path(name), arguments.loader_bytes, arguments.micro_size)
        documents = [start_with_documents(Path(name), number) for number in arguments.documents]
    for row in orders:
        megatron = f"needs {row['megatron_index_bytes'] / 1e6:,.1f} MB of indices"
        if "megatron_start_ms" in row:
            megatron += f", start {row['megatron_start_ms']:.1f} ms, {row['megatron_sample_us']:.1f} us a sample"
        print(
            f"{row['tokens']:.0e} tokens: start {row['start_ms']:.1f} ms, order {row['order_us']:.2f} us, sample "
            f"{row['sample_us']:.1f} us | megatron-core {megatron}"
        )
    print(
        f"blend of {blend['corpora']}: order in {blend['build_s']:.2f} s for any number of samples, "
        f"{blend['ns_per_sample_in_batches']:.0f} ns a sample in batches, "
        f"{blend['us_per_single_sample']:.1f} us singly "
        f"| megatron-core {blend['megatron_build_s']:.2f} s for {blend['megatron_samples']:,} samples "
        f"({blend['megatron_ns_per_sample']:.0f} ns each)"
    )
    for loader, rate in loaders.items():
        print(f"{loader}: {rate:,.1f} million tokens/s")
    for row in documents:
        print(
            f"{row['documents']:.0e} documents: start {row['start_ms']:.1f} ms, index cold, documents of a sample "
            f"{row['boundaries_us']:.1f} us, {row['memory_bytes'] / 1e6:.1f} MB of memory, "
            f"{row['index_bytes_read'] / 1e6:,.1f} of {row['index_bytes'] / 1e6:,.1f} MB of the index read"
        )
    facts = {"benchmark": "sample_order", "orders": orders, "blend": blend, "loaders": loaders, "documents": documents}
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
