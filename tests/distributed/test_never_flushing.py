"""PipeDream-2BW and PipeDream train models as their recursions say, on any pipeline and with any option.

The oracle of 2BW is its recursion W(t+1) = W(t) - lr * g(W(t-1)) (arXiv 2006.09503, section 3.1) by hand: one process
computes the gradient at the older weights with a schedule that flushes, and another updates the newer ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.config.run import PretrainConfig
from megapipe.engine.step import StepInput, StepResult
from megapipe.optim.scaling import learning_rate
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.training.loop.loader import StepBatch
from megapipe.training.loop.replica import Replica
from tests.distributed.conftest import Make
from tests.distributed.layout_cases import (
    BF16,
    CP,
    D4,
    DOCUMENTS,
    DP,
    EVERYTHING,
    EXHAUSTIVE,
    FULL,
    MUON,
    NO_MASTER,
    NOTHING,
    ONE,
    P2,
    P4,
    TP,
    UNCLIPPED,
    Groups,
    schedule,
    sequence,
    zero,
)
from tests.support.gpt_runs import RankRun, assembled, load_batches, shards
from tests.support.meshes import run_mesh, run_threads

STEPS = 6
POISONED = 2
"""The step whose gradients are not finite in a poisoned run."""
CLIPPED: Groups = {"optimizer": {"clip_norm": 0.3}}


def batches(config: PretrainConfig, mesh: Mesh, replica: Replica, poisoned: bool) -> list[StepBatch]:
    """Return the first batches of a run; one of them has an infinite loss if it is poisoned."""
    loaded = load_batches(replica, config, mesh, STEPS)
    mask = getattr(loaded[POISONED].contexts[0], "loss_mask", None)
    if poisoned and mask is not None:
        mask.fill_(torch.inf)
    return loaded


def inputs(config: PretrainConfig, step: int, batch: StepBatch) -> StepInput:
    rate = learning_rate(config.optimizer, step + 1, config.training.steps)
    return StepInput(step, batch.contexts, batch.token_counts, rate)


def trained(mesh: Mesh, config: PretrainConfig, drained: tuple[int, ...] = (), poisoned: bool = False) -> RankRun:
    """Feed all steps to the engine of a rank, which is drained after some of them and at the end."""
    config = replace(config, parallel=replace(config.parallel, **mesh.shape.sizes, timeout_seconds=30.0))
    replica = Replica(config, mesh)
    results: list[StepResult] = []
    for step, batch in enumerate(batches(config, mesh, replica, poisoned)):
        results += replica.engine.feed(inputs(config, step, batch))
        if step in drained or step == STEPS - 1:
            results += replica.engine.drain()
            assert [result.step for result in results] == list(range(step + 1))
    states = replica.states()
    return RankRun(results, [], shards(states, [state.master for state in states]))


class GradientKeeper:
    """An optimizer that keeps the gradients and does not change the weights."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.coefficient = torch.zeros(())

    def update(self, states: Sequence[UnitState], version: int, learning_rate: float, coefficient: Tensor) -> None:
        self.gradients |= {state.name: state.gradients[0].clone() for state in states}
        self.coefficient = coefficient
        for state in states:
            state.begin_update(version)


def recursion(mesh: Mesh, config: PretrainConfig, poisoned: bool) -> RankRun:
    """2BW by hand in one process: `older` computes gradients, which update `newest`."""
    older, newest = (Replica(config, mesh) for _ in range(2))
    keeper = GradientKeeper()
    older.assembly.optimizer = keeper  # type: ignore[assignment]
    older.engine = older.engine_for(config.batch.global_size)
    weights = [[state.master.clone() for state in newest.states()]] * 2
    results = []
    for step, batch in enumerate(batches(config, mesh, older, poisoned)):
        for state, values in zip(older.states(), weights[step], strict=True):
            state.master.copy_(values)
        given = inputs(config, step, batch)
        results.append(older.engine.run(given))
        if not results[-1].skipped:
            for state in newest.states():
                state.gradients[0].copy_(keeper.gradients[state.name])
            version = newest.states()[0].newest + 1
            newest.optimizer.update(newest.states(), version, given.learning_rate, keeper.coefficient)
        weights.append([state.master.clone() for state in newest.states()])
    states = newest.states()
    return RankRun(results, [], shards(states, [state.master for state in states]))


