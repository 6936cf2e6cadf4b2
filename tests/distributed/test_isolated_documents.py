"""Attention within documents trains the same model on every layout: all stages find the same documents."""

from dataclasses import replace
from functools import cache

import pytest

from megapipe.config.run import PretrainConfig
from tests.distributed.test_never_flushing import check_equal, recursion, trained
from tests.support.equality import check_bits, check_close
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, RankRun, make_config, run_gpt, write_shard
from tests.support.meshes import run_mesh, run_threads

MODELS = {"gpt2": GPT2_SHAPE, "llama": LLAMA_SHAPE}
STEPS = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("corpus"))


def config_of(corpus: str, model: str, sizes: dict[str, int], **data: object) -> PretrainConfig:
    layout = {name: sizes.get(name, 1) for name in ("pipeline", "tensor")}
    config = make_config(corpus, MODELS[model], parallel=layout)
    return replace(config, data=replace(config.data, isolate_documents=True, **data))


@cache
def one_process(corpus: str, model: str) -> RankRun:
    return run_mesh({}, run_gpt, config_of(corpus, model, {}), STEPS)[0]


@pytest.mark.parametrize(
    ("model", "pipeline"), [pytest.param("gpt2", 2, marks=pytest.mark.slow), ("llama", 2), ("gpt2", 4)]
)
def test_pipelines_equal_one_process_bit_for_bit(corpus: str, model: str, pipeline: int) -> None:
    sizes = {"pipeline": pipeline}
    check_bits(run_mesh(sizes, run_gpt, config_of(corpus, model, sizes), STEPS), one_process(corpus, model))


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"data": 2}, marks=pytest.mark.slow),
        {"tensor": 2, "pipeline": 2},
    ],
    ids=str,
)
def test_reordered_sums_stay_within_tolerance(corpus: str, sizes: dict[str, int]) -> None:
    check_close(run_mesh(sizes, run_gpt, config_of(corpus, "llama", sizes), STEPS), one_process(corpus, "llama"), 1e-5)


def test_2bw_is_its_recursion(corpus: str) -> None:
    config = replace(config_of(corpus, "gpt2", {}), schedule=replace(PretrainConfig().schedule, name="2bw"))
    (expected,) = run_threads({}, recursion, config, False)
    check_equal(run_mesh({"pipeline": 2}, trained, config, (), False), expected)


def test_packed_and_rearranged_documents_on_two_stages(corpus: str) -> None:
    """The first and the last stage rearrange each for itself, and have to agree."""
    changes = {"pack": "best_fit", "fim_rate": 0.5, "fim_tokens": [58, 59, 60]}
    (expected,) = run_mesh({}, run_gpt, config_of(corpus, "gpt2", {}, **changes), STEPS)
    sizes = {"pipeline": 2}
    check_bits(run_mesh(sizes, run_gpt, config_of(corpus, "gpt2", sizes, **changes), STEPS), expected)
    plain = [result.loss for result in one_process(corpus, "gpt2").results]
    assert [result.loss for result in expected.results] != plain


def test_documents_change_what_is_learnt(corpus: str) -> None:
    config = config_of(corpus, "gpt2", {})
    across = replace(config, data=replace(config.data, isolate_documents=False))
    (other,) = run_mesh({}, run_gpt, across, 2)
    losses = [result.loss for result in one_process(corpus, "gpt2").results]
    assert other.results[0].loss != pytest.approx(losses[0], rel=1e-6)
