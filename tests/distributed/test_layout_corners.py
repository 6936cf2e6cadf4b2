"""Layouts, shapes and schedules at their corners, each for a few steps, against one process.

The ranks are threads, which makes a case cheap; test_layout_equality.py runs the common layouts over processes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from megapipe.config.model import ModelConfig
from megapipe.schedules import GENERATORS
from tests.support.equality import check_bits, check_close
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, RankRun, make_config, run_gpt, write_shard
from tests.support.meshes import run_threads

STEPS = 3
WIDE_VOCABULARY = 150
"""Over two tensor ranks with shards of whole 64 rows: 128 rows on the first, 22 and padding on the second. On four:
64, 64, 22 and none."""


@dataclass(frozen=True)
class Corner:
    """A model on a layout; settings override groups of the configuration, of the one-process run too."""

    model: ModelConfig
    sizes: dict[str, int]
    settings: dict[str, dict[str, Any]]


def corner(model: ModelConfig, sizes: dict[str, int], **settings: dict[str, Any]) -> Corner:
    return Corner(model, sizes, settings)


WIDE = replace(GPT2_SHAPE, vocabulary_size=WIDE_VOCABULARY)
WINDOWED = replace(LLAMA_SHAPE, sliding_window=5, qk_norm=True)

EXACT = {
    "one micro-batch, as many stages as layers": corner(GPT2_SHAPE, {"pipeline": 4}, batch={"global_size": 1}),
    "one micro-batch": corner(GPT2_SHAPE, {"pipeline": 2}, batch={"global_size": 1}),
    "three stages": corner(replace(GPT2_SHAPE, num_layers=3), {"pipeline": 3}),
    "sliding window and qk norm": corner(WINDOWED, {"pipeline": 2}),
    "bf16": corner(GPT2_SHAPE, {"pipeline": 4}, training={"precision": "bf16"}),
}
CLOSE = {
    "a rank without vocabulary": corner(GPT2_SHAPE, {"tensor": 2}),
    "tensor 4": corner(GPT2_SHAPE, {"tensor": 4}),
    "a shared vocabulary": corner(WIDE, {"tensor": 2}),
    "a shared vocabulary on four, one without": corner(WIDE, {"tensor": 4}),
    "key-value heads = tensor": corner(replace(LLAMA_SHAPE, vocabulary_size=WIDE_VOCABULARY), {"tensor": 2}),
    "sliding window and qk norm": corner(WINDOWED, {"tensor": 2}),
    "data 4": corner(GPT2_SHAPE, {"data": 4}),
    "one micro-batch a replica": corner(GPT2_SHAPE, {"data": 2, "pipeline": 2}, batch={"global_size": 2}),
    "data x tensor": corner(LLAMA_SHAPE, {"data": 2, "tensor": 2}),
    "data x pipeline x tensor": corner(WIDE, {"data": 2, "pipeline": 2, "tensor": 2}),
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """A corpus for each size of vocabulary."""
    return {
        size: write_shard(tmp_path_factory.mktemp(str(size)), vocabulary=size)
        for size in (GPT2_SHAPE.vocabulary_size, WIDE_VOCABULARY)
    }


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Sums are split over torch's threads, so bits depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(case: Corner, corpora: dict[int, str], schedule: str = "1f1b") -> list[RankRun]:
    config = make_config(corpora[case.model.vocabulary_size], case.model, **case.settings)
    layout = {name: case.sizes.get(name, 1) for name in ("pipeline", "tensor")}
    config.parallel = replace(config.parallel, **layout)
    config.schedule = replace(config.schedule, name=schedule)
    return run_threads(case.sizes, run_gpt, config, STEPS)


@pytest.fixture(scope="module")
def alone(corpora: dict[int, str]) -> Callable[[Corner], RankRun]:
    """The same case on one rank, run once."""
    runs: dict[str, RankRun] = {}

    def of(case: Corner) -> RankRun:
        key = repr((case.model, case.settings))
        if key not in runs:
            runs[key] = run(replace(case, sizes={}), corpora)[0]
        return runs[key]

    return of


@pytest.mark.parametrize("name", EXACT)
def test_pipelines_equal_one_process_bit_for_bit(
    corpora: dict[int, str], alone: Callable[[Corner], RankRun], name: str
) -> None:
    case = EXACT[name]
    check_bits(run(case, corpora), alone(case))


@pytest.mark.parametrize("name", CLOSE)
def test_reordered_sums_stay_within_tolerance(
    corpora: dict[int, str], alone: Callable[[Corner], RankRun], name: str
) -> None:
    case = CLOSE[name]
    check_close(run(case, corpora), alone(case), first_loss=1e-5)


def test_bf16_replicas_stay_near_one_process(corpora: dict[int, str], alone: Callable[[Corner], RankRun]) -> None:
    case = corner(GPT2_SHAPE, {"data": 2}, training={"precision": "bf16"})
    losses = [result.loss for result in run(case, corpora)[0].results]
    assert losses == pytest.approx([result.loss for result in alone(case).results], rel=1e-3)


CLASS_A = [name for name, generator in GENERATORS.items() if generator.numerical_class == "A"]
SIX_LAYERS = replace(GPT2_SHAPE, num_layers=6)


@pytest.mark.parametrize("sizes", [{"pipeline": 2}, {"pipeline": 4}], ids=str)
@pytest.mark.parametrize("schedule", CLASS_A)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied-dropout"])
def test_class_a_schedules_equal_one_process_bit_for_bit(
    corpora: dict[int, str], alone: Callable[[Corner], RankRun], schedule: str, tied: bool, sizes: dict[str, int]
) -> None:
    model = replace(SIX_LAYERS, tie_embeddings=tied, hidden_dropout=0.0 if tied else 0.1)
    case = corner(model, sizes)
    check_bits(run(case, corpora, schedule), alone(case))


@pytest.mark.parametrize("sizes", [{"data": 2, "pipeline": 2}, {"pipeline": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("schedule", CLASS_A)
def test_class_a_schedules_over_replicas_and_tensor_ranks(
    corpora: dict[int, str], alone: Callable[[Corner], RankRun], schedule: str, sizes: dict[str, int]
) -> None:
    case = corner(GPT2_SHAPE, sizes)
    check_close(run(case, corpora, schedule), alone(case), first_loss=1e-5)


def test_two_runs_are_bit_identical(corpora: dict[int, str]) -> None:
    case = corner(
        replace(GPT2_SHAPE, hidden_dropout=0.1, attention_dropout=0.1), {"data": 2, "pipeline": 2, "tensor": 2}
    )
    first, second = (run(case, corpora) for _ in range(2))
    for before, after in zip(first, second, strict=True):
        assert before.results == after.results
        for one, other in zip(before.weights, after.weights, strict=True):
            assert torch.equal(one.values, other.values)