@pytest.fixture(scope="module")
def by_hand(make: Make) -> Callable[..., RankRun]:
    """Return a function that trains a model by 2BW's recursion, which no option of its schedule changes; each run
    is trained once."""
    runs: dict[str, RankRun] = {}

    def trained(model: str, run: Groups, poisoned: bool = False) -> RankRun:
        fields = {**run, **schedule("1f1b")}
        key = repr((model, fields, poisoned))
        if key not in runs:
            (runs[key],) = run_threads(ONE, recursion, make(model, ONE, fields), poisoned)
        return runs[key]

    return trained


def losses(run: RankRun) -> list[float]:
    return [result.loss for result in run.results]


def check_equal(ranks: list[RankRun], expected: list[RankRun], *, norms: bool = True) -> None:
    """Losses, norms, skipped steps and final weights are equal bit for bit; a poisoned loss equals itself."""
    wanted = [(r.loss_terms, r.gradient_norm if norms else 0.0, r.skipped) for r in expected[0].results]
    for rank in ranks:
        actual = [(r.loss_terms, r.gradient_norm if norms else 0.0, r.skipped) for r in rank.results]
        assert repr(actual) == repr(wanted)
    weights, others = (assembled([rank.weights for rank in run]) for run in (ranks, expected))
    for name, tensor in others.items():
        assert torch.equal(weights[name], tensor), name


@pytest.mark.one_in(6)
@pytest.mark.parametrize("model", ["gpt2-untied-dropout", "gpt2", "llama", "bert-pre-dropout"])
@pytest.mark.parametrize("update", ["lazy", "eager"])
@pytest.mark.parametrize(("sizes", "microbatches"), [(P2, 2), (P2, 3), (P4, 4), (P4, 8)], ids=str)
def test_2bw_is_its_recursion(
    make: Make, by_hand: Callable[..., RankRun], model: str, update: str, sizes: dict[str, int], microbatches: int
) -> None:
    """Processes, whose sums hide alongside the actions of the next step."""
    batch: Groups = {"batch": {"global_size": microbatches}}
    run = {**schedule("2bw", update=update), **batch, **CLIPPED}
    expected = by_hand(model, run)
    assert min(result.gradient_norm for result in expected.results) > 0.3, "nothing was clipped"
    check_equal(run_mesh(sizes, trained, make(model, sizes, run)), [expected])


@pytest.mark.parametrize(
    ("update", "option", "drained", "poisoned"),
    [
        ("lazy", DOCUMENTS, (), False),
        *(
            (update, NOTHING, *each)
            for update in ("lazy", "eager")
            for each in (((2,), False), (tuple(range(STEPS)), False), ((), True))
        ),
    ],
)
def test_2bw_is_its_recursion_through_drains_and_skipped_steps(
    make: Make,
    by_hand: Callable[..., RankRun],
    update: str,
    option: Groups,
    drained: tuple[int, ...],
    poisoned: bool,
) -> None:
    run = {**schedule("2bw", update=update), **option}
    expected = by_hand("gpt2", run, poisoned)
    assert [result.skipped for result in expected.results] == [poisoned and step == POISONED for step in range(STEPS)]
    check_equal(run_threads(P2, trained, make("gpt2", P2, run), drained, poisoned), [expected])


def test_pipedream_does_not_depend_on_layout_and_drains(make: Make) -> None:
    config = make("llama", P2, schedule("pipedream"), UNCLIPPED)
    check_equal(run_mesh(P2, trained, config, (0, 3)), run_threads(P2, trained, config))


