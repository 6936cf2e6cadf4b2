"""Sequence parallelism in compiled blocks: one graph with its collectives, in chunks too."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.testing import CompileCounterWithBackend

from megapipe.config.run import PretrainConfig
from megapipe.parallel.mesh import Mesh
from megapipe.training import assemble
from megapipe.training.assemble import CompiledForward
from tests.support.equality import check_close
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, RankRun, make_config, run_gpt, write_shard
from tests.support.meshes import run_mesh

pytestmark = pytest.mark.slow

MODELS = {
    "gpt2": replace(GPT2_SHAPE, embedding_dropout=0.1, hidden_dropout=0.1, attention_dropout=0.1),
    "llama": LLAMA_SHAPE,
}
STEPS = 2
SIZES = {"tensor": 2}


def on_compiler(mesh: Mesh, config: PretrainConfig) -> RankRun:
    counter = CompileCounterWithBackend("aot_eager")
    assemble.CompiledForward = lambda **options: CompiledForward(backend=counter, **options)  # type: ignore[misc, assignment]
    run = run_gpt(mesh, config, STEPS, timeout=200.0)
    assert counter.frame_count == 1, "all blocks share one frame"
    return run


@pytest.mark.parametrize(("model", "chunks"), [("gpt2", 1), ("llama", 2)])
def test_compiled_blocks_train_the_model_of_one_process(tmp_path: Path, model: str, chunks: int) -> None:
    corpus = write_shard(tmp_path)
    (expected,) = run_mesh({}, run_gpt, make_config(corpus, MODELS[model]), STEPS)

    def compiled(**schedule: Any) -> list[RankRun]:
        parallel = {**SIZES, "sequence": True, "sequence_chunks": chunks}
        config = make_config(corpus, MODELS[model], parallel=parallel, training={"compile": True}, schedule=schedule)
        return run_mesh(SIZES, on_compiler, config, timeout=300)

    whole = compiled()
    check_close(whole, expected, 1e-5)
    for halves in compiled(two_bp=True):
        assert [result.loss for result in halves.results] == [result.loss for result in whole[0].results]
