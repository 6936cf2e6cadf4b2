"""Training in fp8, fp16 and bf16 alone: scales, rounding and overflows are the same on all ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.config.run import PretrainConfig
from megapipe.engine.step import StepInput
from megapipe.layers.linear import Fp8Products, Linear
from megapipe.parallel.mesh import Mesh
from megapipe.training.loop.replica import Replica
from megapipe.training.resilience.signals import ExitCode
from megapipe.training.validation import fp8_problems
from tests.distributed.conftest import Make, Oracle
from tests.distributed.layout_cases import (
    CURVE,
    D2,
    DP,
    EXHAUSTIVE,
    FP16,
    NO_MASTER,
    NOTHING,
    ONE,
    P2,
    STEPS,
    T2,
    TP,
    Case,
    Groups,
    fp8,
    schedule,
    sequence,
)
from tests.support.gpt_runs import RankRun, assembled, keep_first_gradients, load_batches, run_gpt, shards, train_step
from tests.support.launch import launch
from tests.support.meshes import run_threads

POISONED = 2


def losses(run: RankRun) -> list[float]:
    return [result.loss for result in run.results]


@pytest.mark.parametrize("model", [pytest.param("gpt2-dropout", marks=EXHAUSTIVE), "llama"])
def test_tensor_ranks_train_in_fp8_with_agreed_scales(make: Make, one_process: Oracle, model: str) -> None:
    """A sum in another order may round an operand to its other neighbor, 1/8 away: single elements, so that losses
    stay within 1e-4 and gradients within 1% of one process; scales of each rank's own would be 10 times worse."""
    expected = one_process(Case(model, ONE, run=fp8("tensorwise")), STEPS)
    ranks = run_threads(T2, run_gpt, make(model, T2, fp8("tensorwise")), STEPS)
    for rank in ranks:
        assert losses(rank) == pytest.approx(losses(expected), rel=1e-4)
    actual, wanted = assembled([rank.gradients for rank in ranks]), assembled([expected.gradients])
    for name, gradient in wanted.items():
        assert (actual[name] - gradient).norm() <= 0.01 * gradient.norm() + 1e-6, name


@pytest.mark.parametrize(
    ("recipe", "chunks", "halves", "within"),
    [
        ("tensorwise", 1, NOTHING, 1e-5),
        pytest.param("rowwise", 1, schedule("zb_h1"), 1e-5, marks=EXHAUSTIVE),
        pytest.param("tensorwise", 2, NOTHING, 1e-4, marks=EXHAUSTIVE),
    ],
)
def test_sharded_tokens_are_rounded_to_fp8_like_whole_samples(
    make: Make, recipe: str, chunks: int, halves: Groups, within: float
) -> None:
    """Sums of two ranks' numbers have the same bits scattered, and tokens the same scales gathered; chunks of them
    have finer ones. Only the gradients of what all ranks hold are added up in another order."""
    sizes = TP if halves else T2
    plain, sharded = (
        losses(run_threads(sizes, run_gpt, make("llama", sizes, fp8(recipe), halves, change), STEPS)[0])
        for change in (NOTHING, sequence(chunks))
    )
    assert sharded == pytest.approx(plain, rel=within)
    assert (sharded[0] == plain[0]) == (chunks == 1)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_fp8_learns_nearly_as_fp32_does(one_process: Oracle, recipe: str) -> None:
    fp8_losses, exact = (losses(one_process(Case("llama", ONE, run=run), CURVE)) for run in (fp8(recipe), NOTHING))
    assert fp8_losses != exact
    assert fp8_losses == pytest.approx(exact, rel=0.02)
    assert fp8_losses[-1] < fp8_losses[0] - 0.2


LINEAR = "attention.qkv", "attention.output", "mlp.up", "mlp.down"


def in_fp8(mesh: Mesh, config: PretrainConfig) -> list[str]:
    """Return the names of the linear layers of this rank that multiply in fp8."""
    replica = Replica(config, mesh)
    return [
        f"{replica.layout.layers[index].name}.{path}"
        for index, twins in replica.assembly.layers()
        for path, module in twins[0].named_modules()
        if isinstance(module, Linear) and isinstance(module.products, Fp8Products)
    ]


