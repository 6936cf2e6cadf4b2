"""Every layout trains the model of one process: tables of models, layouts and options.

The oracle is one process that keeps everything on its device. Where no sum is reordered, losses, gradient norms, first
gradients and weights are equal bit for bit (class A); elsewhere the tolerances of the design hold (class C). Ranks are
threads, except in the rows of whole loss curves and of kinds of links, whose ranks are processes.
"""

from pathlib import Path

import pytest
import torch

from megapipe.config.bert import BertPretrainConfig
from megapipe.config.parallel import MeshShape
from megapipe.config.run import PretrainConfig
from megapipe.engine.step import StepInput, StepResult
from megapipe.parallel.mesh import Mesh
from megapipe.training.loop.batches import open_samples
from megapipe.training.loop.replica import Replica
from megapipe.training.loop.steps import Evaluator
from megapipe.training.observe.records import EvaluationRecord
from megapipe.training.validation import validate
from tests.distributed.conftest import Make, Oracle
from tests.distributed.layout_cases import (
    BF16,
    CURVE,
    CURVES,
    D2,
    DP,
    EVALUATED,
    EXHAUSTIVE,
    FAST,
    LINKS,
    LOGITS,
    MORE,
    MORE_CURVES,
    MORE_EVALUATED,
    MORE_SAME,
    ONE,
    P2,
    SAME,
    SLOW,
    STEPS,
    T2,
    Case,
    Groups,
    check,
    marked,
    parallel,
    sequence,
)
from tests.schedules.test_groups import OVERLAPPED
from tests.support.equality import check_gradients
from tests.support.gpt_runs import RankRun, assembled, load_batches, run_gpt
from tests.support.meshes import Backend, run_mesh, run_threads


def train_and_check(
    make: Make, one_process: Oracle, case: Case, steps: int = STEPS, backend: Backend = "threads"
) -> list[RankRun]:
    """Compare a case with one process, and return its ranks."""
    config = make(case.model, case.sizes, case.run, case.layout)
    validate(config, MeshShape(case.sizes).world_size)
    ranks = run_mesh(case.sizes, run_gpt, config, steps, backend=backend)
    check(case, ranks, one_process(case, steps))
    return ranks


@pytest.mark.parametrize("case", marked(FAST, MORE, SLOW), ids=str)
def test_a_layout_trains_the_model_of_one_process(make: Make, one_process: Oracle, case: Case) -> None:
    train_and_check(make, one_process, case)


@pytest.mark.parametrize("case", marked(CURVES, MORE_CURVES), ids=str)
def test_processes_follow_the_loss_curve_of_one_process(make: Make, one_process: Oracle, case: Case) -> None:
    train_and_check(make, one_process, case, CURVE, "processes")


@pytest.mark.parametrize("case", LINKS, ids=str)
def test_both_kinds_of_link_carry_the_same_bits(make: Make, one_process: Oracle, case: Case) -> None:
    train_and_check(make, one_process, case, backend="processes")


@pytest.mark.parametrize("case", marked(SAME, MORE_SAME), ids=str)
def test_a_feature_changes_no_bit_of_its_layout(make: Make, case: Case) -> None:
    """Two numbers have one sum in any order, and layered gradients are reduced once. Sharded state adds up the
    gradient norm in other parts, so that nothing is clipped by it."""
    plain, changed = (
        run_mesh(case.sizes, run_gpt, make(case.model, case.sizes, case.run, change), STEPS, backend="threads")
        for change in ({}, case.layout)
    )
    for rank, other in zip(changed, plain, strict=True):
        assert [result.loss for result in rank.results] == [result.loss for result in other.results]
        norms = [result.gradient_norm for result in other.results]
        assert [result.gradient_norm for result in rank.results] == pytest.approx(norms, rel=1e-6)
    for kind in ("gradients", "weights"):
        actual, wanted = (assembled([getattr(rank, kind) for rank in ranks]) for ranks in (changed, plain))
        assert actual.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(actual[name], tensor), f"{kind} of {name}"


@pytest.mark.parametrize("model", ["gpt2-dropout", pytest.param("llama", marks=EXHAUSTIVE)])
def test_matrix_gradients_equal_those_of_tensor_parallelism_bitwise(make: Make, model: str) -> None:
    """Between two ranks sequence parallelism reorders no sum over channels, but those of vectors over tokens."""
    sharded, plain = (
        run_mesh(T2, run_gpt, make(model, T2, change), 1, backend="threads") for change in (sequence(), {})
    )
    assert [rank.results[0].loss for rank in sharded] == [rank.results[0].loss for rank in plain]
    actual, expected = (assembled([rank.gradients for rank in ranks]) for ranks in (sharded, plain))
    matrices = [name for name, gradient in expected.items() if gradient.dim() > 1]
    assert len(matrices) >= 2 * 4 + 2
    for name in matrices:
        assert torch.equal(actual[name], expected[name]), name


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_of_uneven_masks_ignore_the_micro_batch_size(make: Make, one_process: Oracle, size: int) -> None:
    for model in ("gpt2", "bert-post"):
        expected = one_process(Case(model, ONE), STEPS)
        run = one_process(Case(model, ONE, run={"batch": {"micro_size": size}}), STEPS)
        counts = {result.token_count for result in expected.results}
        assert len(counts) > 1, "the masks of this corpus should differ from step to step"
        assert run.results[0].token_count == expected.results[0].token_count
        assert run.results[0].loss_terms == pytest.approx(expected.results[0].loss_terms, rel=1e-6)
        check_gradients(assembled([run.gradients]), assembled([expected.gradients]), layer=1e-5)


