"""Every layout trains the same model: losses, each parameter's gradient, and 20 steps of loss curve.

The oracle is one process. gpipe and 1f1b on any number of pipeline ranks are equal to it bit for bit (class A),
clipping included; where a sum over ranks is reordered the tolerances of the design hold.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from tests.support.equality import check_bits, check_close, check_gradients
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, RankRun, assembled, make_config, run_gpt, write_shard
from tests.support.meshes import run_mesh

MODELS = {
    "gpt2-tied": GPT2_SHAPE,
    "gpt2-untied-dropout": replace(
        GPT2_SHAPE, tie_embeddings=False, embedding_dropout=0.1, hidden_dropout=0.1, attention_dropout=0.1
    ),
    "llama-untied": LLAMA_SHAPE,
    "llama-tied-dropout": replace(LLAMA_SHAPE, tie_embeddings=True, hidden_dropout=0.2),
}
PIPELINES = [{"pipeline": 2}, {"pipeline": 4}]
REORDERED = [
    {"tensor": 2},
    {"data": 2},
    {"tensor": 2, "pipeline": 2},
    {"data": 2, "pipeline": 2},
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("corpus"))


def config_of(corpus: str, model: ModelConfig, sizes: dict[str, int], schedule: str = "1f1b") -> PretrainConfig:
    layout = {name: sizes.get(name, 1) for name in ("pipeline", "tensor")}
    return make_config(corpus, model, parallel=layout, schedule={"name": schedule})


@cache
def one_process(corpus: str, model: str, micro_size: int = 1) -> RankRun:
    config = config_of(corpus, MODELS[model], {})
    config.batch = replace(config.batch, micro_size=micro_size)
    return run_mesh({}, run_gpt, config)[0]


def run_layout(corpus: str, model: str, sizes: dict[str, int], schedule: str = "1f1b") -> list[RankRun]:
    return run_mesh(sizes, run_gpt, config_of(corpus, MODELS[model], sizes, schedule))


def test_one_process_learns(corpus: str) -> None:
    losses = [result.loss for result in one_process(corpus, "gpt2-tied").results]
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("sizes", PIPELINES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_pipelines_equal_one_process_bit_for_bit(
    corpus: str, model: str, sizes: dict[str, int], schedule: str
) -> None:
    check_bits(run_layout(corpus, model, sizes, schedule), one_process(corpus, model))


@pytest.mark.parametrize("sizes", REORDERED, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_reordered_sums_stay_within_tolerance(corpus: str, model: str, sizes: dict[str, int]) -> None:
    first_loss = 1e-5 if "tensor" in sizes else 1e-6
    check_close(run_layout(corpus, model, sizes), one_process(corpus, model), first_loss)


@pytest.mark.parametrize("micro_size", [2, 4])
def test_uneven_loss_masks_give_one_gradient_for_every_micro_batch_size(corpus: str, micro_size: int) -> None:
    expected = one_process(corpus, "gpt2-tied")
    found = one_process(corpus, "gpt2-tied", micro_size)
    counts = {result.token_count for result in expected.results}
    assert len(counts) > 1, "the masks of this corpus should differ from step to step"
    assert found.results[0].loss == pytest.approx(expected.results[0].loss, rel=1e-6)
    check_gradients(assembled([found.gradients]), assembled([expected.gradients]))


@pytest.mark.parametrize("links", ["gloo", "shared_memory"])
def test_both_kinds_of_link_carry_the_same_bits(corpus: str, links: str) -> None:
    config = config_of(corpus, GPT2_SHAPE, {"pipeline": 2})
    config.parallel = replace(config.parallel, links=links)
    losses = [result.loss for result in run_mesh({"pipeline": 2}, run_gpt, config)[0].results]
    assert losses == [result.loss for result in one_process(corpus, "gpt2-tied").results]


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Sums are split over torch's threads, so bits depend on their number; the ranks of other tests have one each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_torch_thread")
def test_ranks_as_threads_equal_one_process_bit_for_bit(corpus: str) -> None:
    config = config_of(corpus, GPT2_SHAPE, {"pipeline": 2})
    ranks = run_mesh({"pipeline": 2}, run_gpt, config, backend="threads")
    losses = [result.loss for result in ranks[0].results]
    assert losses == [result.loss for result in one_process(corpus, "gpt2-tied").results]


def test_bf16_pipeline_equals_bf16_one_process_and_follows_fp32(corpus: str) -> None:
    runs = {}
    for pipeline in (1, 2):
        config = config_of(corpus, GPT2_SHAPE, {"pipeline": pipeline})
        config.training = replace(config.training, precision="bf16")
        runs[pipeline] = [result.loss for result in run_mesh({"pipeline": pipeline}, run_gpt, config)[0].results]
    assert runs[1] == runs[2]
    assert runs[1] == pytest.approx([result.loss for result in one_process(corpus, "gpt2-tied").results], rel=2e-2)


@pytest.mark.parametrize(
    "schedule",
    [
        {"name": "interleaved_1f1b", "chunks": 2, "group_size": 4},
        {"name": "1f1b", "two_bp": True, "max_pending": 1},
    ],
    ids=lambda schedule: schedule["name"],
)
def test_a_schedules_own_options_change_no_bit(corpus: str, schedule: dict[str, Any]) -> None:
    config = config_of(corpus, GPT2_SHAPE, {"pipeline": 2})
    config.schedule = replace(config.schedule, **schedule)
    ranks = run_mesh({"pipeline": 2}, run_gpt, config, 4)
    expected = one_process(corpus, "gpt2-tied").results[:4]
    assert [result.loss for result in ranks[0].results] == [result.loss for result in expected]
    assert [result.gradient_norm for result in ranks[0].results] == [result.gradient_norm for result in expected]


def test_stages_cut_by_hand_change_no_bit(corpus: str) -> None:
    config = config_of(corpus, GPT2_SHAPE, {"pipeline": 2})
    config.parallel = replace(config.parallel, layers_per_stage=[3, 1])
    ranks = run_mesh({"pipeline": 2}, run_gpt, config, 3)
    assert {shard.name.split(".")[0] for shard in ranks[1].weights} == {"head", "embedding"}
    expected = one_process(corpus, "gpt2-tied").results[:3]
    assert [result.loss for result in ranks[0].results] == [result.loss for result in expected]