def test_embedding_head_and_kept_blocks_stay_out_of_fp8(make: Make) -> None:
    config = make("gpt2-dropout", P2, fp8("rowwise", fp8_first_kept=1, fp8_last_kept=2))
    names = [name for rank in run_threads(P2, in_fp8, config) for name in rank]
    assert names == [f"blocks.1.{path}" for path in LINEAR]


@pytest.mark.parametrize("last_kept", [0, 1])
def test_blocks_of_further_tokens_are_in_fp8_as_the_last_one_is(make: Make, last_kept: int) -> None:
    config = make("llama", ONE, fp8("tensorwise", fp8_last_kept=last_kept))
    config.model = replace(config.model, mtp_layers=1)
    (names,) = run_threads(ONE, in_fp8, config)
    blocks = ["blocks.0", "blocks.1", "head.mtp.0.block"] if last_kept == 0 else ["blocks.0"]
    assert names == [f"{block}.{path}" for block in blocks for path in LINEAR]


def first_step(mesh: Mesh, config: PretrainConfig) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of a step for which all blocks start with the weights of the first one."""
    replica = Replica(config, mesh)
    blocks = [state for state in replica.states() if state.name.startswith("blocks.")]
    for state in blocks if not config.model.shares_blocks else ():
        state.master.copy_(blocks[0].master)
    gradients = keep_first_gradients(replica)
    (batch,) = load_batches(replica, config, mesh)
    return train_step(replica, config, batch, 0).loss, assembled([list(gradients.values())])


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_shared_blocks_in_fp8_have_the_sum_of_gradients_of_equal_ones(make: Make, recipe: str) -> None:
    """A use of shared weights rounds as a block of its own does, so the loss has the same bits."""
    config = make("albert", ONE, fp8(recipe))
    apart = replace(config, model=replace(config.model, shared_blocks=False))
    (names,) = run_threads(ONE, in_fp8, config)
    assert len(names) == config.model.num_layers * len(LINEAR)
    ((loss, shared),), ((expected_loss, gradients),) = (run_threads(ONE, first_step, each) for each in (config, apart))
    assert loss == expected_loss
    for name, gradient in shared.items():
        uses = [gradients[name.replace("blocks.0.", f"blocks.{block}.")] for block in range(config.model.num_layers)]
        expected = sum(uses) if name.startswith("blocks.") else uses[0]
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)


def test_what_a_gpu_cannot_multiply_in_fp8_is_reported(make: Make) -> None:
    problems = "\n".join(fp8_problems(make("llama", {"tensor": 8}, fp8("rowwise")), (8, 0)))
    assert "compute capability 8.9 (Ada, Hopper) or later, and this one has 8.0" in problems
    assert "results in bf16, but training.precision is fp32" in problems
    assert "columns of the attention's output matrix on a rank 4 must be a multiple of 16" in problems
    assert fp8_problems(make("llama", ONE, fp8("tensorwise")), (9, 0)) == []
    problems = "\n".join(fp8_problems(make("llama", T2, fp8("tensorwise"), sequence(3)), (9, 0)))
    assert "tokens of the smallest chunk (parallel.sequence_chunks)" in problems


def test_tensor_ranks_round_replicated_parameters_alike(make: Make, one_process: Oracle) -> None:
    """`assembled` insists on equal copies; sums in another order leave nearly all of the weights the same."""
    expected = one_process(Case("llama", ONE, run=NO_MASTER), 1)
    assert all(shard.values.dtype == torch.bfloat16 for shard in expected.weights)
    ranks = run_threads(T2, run_gpt, make("llama", T2, NO_MASTER), 1)
    actual, wanted = assembled([rank.weights for rank in ranks]), assembled([expected.weights])
    same = sum(int((actual[name] == wanted[name]).sum()) for name in wanted)
    assert same > 0.97 * sum(each.numel() for each in wanted.values())


def test_fp16_gradients_equal_fp32_ones_up_to_rounding(one_process: Oracle) -> None:
    """Another power of two as scale changes nothing: fp16's range is wide enough for this model with either."""
    runs = [
        one_process(Case("llama-5", ONE, run=run), STEPS)
        for run in (FP16, NOTHING, {**FP16, "loss_scale": {"initial": 2.0**12}})
    ]
    for shards_ in zip(*(run.gradients for run in runs), strict=True):
        half, exact, other = (shard.values for shard in shards_)
        assert (half / 2.0**16 - exact).norm() <= 0.02 * exact.norm(), shards_[0].name
        assert (half / 2.0**4 - other).norm() <= 1e-3 * other.norm(), shards_[0].name
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=2e-3)
    norms = [run.results[0].gradient_norm for run in runs]
    assert norms[0] == pytest.approx(norms[2], rel=1e-4)