def test_one_process_learns_in_fp32_and_bf16(one_process: Oracle) -> None:
    exact = [result.loss for result in one_process(Case("gpt2", ONE), CURVE).results]
    assert exact[-1] < exact[0] - 0.2
    losses = [result.loss for result in one_process(Case("gpt2", ONE, run={**BF16, **LOGITS}), CURVE).results]
    assert losses != exact
    assert losses == pytest.approx(exact, rel=2e-2)


def test_stages_cut_by_hand_change_no_bit(make: Make, one_process: Oracle) -> None:
    case = Case("gpt2", P2, parallel(layers_per_stage=[3, 1]))
    ranks = train_and_check(make, one_process, case)
    assert {shard.name.split(".")[0] for shard in ranks[1].weights} == {"head", "embedding"}


def test_groups_of_actions_train_to_the_same_bits(make: Make, one_process: Oracle, tmp_path: Path) -> None:
    """A file whose forwards and backwards overlap, and the same order without groups; both equal one process."""
    file = tmp_path / "overlapped.txt"
    case = Case("gpt2", P2, {"schedule": {"name": str(file)}}, {"batch": {"global_size": 4}})
    for text in (OVERLAPPED, OVERLAPPED.replace("+", " ")):
        file.write_text(text)
        train_and_check(make, one_process, case)


def evaluated(mesh: Mesh, config: PretrainConfig) -> EvaluationRecord:
    return Evaluator(config, mesh, Replica(config, mesh), open_samples(config, "validation")).run(3)


@pytest.mark.parametrize("case", marked(EVALUATED, MORE_EVALUATED), ids=str)
def test_every_layout_evaluates_alike(make: Make, case: Case) -> None:
    rule: Groups = {"evaluation": {"every": 1, "samples": 20}}
    (expected,) = run_mesh(ONE, evaluated, make(case.model, ONE, case.run, rule), backend="threads")
    config = make(case.model, case.sizes, case.run, case.layout, rule)
    assert expected.loss == pytest.approx(sum(expected.terms.values()) or expected.loss, rel=1e-12)
    assert set(expected.accuracies) == ({"mlm", "sop"} if isinstance(config, BertPretrainConfig) else set())
    tolerance = 0.0 if set(case.sizes) <= {"pipeline", "data"} and not case.cuts() else 1e-6
    for record in run_mesh(case.sizes, evaluated, config, backend="threads"):
        assert record.loss_tokens == expected.loss_tokens
        assert record.loss == pytest.approx(expected.loss, rel=tolerance, abs=0.0)
        assert record.terms == pytest.approx(expected.terms, rel=tolerance, abs=0.0)
        assert record.accuracies == expected.accuracies


def masked_steps(mesh: Mesh, config: PretrainConfig, first_kept: int) -> list[StepResult]:
    """Three steps, in which samples of the batch before number `first_kept` have no loss token."""
    replica, results = Replica(config, mesh), []
    for step, batch in enumerate(load_batches(replica, config, mesh, 3)):
        counts = []
        for context in batch.contexts:
            assert context.ordinals is not None
            if context.loss_mask is not None:
                context.loss_mask[context.ordinals - step * config.batch.global_size < first_kept] = 0
                counts.append(float(context.loss_mask.sum()))
        results.append(replica.engine.run(StepInput(step, batch.contexts, counts, learning_rate=0.01)))
    return results


@pytest.mark.parametrize("sizes", [D2, DP, T2], ids=str)
@pytest.mark.parametrize("first_kept", [4, 7, 8])
def test_samples_without_loss_tokens_count_on_every_layout_alike(
    make: Make, sizes: dict[str, int], first_kept: int
) -> None:
    """A batch of 8 such samples has no gradient."""
    (expected,) = run_threads(ONE, masked_steps, make("gpt2", ONE), first_kept)
    for results in (expected, *run_threads(sizes, masked_steps, make("gpt2", sizes), first_kept)):
        assert [result.token_count for result in results] == [result.token_count for result in expected]
        assert [result.loss for result in results] == pytest.approx([result.loss for result in expected], rel=1e-4)
        norms = [result.gradient_norm for result in results]
        assert norms == pytest.approx([result.gradient_norm for result in expected], rel=1e-4)
        if first_kept == 8:
            numbers = {(each.token_count, each.loss, each.gradient_norm, each.skipped) for each in results}
            assert numbers == {(0.0, 0.0, 0.0, False)}
