"""`training.compile` with fp16, fp8, full recomputation and tensor ranks, against the same run without."""

from typing import Any

import pytest

from tests.support.compiled_runs import run_compiled
from tests.support.equality import check_bits
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, RankRun, assembled, make_config, write_shard
from tests.support.meshes import run_mesh

STEPS = 2
FP16: dict[str, Any] = {"training": {"precision": "fp16"}}
FP8: dict[str, Any] = {"training": {"fp8": "tensorwise"}}
ROWWISE: dict[str, Any] = {"training": {"fp8": "rowwise", "precision": "bf16"}}
FULL: dict[str, Any] = {"recompute": {"method": "full"}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("corpus"))


def trained(
    corpus: str, model: str, compiler: str | None, sizes: dict[str, int], **groups: dict[str, Any]
) -> list[RankRun]:
    training = {**groups.pop("training", {}), "compile": compiler is not None}
    layout = {name: sizes.get(name, 1) for name in ("tensor", "pipeline")}
    shape = GPT2_SHAPE if model == "gpt2" else LLAMA_SHAPE
    config = make_config(corpus, shape, parallel=layout, training=training, **groups)
    return run_mesh(sizes, run_compiled, config, compiler, STEPS, timeout=300)


def check(found: list[RankRun], expected: list[RankRun], tolerance: float) -> None:
    """tolerance: of losses; of gradients ten times that."""
    for run in found:
        losses = [result.loss for result in run.results]
        assert losses == pytest.approx([result.loss for result in expected[0].results], rel=tolerance)
    ours, theirs = (assembled([run.gradients for run in runs]) for runs in (found, expected))
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 10 * tolerance * gradient.norm() + 1e-6, name


@pytest.mark.exhaustive
def test_traced_blocks_multiply_in_fp8_whole_and_in_halves(corpus: str) -> None:
    whole = trained(corpus, "gpt2", "aot_eager", {}, **FP8)
    check(whole, trained(corpus, "gpt2", None, {}, **FP8), 1e-4)
    halves = trained(corpus, "gpt2", "aot_eager", {}, **FP8, schedule={"name": "1f1b", "two_bp": True})
    check_bits(halves, whole[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("groups", "sizes", "tolerance"),
    [(FP8, {"tensor": 2}, 1e-3), ({**FP16, **FULL}, {"pipeline": 2}, 1e-3), (FULL, {"tensor": 2}, 1e-5)],
    ids=["fp8-tensor", "fp16-recompute", "recompute-tensor"],
)
def test_traced_blocks_train_the_same_model(
    corpus: str, groups: dict[str, Any], sizes: dict[str, int], tolerance: float
) -> None:
    expected = trained(corpus, "llama", None, sizes, **groups)
    check(trained(corpus, "llama", "aot_eager", sizes, **groups), expected, tolerance)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("groups", "tolerance"), [(FP16, 2e-3), (ROWWISE, 1e-2)], ids=["fp16", "fp8-rowwise"])
def test_generated_code_trains_the_same_model(corpus: str, groups: dict[str, Any], tolerance: float) -> None:
    """Fused operations round less often, and fp8 behind them lands on another neighbour at times."""
    check(trained(corpus, "gpt2", "inductor", {}, **groups), trained(corpus, "gpt2", None, {}, **groups), tolerance)