def fed(
    mesh: Mesh, config: PretrainConfig, drained: bool = False
) -> tuple[list[tuple[float, bool]], list[float], list[Tensor]]:
    """Return losses and skipped steps of a run, its scales and its weights; one rank has one poisoned micro-batch."""
    replica = Replica(config, mesh)
    scaler = replica.loss_scaler
    assert scaler is not None
    results, scales = [], []
    for step, batch in enumerate(load_batches(replica, config, mesh, 6)):
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


@pytest.mark.parametrize(("sizes", "name", "lag"), [(D2, "1f1b", 0), (DP, "1f1b", 0), (P2, "2bw", 1)], ids=str)
def test_overflow_on_one_rank_skips_the_step_everywhere(
    make: Make, sizes: dict[str, int], name: str, lag: int
) -> None:
    scale: Groups = {"loss_scale": {"hysteresis": 1, "initial": 1024.0}}
    config = make("llama-5", sizes, FP16, schedule(name), scale)
    ranks = run_threads(sizes, fed, config)
    for results, scales, weights in ranks:
        assert [skipped for _, skipped in results] == [step == POISONED for step in range(6)]
        assert scales == [1024.0] * (POISONED + 1 + lag) + [512.0] * (5 - POISONED - lag)
        assert all(bool(values.isfinite().all()) for values in weights)
        assert results[5][0] < results[0][0]
    if lag:  # where a pipeline is drained changes nothing: the step after a skipped one keeps its scale
        for one, other in zip(ranks, run_threads(sizes, fed, config, True), strict=True):
            assert one[1] == other[1]
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(one[2], other[2], strict=True))


def test_too_large_a_scale_comes_down_by_itself(make: Make) -> None:
    config = make("gpt2-dropout", P2, FP16, {"loss_scale": {"initial": 2.0**24, "hysteresis": 1}})
    ranks = run_threads(P2, run_gpt, config, 14)
    skips = [result.skipped for result in ranks[0].results]
    assert skips[0]
    assert not any(skips[-4:])
    assert ranks[0].results[-1].loss < ranks[0].results[0].loss
    assert [result.skipped for result in ranks[1].results] == skips


@pytest.mark.slow
def test_runs_print_precision_and_end_without_a_usable_scale(tmp_path: Path, corpus: str) -> None:
    def launched(world: int, *arguments: str) -> Any:
        steps = ["--training.steps=3", "--training.log_every=1"]
        return launch(world, f"--data.prefix={corpus}", *steps, *arguments, folder=tmp_path)

    done = launched(2, "--training.precision=fp16", "--loss_scale.initial=1024", "--parallel.pipeline=2")
    assert done.returncode == 0, done.stderr
    assert "loss scale 1024" in done.stdout
    constant = ["--loss_scale.kind=constant", "--loss_scale.initial=1e30", "--loss_scale.patience=2"]
    done = launched(1, "--training.precision=fp16", *constant, "--training.directory=other")
    assert done.returncode == ExitCode.NOT_FINITE
    assert "2 steps in a row, up to step 2, were not finite at loss scale 1e+30" in done.stderr
    done = launched(1, "--training.fp8=tensorwise", "--training.directory=third")
    assert done.returncode == 0, done.stderr
    assert "fp8: tensorwise scales, rounding emulated and products in fp32 (no fp8 units on cpu)" in done.stdout
