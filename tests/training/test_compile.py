"""`training.compile`: blocks through torch.compile on schedules, precisions and layouts, against runs without it."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.engine import assembly
from megapipe.engine.assembly import CompiledForward
from megapipe.parallel.mesh import Mesh
from tests.support.bert_runs import POST_NORM, PRE_NORM, make_bert_config, write_corpus
from tests.support.equality import check_bits, check_gradients
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, RankRun, assembled, make_config, run_gpt
from tests.support.meshes import run_mesh

DROPOUT = replace(GPT2_SHAPE, embedding_dropout=0.1, hidden_dropout=0.1, attention_dropout=0.1)
FP16: dict[str, Any] = {"training": {"precision": "fp16"}}
FP8: dict[str, Any] = {"training": {"fp8": "tensorwise"}}
ROWWISE: dict[str, Any] = {"training": {"fp8": "rowwise", "precision": "bf16"}}
FULL: dict[str, Any] = {"recompute": {"method": "full"}}
HALVES: dict[str, Any] = {"name": "1f1b", "two_bp": True}


def run_compiled(mesh: Mesh, config: PretrainConfig, compiler: str | None, steps: int) -> RankRun:
    """A run whose compiled blocks count their frames: every block of a rank shares the same. None: uncompiled."""
    if compiler is None:
        return run_gpt(mesh, config, steps)
    from torch._dynamo.testing import CompileCounterWithBackend  # takes a second

    counter = CompileCounterWithBackend(compiler)
    assembly.CompiledForward = partial(CompiledForward, backend=counter)  # type: ignore[misc, assignment]
    run = run_gpt(mesh, config, steps, timeout=200.0)
    # Recomputed code is first run without a graph, which is a frame of its own.
    assert counter.frame_count == (2 if config.recompute.method == "full" else 1)
    return run


def trained(config: PretrainConfig, compiler: str | None, steps: int, **sizes: int) -> list[RankRun]:
    """compiler: a backend of torch.compile, None for a run without."""
    config = replace(config, training=replace(config.training, compile=compiler is not None))
    return run_mesh(sizes, run_compiled, config, compiler, steps, timeout=300)


def check(actual: list[RankRun], expected: list[RankRun], tolerance: float | None = None) -> None:
    """tolerance: of losses, and of gradients ten times that, for precisions that round; None for fp32."""
    for run in actual:
        losses = [result.loss for result in run.results]
        assert losses == pytest.approx([result.loss for result in expected[0].results], rel=tolerance or 1e-5)
    ours, theirs = (assembled([run.gradients for run in runs]) for runs in (actual, expected))
    if tolerance is None:
        check_gradients(ours, theirs)
        return
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 10 * tolerance * gradient.norm() + 1e-6, name


def check_traced(config: PretrainConfig, steps: int, tolerance: float | None = None) -> None:
    """Check that traced blocks train as blocks that are not, and in halves to the same bits as whole."""
    whole = trained(config, "aot_eager", steps)
    check(whole, trained(config, None, steps), tolerance)
    halves = replace(config, schedule=replace(config.schedule, **HALVES))
    check_bits(trained(halves, "aot_eager", steps), whole[0])


@pytest.mark.slow
def test_traced_blocks_train_equally_whole_and_in_halves(corpus: str) -> None:
    """Three blocks in one stage, so that a tape holds the records of several."""
    check_traced(make_config(corpus, replace(GPT2_SHAPE, num_layers=3)), steps=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [POST_NORM, PRE_NORM, replace(POST_NORM, embedding_size=16, shared_blocks=True)],
    ids=["post", "pre-dropout", "albert"],
)
def test_traced_blocks_of_a_bert_train_the_same_model(tmp_path: Path, model: BertModelConfig) -> None:
    check_traced(make_bert_config(write_corpus(tmp_path), model), steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [{}, FULL], ids=["saved", "recomputed"])
def test_blocks_of_further_tokens_are_traced(corpus: str, groups: dict[str, Any]) -> None:
    """The last rank has no other blocks."""
    model = replace(LLAMA_SHAPE, mtp_layers=2)
    config = make_config(corpus, model, parallel={"layers_per_stage": [3, 1]}, **groups)
    check(trained(config, "aot_eager", 2, pipeline=2), trained(config, None, 2, pipeline=2))


@pytest.mark.exhaustive
def test_traced_blocks_multiply_in_fp8_whole_and_in_halves(corpus: str) -> None:
    check_traced(make_config(corpus, GPT2_SHAPE, **FP8), steps=2, tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.one_in(6)
@pytest.mark.parametrize("model", [DROPOUT, LLAMA_SHAPE], ids=["dropout", "llama"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "2bw"])
def test_compiled_blocks_train_the_same_model(corpus: str, model: ModelConfig, schedule: str) -> None:
    config = make_config(corpus, model, schedule={"name": schedule})
    check(trained(config, "inductor", 3, pipeline=2), trained(config, None, 3, pipeline=2))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "compiler", "groups", "sizes", "tolerance"),
    [
        (LLAMA_SHAPE, "aot_eager", FP8, {"tensor": 2}, 1e-3),
        (LLAMA_SHAPE, "aot_eager", {**FP16, **FULL}, {"pipeline": 2}, 1e-3),
        (LLAMA_SHAPE, "aot_eager", FULL, {"tensor": 2}, 1e-5),
        (GPT2_SHAPE, "inductor", FP16, {}, 2e-3),
        (GPT2_SHAPE, "inductor", ROWWISE, {}, 1e-2),
    ],
    ids=["fp8-tensor", "fp16-recompute", "recompute-tensor", "fp16", "fp8-rowwise"],
)
def test_blocks_of_other_precisions_train_the_same_model(
    corpus: str, model: ModelConfig, compiler: str, groups: dict[str, Any], sizes: dict[str, int], tolerance: float
) -> None:
    """Generated code rounds less often in fused operations, after which fp8 sometimes rounds to another neighbour."""
    config = make_config(corpus, model, **groups)
    check(trained(config, compiler, 2, **sizes), trained(config, None, 2, **sizes), tolerance)
