"""The first 10,000 samples are megatron-core's GPTDataset's and BlendedDataset's, token for token."""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config.model import ModelConfig
from megapipe.config.run import BatchConfig, DataConfig, PretrainConfig, TrainingConfig
from megapipe.data.errors import DataError
from megapipe.data.megatron_blend import MegatronBlendOrder, samples_wanted
from megapipe.data.megatron_order import MegatronSamples
from megapipe.training.batches import split_samples
from tests.data.shards import numbered_documents, write_shard

if sys.version_info >= (3, 14):
    pytest.skip("megatron-core has no wheel from Python 3.14 on", allow_module_level=True)

import torch.distributed

with warnings.catch_warnings():  # about optional packages of no concern here
    warnings.simplefilter("ignore")
    from megatron.core.datasets import helpers_cpp
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

NUM_SAMPLES = 10_000


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """Its builder asks for a process group."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three of random tokens; documents of 1 to 90 tokens, some empty, some of several sequences."""
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


class Tokenizer(SimpleNamespace):
    """As much of one as the builder looks at."""

    unique_identifiers: Any = None


def theirs(prefixes: list[str], weights: list[float] | None, length: int, seed: int, cache: Path) -> Any:
    """megatron-core's training split."""
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=length,
        blend=(prefixes, weights),
        split="90,5,5",
        path_to_cache=str(cache),
        tokenizer=Tokenizer(unique_identifiers={"name": "none"}, eod=40_000, pad=40_001, vocab_size=50_000),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [NUM_SAMPLES, 10, 10], lambda: True, config).build()[0]


def ours(prefixes: list[str], weights: list[float] | None, length: int, seed: int) -> PretrainConfig:
    data = DataConfig(split="90,5,5", sequence_length=length, order="megatron")
    if weights is None:
        data.prefix = prefixes[0]
    else:
        data.blend = dict(zip(prefixes, weights, strict=True))
    return PretrainConfig(
        model=ModelConfig(vocabulary_size=50_000),
        data=data,
        batch=BatchConfig(global_size=8),
        training=TrainingConfig(steps=NUM_SAMPLES // 8, seed=seed),
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("chosen", "weights", "length", "seed"),
    [
        ([0], None, 32, 1234),
        ([2, 0, 1], [0.5, 0.3, 0.2], 16, 7),
        ([1, 2], [12.5, 71.0], 7, 42),
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
        items = [reference[ordinal] for ordinal in ordinals]
        expected = np.stack([np.append(item["tokens"], item["labels"][-1:]) for item in items])
        assert np.array_equal(samples.tokens(ordinals), expected)
    assert np.array_equal(samples.num_labels([0, 5]), [length] * 2)


@pytest.mark.parametrize("num_samples", [3, 40, 70, 77, 100, 137])
def test_a_last_epoch_that_is_hardly_needed_is_shuffled_apart(
    tmp_path: Path, num_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "NUM_SAMPLES", num_samples)
    prefix = str(write_shard(tmp_path / "shard", numbered_documents([21, 3, 0, 40, 9, 17, 50, 1, 8, 30, 4, 6] * 4)))
    reference = theirs([prefix], None, 20, 1, tmp_path)
    samples = MegatronSamples(
        prefix, split="train", shares="90,5,5", sequence_length=20, seed=1, num_samples=num_samples
    )
    assert len(samples) == len(reference)
    for ordinal in range(len(samples)):
        assert samples.tokens(ordinal)[:-1].tolist() == reference[ordinal]["tokens"].tolist()
        assert samples.tokens(ordinal)[1:].tolist() == reference[ordinal]["labels"].tolist()


def test_boundaries_are_where_the_numbers_jump(tmp_path: Path) -> None:
    lengths = [7, 2, 30, 1, 12, 5]
    prefix = write_shard(tmp_path / "shard", numbered_documents(lengths))
    begins = set((np.cumsum([0, *lengths]) + 1).tolist())
    samples = MegatronSamples(prefix, split="train", shares="1", sequence_length=9, seed=3, num_samples=40)
    for ordinal in range(40):
        tokens = samples.tokens(ordinal)
        found = samples.boundaries([ordinal])[0].tolist()
        assert found == [place for place in range(1, 10) if tokens[place] in begins]


@settings(max_examples=100, deadline=None)
@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=30), num_samples=st.integers(1, 300))
def test_blending_is_megatrons(weights: list[float], num_samples: int) -> None:
    shares = np.array(weights) / np.sum(weights)
    order = MegatronBlendOrder(weights, num_samples)
    corpora, within = np.zeros(order.num_samples, dtype=np.int16), np.zeros(order.num_samples, dtype=np.int64)
    again = (shares / np.sum(shares)).tolist()
    helpers_cpp.build_blending_indices(corpora, within, again, len(again), order.num_samples, False)
    found = order.assign(np.arange(order.num_samples))
    assert found[0].tolist() == corpora.tolist()
    assert found[1].tolist() == within.tolist()
    assert order.num_samples >= num_samples


def test_a_corpus_that_greedy_blending_takes_too_much_of_is_named() -> None:
    # Every corpus is promised a sample of this run of one, so it has four; the heaviest corpus gives three of them.
    order = MegatronBlendOrder([1.0, 1.0, 1.0, 10.0], 1)
    names = ["a", "b", "c", "d"]
    assert samples_wanted([1.0, 1.0, 1.0, 10.0], 1) == [2] * 4
    order.check_supply(names, [1, 1, 1, 3])
    with pytest.raises(DataError, match="needs 3 samples of d, which has 2"):
        order.check_supply(names, [1, 1, 1, 2])


def test_a_sample_behind_the_run_says_what_to_set(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path / "shard", numbered_documents([50]))
    samples = MegatronSamples(prefix, split="train", shares="1", sequence_length=4, seed=3, num_samples=10)
    assert len(samples) == 12
    with pytest.raises(DataError, match=r"sample 12 of .* does not exist.* made for 12 samples.*training\.stop_at"):
        samples.tokens([3, 12])
    with pytest.raises(DataError, match=r"sample 13 does not exist.* made for 13 samples.*training\.stop_at"):
        MegatronBlendOrder([0.3, 0.7], 12).assign(13)


def test_ids_beyond_the_vocabulary_are_located(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", [[[1, 2]], [[3, 300, 4, 5, 6]]])
    samples = MegatronSamples(
        tmp_path / "shard", split="train", shares="1", sequence_length=6, seed=3, num_samples=1, vocabulary_size=300
    )
    with pytest.raises(DataError, match=r"token 3 of .*shard\.bin is 300, outside the model's vocabulary of 300"):
        samples.tokens(0)


def test_a_split_without_samples_is_refused(tmp_path: Path) -> None:
    prefix = write_shard(tmp_path / "shard", numbered_documents([3, 3]))
    with pytest.raises(DataError, match=r"the train split of .*shard has 1 of 2 sequences and 3 tokens"):
        MegatronSamples(prefix, split="train", shares="1,1", sequence_length=4, seed=3, num_samples=10)
