"""fp16 trains alike on every layout, and an overflow on one rank skips the step on all of them."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.config.errors import ConfigError
from megapipe.config.loss_scale import LossScaleConfig
from megapipe.config.run import PretrainConfig
from megapipe.engine.step import StepInput
from megapipe.parallel.mesh import Mesh
from megapipe.spec.layers import model_layers
from megapipe.training.batches import batch_loader, split_samples
from megapipe.training.exit_codes import ExitCode
from megapipe.training.replica import Replica
from megapipe.training.validate import validate
from tests.checkpoint.runs import assert_same_bits, config_in, run
from tests.support.equality import check_bits
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, RankRun, make_config, run_gpt, shards, write_shard
from tests.support.launch import launch
from tests.support.meshes import run_mesh

MODELS = {
    "gpt2-tied-dropout": replace(
        GPT2_SHAPE, num_layers=4, embedding_dropout=0.1, hidden_dropout=0.1, attention_dropout=0.1
    ),
    "llama-untied": replace(LLAMA_SHAPE, num_layers=5),
}
STEPS = 4
POISONED = 2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shard(tmp_path_factory.mktemp("corpus"))


def fp16_config(corpus: str, model: str, sizes: dict[str, int], **groups: dict[str, Any]) -> PretrainConfig:
    layout = {name: sizes.get(name, 1) for name in ("data", "pipeline", "tensor")}
    return make_config(corpus, MODELS[model], parallel=layout, training={"precision": "fp16"}, **groups)


@cache
def one_process(corpus: str, model: str) -> RankRun:
    (found,) = run_mesh({}, run_gpt, fp16_config(corpus, model, {}), STEPS)
    assert not any(result.skipped for result in found.results)
    return found


@pytest.mark.parametrize(
    "schedule",
    [
        {"name": "zb_h1"},
        *[
            pytest.param(each, marks=pytest.mark.exhaustive)
            for each in (
                {"name": "gpipe"},
                {"name": "interleaved_1f1b"},
                {"name": "modular"},
                {"name": "1f1b", "two_bp": True},
                {"name": "zb_v"},
            )
        ],
    ],
    ids=str,
)
@pytest.mark.parametrize("model", MODELS)
def test_every_schedule_gives_the_bits_of_one_process(corpus: str, model: str, schedule: dict[str, Any]) -> None:
    config = fp16_config(corpus, model, {"pipeline": 2}, schedule=schedule)
    check_bits(run_mesh({"pipeline": 2}, run_gpt, config, STEPS), one_process(corpus, model))


def test_a_power_of_two_as_scale_changes_no_bit(corpus: str) -> None:
    """fp16's range is wide enough for this model with either scale; the gradients' own rounding is the same."""
    config = fp16_config(corpus, "llama-untied", {}, loss_scale={"initial": 2.0**13})
    (found,) = run_mesh({}, run_gpt, config, 1)
    (other,) = run_mesh({}, run_gpt, replace(config, loss_scale=LossScaleConfig(initial=2.0**12)), 1)
    assert found.results[0].gradient_norm == pytest.approx(other.results[0].gradient_norm, rel=1e-4)
    for ours, theirs in zip(found.gradients, other.gradients, strict=True):
        assert (ours.values / 2 - theirs.values).norm() <= 1e-3 * theirs.values.norm(), ours.name


def test_gradients_are_those_of_fp32_but_for_rounding(corpus: str) -> None:
    config = fp16_config(corpus, "llama-untied", {})
    (exact,) = run_mesh({}, run_gpt, replace(config, training=replace(config.training, precision="fp32")), STEPS)
    found = one_process(corpus, "llama-untied")
    for ours, theirs in zip(found.gradients, exact.gradients, strict=True):
        assert (ours.values / 2.0**16 - theirs.values).norm() <= 0.02 * theirs.values.norm(), ours.name
    losses = [[result.loss for result in each.results] for each in (found, exact)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


def fed(
    mesh: Mesh, config: PretrainConfig, drained: bool = False
) -> tuple[list[tuple[float, bool]], list[float], list[Tensor]]:
    """Losses and skips of a run that flushes or not, its scales and weights; one rank has one poisoned micro-batch."""
    config = replace(config, parallel=replace(config.parallel, timeout_seconds=30.0))
    replica = Replica(config, mesh, model_layers(config.model))
    scaler = replica.loss_scaler
    assert scaler is not None
    loader = batch_loader(config, mesh, replica, split_samples(config, "train"))
    results, scales = [], []
    for step in range(6):
        batch = loader.load(step * config.batch.global_size)
        if step == POISONED and mesh.rank == mesh.world_size - 1:
            mask = batch.contexts[0].loss_mask
            assert mask is not None
            mask.fill_(torch.inf)
        scales.append(scaler.scale(step))
        given = StepInput(step, batch.contexts, batch.token_counts, 1e-2, loss_scale=scales[-1])
        ended = [*replica.engine.feed(given), *(replica.engine.drain() if drained or step == 5 else ())]
        for result in ended:
            scaler.observe(result.step, result.skipped)
            results.append((result.loss, result.skipped))
    states = replica.states()
    return results, scales, [each.values for each in shards(states, [state.master for state in states])]


@pytest.mark.parametrize(
    ("sizes", "schedule", "lag"),
    [({"data": 2}, "1f1b", 0), ({"data": 2, "pipeline": 2}, "1f1b", 0), ({"pipeline": 2}, "2bw", 1)],
    ids=str,
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    corpus: str, sizes: dict[str, int], schedule: str, lag: int
) -> None:
    config = fp16_config(
        corpus, "llama-untied", sizes, schedule={"name": schedule}, loss_scale={"hysteresis": 1, "initial": 1024.0}
    )
    ranks = run_mesh(sizes, fed, config)
    for results, scales, weights in ranks:
        assert [skipped for _, skipped in results] == [step == POISONED for step in range(6)]
        assert scales == [1024.0] * (POISONED + 1 + lag) + [512.0] * (5 - POISONED - lag)
        assert all(bool(values.isfinite().all()) for values in weights)
        assert results[5][0] < results[0][0]
    if lag:  # where a pipeline is drained changes nothing: the step behind a skipped one keeps its scale
        for one, other in zip(ranks, run_mesh(sizes, fed, config, True), strict=True):
            assert one[1] == other[1]
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(one[2], other[2], strict=True))


def test_too_large_a_scale_comes_down_by_itself(corpus: str) -> None:
    config = fp16_config(
        corpus, "gpt2-tied-dropout", {"pipeline": 2}, loss_scale={"initial": 2.0**24, "hysteresis": 1}
    )
    ranks = run_mesh({"pipeline": 2}, run_gpt, config, 14)
    skips = [result.skipped for result in ranks[0].results]
    assert skips[0]
    assert not any(skips[-4:])
    assert ranks[0].results[-1].loss < ranks[0].results[0].loss
    assert [result.skipped for result in ranks[1].results] == skips


def test_the_scale_is_saved_and_resumed_exactly(tmp_path: Path, corpus: str) -> None:
    """The scale rises on the way, so that its counters matter."""
    groups: dict[str, Any] = {"training": {"precision": "fp16"}, "loss_scale": {"initial": 256.0, "window": 4}}
    expected = run({}, config_in(tmp_path / "whole", corpus, MODELS["llama-untied"], **groups), 14)
    config = config_in(tmp_path / "parts", corpus, MODELS["llama-untied"], **groups)
    run({}, config, 6)
    assert_same_bits(run({}, config, 14), expected)


@pytest.mark.slow
def test_a_run_tells_its_scale_and_ends_where_none_helps(tmp_path: Path, corpus: str) -> None:
    arguments = [
        f"--data.prefix={corpus}",
        "--training.precision=fp16",
        "--training.steps=3",
        "--training.log_every=1",
    ]
    done = launch(2, *arguments, "--loss_scale.initial=1024", "--parallel.pipeline=2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "loss scale 1024" in done.stdout
    constant = ["--loss_scale.kind=constant", "--loss_scale.initial=1e30", "--loss_scale.patience=2"]
    done = launch(1, *arguments, *constant, "--training.directory=other", folder=tmp_path)
    assert done.returncode == ExitCode.NOT_FINITE
    assert "2 steps in a row, up to step 2, were not finite at loss scale 1e+30" in done.stderr


def test_a_schedule_that_cannot_skip_a_step_is_refused(corpus: str) -> None:
    config = fp16_config(corpus, "llama-untied", {"pipeline": 2}, schedule={"name": "pipedream"})
    config.optimizer = replace(config.optimizer, clip_norm=None)
    with pytest.raises(ConfigError, match=r"training.precision fp16 skips steps whose gradients overflow"):
        validate(config, 2)
