"""megatron-core as the oracle: shards, splits, windows, and the first 10,000 samples of its datasets and blends."""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megapipe.config.model import ModelConfig
from megapipe.config.run import BatchConfig, DataConfig, PretrainConfig, TrainingConfig
from megapipe.data import DataError
from megapipe.data.megatron_order import MegatronBlendOrder, MegatronSamples, samples_wanted
from megapipe.data.samples import SPLIT_NAMES, split_documents
from megapipe.data.shards import DTYPE_OF_CODE, IndexedDataset
from megapipe.training.loop.batches import split_samples
from tests.data.commands import manifest_of, preprocess, write_json_lines
from tests.data.shards import joined, numbered_documents, write_shard

if sys.version_info >= (3, 14):
    pytest.skip("megatron-core has no wheel from Python 3.14 on", allow_module_level=True)

import torch
import torch.distributed

with warnings.catch_warnings():  # about optional packages of no concern here
    warnings.simplefilter("ignore")
    from megatron.core.datasets import helpers_cpp, indexed_dataset
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.blended_megatron_dataset_config import convert_split_vector_to_split_matrix
    from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split as normalised_shares
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

NUM_SAMPLES = 10_000


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """Make the process group that its builder requires."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Write three shards of random tokens; documents have up to 90 tokens, some several sequences."""
    folder, generator = tmp_path_factory.mktemp("corpora"), np.random.default_rng(5)
    prefixes = []
    for index, num_documents in enumerate((700, 300, 2500)):
        lengths = generator.integers(0, 90, size=num_documents)
        documents = [
            [generator.integers(0, 30_000, size=part) for part in (length // 2, length - length // 2) if part]
            for length in lengths
        ]
        prefixes.append(str(write_shard(folder / f"corpus{index}", documents)))
    return prefixes


TOKENIZER = SimpleNamespace(unique_identifiers={"name": "none"}, eod=40_000, pad=40_001, vocab_size=50_000)
"""The attributes of a tokenizer that the builder reads."""


def theirs(prefixes: list[str], weights: Any, length: int, seed: int, cache: Path, size: int = NUM_SAMPLES) -> Any:
    """Return megatron-core's training split."""
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=length,
        blend=(prefixes, weights),
        split="90,5,5",
        path_to_cache=str(cache),
        tokenizer=TOKENIZER,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [size, 10, 10], lambda: True, config).build()[0]


def ours(prefixes: list[str], weights: list[float] | None, length: int, seed: int) -> PretrainConfig:
    where = {"prefix": prefixes[0]} if weights is None else {"blend": dict(zip(prefixes, weights, strict=True))}
    return PretrainConfig(
        model=ModelConfig(vocabulary_size=50_000),
        data=DataConfig(split="90,5,5", sequence_length=length, order="megatron", **where),  # type: ignore[arg-type]
        batch=BatchConfig(global_size=8),
        training=TrainingConfig(steps=NUM_SAMPLES // 8, seed=seed),
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("chosen", "weights", "length", "seed"),
    [
        pytest.param([0], None, 32, 1234, marks=pytest.mark.exhaustive),
        ([2, 0, 1], [0.5, 0.3, 0.2], 16, 7),
        pytest.param([1, 2], [12.5, 71.0], 7, 42, marks=pytest.mark.exhaustive),
    ],
    ids=["one corpus, many epochs", "three corpora", "weights of any sum"],
)
def test_the_first_samples_are_megatrons(
    shards: list[str], tmp_path: Path, chosen: list[int], weights: list[float] | None, length: int, seed: int
) -> None:
    prefixes = [shards[index] for index in chosen]
    reference = theirs(prefixes, weights, length, seed, tmp_path)
    samples = split_samples(ours(prefixes, weights, length, seed), "train")
    for first in range(0, NUM_SAMPLES, 100):
        ordinals = range(first, first + 100)
        assert np.array_equal(samples.tokens(ordinals), tokens_of(reference, ordinals))
    assert np.array_equal(samples.num_labels([0, 5]), [length] * 2)


def tokens_of(reference: Any, ordinals: range) -> np.ndarray:
    items = [reference[ordinal] for ordinal in ordinals]
    return np.stack([np.append(item["tokens"], item["labels"][-1:]) for item in items])


def open_samples(prefix: Path, length: int, num_samples: int, **changes: Any) -> MegatronSamples:
    how = {"split": "train", "shares": "1", "seed": 3, **changes}
    return MegatronSamples(prefix, sequence_length=length, num_samples=num_samples, **how)


@pytest.mark.parametrize("num_samples", [3, 70, 100])
def test_a_rarely_needed_last_epoch_is_shuffled_separately(tmp_path: Path, num_samples: int) -> None:
    prefix = write_shard(tmp_path / "shard", numbered_documents([21, 3, 0, 40, 9, 17, 50, 1, 8, 30, 4, 6] * 4))
    reference = theirs([str(prefix)], None, 20, 3, tmp_path, num_samples)
    samples = open_samples(prefix, 20, num_samples, shares="90,5,5")
    assert len(samples) == len(reference)
    ordinals = range(len(samples))
    assert np.array_equal(samples.tokens(ordinals), tokens_of(reference, ordinals))


def test_boundaries_are_where_the_numbers_jump(tmp_path: Path) -> None:
    lengths = [7, 2, 30, 1, 12, 5]
    samples = open_samples(write_shard(tmp_path / "shard", numbered_documents(lengths)), 9, 40)
    starts = set((np.cumsum([0, *lengths]) + 1).tolist())
    for tokens, boundaries in zip(samples.tokens(range(40)), samples.boundaries(range(40)), strict=True):
        assert boundaries.tolist() == [place for place in range(1, 10) if tokens[place] in starts]


@settings(max_examples=100, deadline=None)
@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=30), num_samples=st.integers(1, 300))
def test_blending_is_megatrons(weights: list[float], num_samples: int) -> None:
    shares = np.array(weights) / np.sum(weights)
    order = MegatronBlendOrder(weights, num_samples)
    corpora, within = np.zeros(order.num_samples, dtype=np.int16), np.zeros(order.num_samples, dtype=np.int64)
    again = (shares / np.sum(shares)).tolist()
    helpers_cpp.build_blending_indices(corpora, within, again, len(again), order.num_samples, False)
    assigned = order.assign(np.arange(order.num_samples))
    assert assigned[0].tolist() == corpora.tolist()
    assert assigned[1].tolist() == within.tolist()
    assert order.num_samples >= num_samples


