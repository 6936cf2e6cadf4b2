"""`training.compile`: blocks through torch.compile on schedules, precisions and layouts, against runs without it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from tests.support.bert_runs import POST_NORM, PRE_NORM, make_bert_config, write_corpus
from tests.support.compiled_runs import run_compiled
from tests.support.equality import check_bits, check_gradients
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, RankRun, assembled, make_config
from tests.support.meshes import run_mesh

DROPOUT = replace(GPT2_SHAPE, embedding_dropout=0.1, hidden_dropout=0.1, attention_dropout=0.1)
STEPS = 3
FP16: dict[str, Any] = {"training": {"precision": "fp16"}}
FP8: dict[str, Any] = {"training": {"fp8": "tensorwise"}}
ROWWISE: dict[str, Any] = {"training": {"fp8": "rowwise", "precision": "bf16"}}
FULL: dict[str, Any] = {"recompute": {"method": "full"}}


def train(
    corpus: str, model: ModelConfig, *, compiler: str | None, pipeline: int = 1, schedule: dict[str, Any] | None = None
) -> list[RankRun]:
    """compiler: a backend of torch.compile, None for a run without."""
    config = make_config(
        corpus,
        model,
        parallel={"pipeline": pipeline},
        schedule=schedule or {},
        training={"compile": compiler is not None},
    )
    return run_mesh({"pipeline": pipeline}, run_compiled, config, compiler, STEPS, timeout=300)


def check(actual: list[RankRun], expected: list[RankRun]) -> None:
    for run in actual:
        assert [result.loss for result in run.results] == pytest.approx(
            [result.loss for result in expected[0].results], rel=1e-5
        )
    check_gradients(*(assembled([run.gradients for run in runs]) for runs in (actual, expected)))


@pytest.mark.slow
def test_traced_blocks_train_equally_whole_and_in_halves(corpus: str) -> None:
    """Three blocks in one stage, so that a tape holds the records of several."""
    model = replace(GPT2_SHAPE, num_layers=3)
    expected = train(corpus, model, compiler=None)
    whole = train(corpus, model, compiler="aot_eager")
    check(whole, expected)
    check_bits(train(corpus, model, compiler="aot_eager", schedule={"two_bp": True}), whole[0])


@pytest.mark.slow
@pytest.mark.parametrize("model", [POST_NORM, PRE_NORM], ids=["post", "pre-dropout"])
def test_traced_blocks_of_a_bert_train_the_same_model(tmp_path: Path, model: BertModelConfig) -> None:
    data = write_corpus(tmp_path)
    runs = []
    for compiler, schedule in ((None, {}), ("aot_eager", {}), ("aot_eager", {"two_bp": True})):
        config = make_bert_config(data, model, schedule=schedule, training={"compile": compiler is not None})
        runs.append(run_mesh({}, run_compiled, config, compiler, STEPS, timeout=300))
    expected, whole, halves = runs
    check(whole, expected)
    check_bits(halves, whole[0])


@pytest.mark.slow
@pytest.mark.one_in(6)
@pytest.mark.parametrize("model", [DROPOUT, LLAMA_SHAPE], ids=["dropout", "llama"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "2bw"])
def test_compiled_blocks_train_the_same_model(corpus: str, model: ModelConfig, schedule: str) -> None:
    expected = train(corpus, model, compiler=None, pipeline=2, schedule={"name": schedule})
    check(train(corpus, model, compiler="inductor", pipeline=2, schedule={"name": schedule}), expected)


def trained(
    corpus: str, model: str, compiler: str | None, sizes: dict[str, int], **groups: dict[str, Any]
) -> list[RankRun]:
    training = {**groups.pop("training", {}), "compile": compiler is not None}
    layout = {name: sizes.get(name, 1) for name in ("tensor", "pipeline")}
    shape = GPT2_SHAPE if model == "gpt2" else LLAMA_SHAPE
    config = make_config(corpus, shape, parallel=layout, training=training, **groups)
    return run_mesh(sizes, run_compiled, config, compiler, 2, timeout=300)


def check_within(actual: list[RankRun], expected: list[RankRun], tolerance: float) -> None:
    """tolerance: of losses; of gradients ten times that."""
    for run in actual:
        losses = [result.loss for result in run.results]
        assert losses == pytest.approx([result.loss for result in expected[0].results], rel=tolerance)
    ours, theirs = (assembled([run.gradients for run in runs]) for runs in (actual, expected))
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 10 * tolerance * gradient.norm() + 1e-6, name


@pytest.mark.exhaustive
def test_traced_blocks_multiply_in_fp8_whole_and_in_halves(corpus: str) -> None:
    whole = trained(corpus, "gpt2", "aot_eager", {}, **FP8)
    check_within(whole, trained(corpus, "gpt2", None, {}, **FP8), 1e-4)
    halves = trained(corpus, "gpt2", "aot_eager", {}, **FP8, schedule={"name": "1f1b", "two_bp": True})
    check_bits(halves, whole[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("groups", "sizes", "tolerance"),
    [(FP8, {"tensor": 2}, 1e-3), ({**FP16, **FULL}, {"pipeline": 2}, 1e-3), (FULL, {"tensor": 2}, 1e-5)],
    ids=["fp8-tensor", "fp16-recompute", "recompute-tensor"],
)
def test_traced_blocks_of_other_precisions_train_the_same_model(
    corpus: str, groups: dict[str, Any], sizes: dict[str, int], tolerance: float
) -> None:
    expected = trained(corpus, "llama", None, sizes, **groups)
    check_within(trained(corpus, "llama", "aot_eager", sizes, **groups), expected, tolerance)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("groups", "tolerance"), [(FP16, 2e-3), (ROWWISE, 1e-2)], ids=["fp16", "fp8-rowwise"])
def test_generated_code_trains_the_same_model(corpus: str, groups: dict[str, Any], tolerance: float) -> None:
    """Fused operations round less often, after which fp8 sometimes rounds to another neighbour."""
    check_within(
        trained(corpus, "gpt2", "inductor", {}, **groups), trained(corpus, "gpt2", None, {}, **groups), tolerance
    )
