"""Samples, replicas and whole batches without a single loss token."""

from dataclasses import replace

import pytest

from megapipe.config.run import PretrainConfig
from megapipe.engine.step import StepInput, StepResult
from megapipe.parallel.mesh import Mesh
from megapipe.training.loop.replica import Replica
from tests.support.gpt_runs import GPT2_SHAPE, load_batches, make_config
from tests.support.meshes import run_threads

LAYOUTS = [{"data": 2}, {"data": 2, "pipeline": 2}, {"tensor": 2}]


def masked_steps(mesh: Mesh, config: PretrainConfig, first_kept: int) -> list[StepResult]:
    """Three steps, in which samples of the batch before number `first_kept` have no loss token."""
    sizes = {name: mesh.size(name) for name in ("data", "pipeline", "tensor")}
    config = replace(config, parallel=replace(config.parallel, **sizes))
    replica = Replica(config, mesh)
    results = []
    for step, batch in enumerate(load_batches(replica, config, mesh, 3)):
        counts = []
        for context in batch.contexts:
            assert context.ordinals is not None
            if context.loss_mask is not None:
                context.loss_mask[context.ordinals - step * config.batch.global_size < first_kept] = 0
                counts.append(float(context.loss_mask.sum()))
        results.append(replica.engine.run(StepInput(step, batch.contexts, counts, learning_rate=0.01)))
    return results


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize("first_kept", [4, 7, 8])
def test_samples_without_loss_tokens_count_on_every_layout_alike(
    corpus: str, sizes: dict[str, int], first_kept: int
) -> None:
    """A batch of 8 such samples has no gradient."""
    config = make_config(corpus, GPT2_SHAPE)
    (expected,) = run_threads({}, masked_steps, config, first_kept)
    for results in (expected, *run_threads(sizes, masked_steps, config, first_kept)):
        assert [result.token_count for result in results] == [result.token_count for result in expected]
        assert [result.loss for result in results] == pytest.approx([result.loss for result in expected], rel=1e-4)
        norms = [result.gradient_norm for result in results]
        assert norms == pytest.approx([result.gradient_norm for result in expected], rel=1e-4)
        if first_kept == config.batch.global_size:
            numbers = {(each.token_count, each.loss, each.gradient_norm, each.skipped) for each in results}
            assert numbers == {(0.0, 0.0, 0.0, False)}