def test_a_corpus_that_blending_exceeds_is_named() -> None:
    # Every corpus has at least one sample in this blend, so the blend has four; the heaviest corpus would give three.
    order = MegatronBlendOrder([1.0, 1.0, 1.0, 10.0], 1)
    names = ["a", "b", "c", "d"]
    assert samples_wanted([1.0, 1.0, 1.0, 10.0], 1) == [2] * 4
    order.check_supply(names, [1, 1, 1, 3])
    with pytest.raises(DataError, match="needs 3 samples of d, which has 2"):
        order.check_supply(names, [1, 1, 1, 2])


def test_missing_samples_are_refused(tmp_path: Path) -> None:
    samples = open_samples(write_shard(tmp_path / "shard", numbered_documents([50])), 4, 10)
    assert len(samples) == 12
    with pytest.raises(DataError, match=r"sample 12 of .* does not exist.* made for 12 samples.*training\.stop_at"):
        samples.tokens([3, 12])
    with pytest.raises(DataError, match="sample -1 of"):
        samples.tokens([-1, 3])
    with pytest.raises(DataError, match=r"sample 13 does not exist.* made for 13 samples.*training\.stop_at"):
        MegatronBlendOrder([0.3, 0.7], 12).assign(13)
    with pytest.raises(DataError, match="sample -1 does not exist"):
        MegatronBlendOrder([0.3, 0.7], 12).assign([-1, 3])
    prefix = write_shard(tmp_path / "short", numbered_documents([3, 3]))
    with pytest.raises(DataError, match=r"the train split of .*short has 1 of 2 sequences and 3 tokens"):
        open_samples(prefix, 4, 10, shares="1,1")


documents_strategy = st.lists(
    st.lists(st.lists(st.integers(0, 127), min_size=1, max_size=5), max_size=3), min_size=1, max_size=6
)


def write_theirs(prefix: Path, documents: list, dtype: np.dtype) -> None:
    """Write a shard with megatron-core. documents: lists of sequences of token ids."""
    builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype.type)
    for document in documents:
        builder.add_document(torch.tensor(joined(document)), [len(sequence) for sequence in document])
    builder.finalize(f"{prefix}.idx")


def assert_same_shards(one: Path, other: Path) -> None:
    for kind in ("bin", "idx"):
        assert Path(f"{one}.{kind}").read_bytes() == Path(f"{other}.{kind}").read_bytes()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own numpy use
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents=documents_strategy, code=st.sampled_from([1, 3, 4, 5, 8]))
def test_both_writers_give_the_same_bytes(tmp_path: Path, documents: list, code: int) -> None:
    dtype = DTYPE_OF_CODE[code]
    write_theirs(tmp_path / "theirs", documents, dtype)
    write_shard(tmp_path / "ours", documents, dtype.str)
    assert_same_shards(tmp_path / "ours", tmp_path / "theirs")
    sequences = [sequence for document in documents for sequence in document]
    if sequences:  # theirs reads no empty shard
        reader = indexed_dataset.IndexedDataset(str(tmp_path / "ours"))
        assert [reader[index].tolist() for index in range(len(reader))] == sequences
    dataset = IndexedDataset(tmp_path / "theirs")
    assert [dataset.document(index).tolist() for index in range(len(documents))] == list(map(joined, documents))


@settings(max_examples=200, deadline=None)
@given(
    num_documents=st.integers(0, 100_000), shares=st.lists(st.integers(0, 1000), min_size=3, max_size=3).filter(any)
)
def test_splits_have_megatrons_bounds(num_documents: int, shares: list[int]) -> None:
    text = ",".join(map(str, shares))
    ours = split_documents(num_documents, text)
    matrix = convert_split_vector_to_split_matrix(normalised_shares(text))
    for name, bounds in zip(SPLIT_NAMES, matrix, strict=True):
        begin, end = (round(bound * float(num_documents)) for bound in bounds or (0.0, 0.0))
        assert ours[name] == range(begin, end)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own numpy use
def test_sentences_have_the_layout_of_its_tool(tmp_path: Path) -> None:
    documents = ["One sentence. Another one! A third?", "", "Only this.", "\n\n"]
    write_json_lines(tmp_path / "in.jsonl", [{"text": text} for text in documents])
    arguments = ["--input", tmp_path / "in.jsonl", "--split-sentences", "--append-eod"]
    preprocess(*arguments, "--output-prefix", tmp_path / "out")
    first = [[*b"One sentence. "], [*b"Another one! "], [*b"A third?", 256]]
    write_theirs(tmp_path / "theirs", [first, [], [[*b"Only this.", 256]], [[*b"\n\n", 256]]], np.dtype("<u2"))
    assert_same_shards(tmp_path / "out_text_sentence", tmp_path / "theirs")
    manifest = manifest_of(tmp_path / "out_text_sentence")
    assert (manifest.num_documents, manifest.num_sequences) == (4, 5)
    assert str(manifest.sentences).startswith("sentencex ")