@pytest.mark.parametrize(
    ("sizes", "option"),
    [
        (DP, NOTHING),
        (TP, NOTHING),
        (DP, zero(3)),
        (TP, sequence()),
        pytest.param(DP, zero(2, gradient_buffers=1), marks=EXHAUSTIVE),
        pytest.param(D4, zero(3, shard_size=2), marks=EXHAUSTIVE),
        pytest.param(CP, NOTHING, marks=EXHAUSTIVE),
    ],
    ids=str,
)
def test_2bw_with_replicas_and_shards_is_its_recursion(
    make: Make, by_hand: Callable[..., RankRun], sizes: dict[str, int], option: Groups
) -> None:
    model, run = "gpt2-untied-dropout", schedule("2bw")
    expected = by_hand(model, run)
    for rank in run_threads(sizes, trained, make(model, sizes, run, option), (2,)):
        assert losses(rank) == pytest.approx(losses(expected), rel=1e-5, abs=1e-6)


@EXHAUSTIVE
def test_pipedream_shares_the_tokens_of_samples(make: Make) -> None:
    run = {**schedule("pipedream"), **UNCLIPPED}
    expected = run_threads(P2, trained, make("llama", P2, run))
    for rank in run_threads(TP, trained, make("llama", TP, run, sequence()), (2,)):
        assert losses(rank) == pytest.approx(losses(expected[0]), rel=1e-5)


STALE = [schedule("2bw", update="lazy"), schedule("2bw", update="eager"), {**schedule("pipedream"), **UNCLIPPED}]
SHARDS = [zero(1, gradient_buffers=2), zero(2, gradient_buffers=8), zero(3, gradient_buffers=8)]
LAZY, EAGER, PIPEDREAM = STALE


@pytest.mark.parametrize(
    ("sizes", "option", "run"),
    [
        *((DP, SHARDS[2], {**run, **UNCLIPPED}) for run in STALE),
        (P2, EVERYTHING, {**BF16, **LAZY}),
        (P2, FULL, LAZY),
        (P2, EVERYTHING, PIPEDREAM),
        *(
            pytest.param(*case, marks=EXHAUSTIVE)
            for case in (
                *((DP, option, {**run, **UNCLIPPED}) for option in SHARDS[:2] for run in STALE),
                (P2, FULL, PIPEDREAM),
                (P2, EVERYTHING, LAZY),
                (P2, EVERYTHING, {**BF16, **PIPEDREAM}),
            )
        ),
    ],
    ids=str,
)
def test_an_option_changes_no_bit_of_stale_updates(
    make: Make, sizes: dict[str, int], option: Groups, run: Groups
) -> None:
    """Two numbers have one sum in any order, and a gradient that has memory throughout is reduced once an update.
    Shards add up the norm in other parts, so that it is not compared and nothing is clipped."""
    drained = (2,) if sizes == DP else ()
    plain, changed = (
        run_threads(sizes, trained, make("llama" if sizes == DP else "llama-5", sizes, run, each), drained)
        for each in (NOTHING, option)
    )
    check_equal(changed, plain, norms=sizes == P2)


def repeated(mesh: Mesh, config: PretrainConfig) -> list[float]:
    """Return the losses of ten steps on one batch."""
    replica = Replica(config, mesh)
    (batch,) = load_batches(replica, config, mesh)
    steps = [StepInput(step, batch.contexts, batch.token_counts, 2e-3) for step in range(10)]
    results: list[Any] = [result for step in steps for result in replica.engine.feed(step)]
    return [result.loss for result in (*results, *replica.engine.drain())]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["2bw", "pipedream"])
def test_stale_updates_learn_one_batch(make: Make, name: str) -> None:
    for groups in (NO_MASTER, MUON):
        first, second = run_threads(P2, repeated, make("llama", P2, groups, schedule(name), UNCLIPPED))
        assert first == second
        assert first[-1] < first[0] - 0.2
