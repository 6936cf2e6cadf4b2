"""Faults of numbers and of pace within ranks: what is not finite, spikes of the loss, a slow rank.

Ranks are threads. What one of them sees has to be decided alike by all.
"""

import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.config.run import PretrainConfig
from megapipe.engine.reductions import Reductions
from megapipe.engine.step import StepResult, StepState
from megapipe.parallel.mesh import Mesh
from megapipe.training.loop.loader import SKIPPED_SAMPLES as SKIPPED
from megapipe.training.loop.replica import Replica
from megapipe.training.observe.records import RANKS, TIME_PARTS
from megapipe.training.observe.traces import StragglerWatch
from megapipe.training.resilience.guards import NonFiniteCount, NonFiniteError, SpikeError
from tests.faults.faulty_pretrain import spoil_batches
from tests.faults.jobs import metrics_of_steps
from tests.support.gpt_runs import GPT2_SHAPE, make_config, opened, shards, train_alone
from tests.support.meshes import run_threads
from tests.training.records import events

POISONED = 1
UNSHARED = "blocks.0.attention_norm.weight"
"""Every tensor rank has it whole, and finds its gradient by itself."""


def poison_gradient(replica: Replica, reductions: Reductions) -> None:
    """One rank's own gradient of a parameter that it does not share will be infinite in a step, once it is summed."""
    local_scalars = reductions._local_scalars

    def poisoned(step: StepState, update: int) -> torch.Tensor:
        reductions._await_gradients(step)
        for state in replica.states() if step.input.step == POISONED else ():
            for segment in state.table:
                if segment.spec.name == UNSHARED:
                    state.in_shard(state.reduced_gradient(update), segment)[0] = torch.inf
        return local_scalars(step, update)

    reductions._local_scalars = poisoned  # type: ignore[method-assign]


def poisoned_run(mesh: Mesh, config: PretrainConfig, where: str) -> tuple[list[StepResult], list[list[torch.Tensor]]]:
    """Three steps, of which rank 1 spoils the second; results, and the weights after each."""
    replica, given = opened(mesh, config)
    spoils = mesh.rank == 1
    if spoils and where == "gradient":
        poison_gradient(replica, replica.engine.reductions)
    results, weights = [], []
    for step in range(3):
        step_input = given(step)
        if spoils and where == "loss" and step == POISONED:
            step_input.contexts[0].loss_mask.fill_(torch.nan)
        if spoils and where == "moment" and step == POISONED:
            replica.states()[0].moments["first_moment"].fill_(torch.nan)
        results.append(replica.engine.run(step_input))
        states = replica.states()
        weights.append([each.values for each in shards(states, [state.master for state in states])])
    return results, weights


@pytest.mark.parametrize(
    ("sizes", "where", "precision"),
    [
        ({"data": 2}, "loss", "fp32"),
        ({"data": 2}, "loss", "bf16"),
        ({"tensor": 2}, "gradient", "fp32"),
        ({"data": 2, "tensor": 2}, "gradient", "fp32"),
    ],
    ids=str,
)
def test_infinities_on_one_rank_skip_the_step_everywhere(
    corpus: str, sizes: dict[str, int], where: str, precision: str
) -> None:
    config = make_config(corpus, GPT2_SHAPE, parallel={"data": None, **sizes}, training={"precision": precision})
    for results, weights in run_threads(sizes, poisoned_run, config, where):
        assert [result.skipped for result in results] == [False, True, False]
        before, after, later = weights
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        assert not all(torch.equal(one, other) for one, other in zip(after, later, strict=True))
        assert all(bool(each.isfinite().all()) for each in later)


def test_bad_optimizer_state_on_one_replica_stops_updates(corpus: str) -> None:
    """Its next update spoils that replica's weights; from then on no rank updates, until the run is ended."""
    config = make_config(corpus, GPT2_SHAPE, parallel={"data": None})
    for results, weights in run_threads({"data": 2}, poisoned_run, config, "moment"):
        assert [result.skipped for result in results] == [False, False, True]
        assert all(
            torch.equal(one, other) for one, other in zip(weights[1], weights[2], strict=True) if one.isfinite().all()
        )


def test_steps_that_stay_not_finite_end_the_run() -> None:
    def outcomes(config: PretrainConfig, skipped: str) -> None:
        count = NonFiniteCount(config)
        for step, letter in enumerate(skipped):
            count.observe(StepResult(step, float("nan"), 1.0, skipped=letter == "x"))

    config = PretrainConfig()
    config.reliability = replace(config.reliability, non_finite_patience=3)
    outcomes(config, "xx.xx.xx.")
    with pytest.raises(NonFiniteError, match=r"3 steps in a row, up to step 4, were not finite \(loss nan"):
        outcomes(config, ".xxx.x")
    outcomes(replace(config, training=replace(config.training, precision="fp16")), "xxxxxx")
    config.reliability = replace(config.reliability, skip_non_finite=False)
    with pytest.raises(NonFiniteError, match=r"step 2 is not finite .* reliability.skip_non_finite is false"):
        outcomes(config, ".x")


def spike_config(corpus: str, directory: Path, **groups: dict[str, Any]) -> PretrainConfig:
    return make_config(
        corpus,
        GPT2_SHAPE,
        **{
            "training": {"steps": 9, "directory": str(directory)},
            "checkpoint": {"every": 4},
            "spikes": {"deviations": 10.0, "window": 4, "skip_batches": 2},
            **groups,
        },
    )


@pytest.mark.slow
def test_spike_recovery_equals_skipping_its_samples_by_hand(
    tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_batches(48, 56, monkeypatch)  # the batch of step 7
    assert train_alone(spike_config(corpus, tmp_path / "rewound")) == 0
    by_hand = spike_config(
        corpus, tmp_path / "by hand", spikes={"deviations": None}, reliability={"skip_samples": [[40, 56]]}
    )
    assert train_alone(by_hand) == 0
    rewound = metrics_of_steps(tmp_path / "rewound")
    assert rewound == metrics_of_steps(tmp_path / "by hand")
    assert [rewound[step]["consumed_samples"] for step in (5, 6, 9)] == [40, 64, 88]
    for folder in ("rewound", "by hand"):
        assert json.loads((tmp_path / folder / SKIPPED).read_text()) == {"step": 6, "first": 40, "stop": 56}
    (rewind,) = events(tmp_path / "rewound", "rewind")
    assert (rewind["step"], rewind["spiked"], rewind["first"], rewind["stop"]) == (4, 7, 40, 56)
    # What was left out is part of the next checkpoint: a run that goes on from it replays nothing and skips the same.
    in_parts = spike_config(corpus, tmp_path / "in parts")
    assert train_alone(replace(in_parts, training=replace(in_parts.training, stop_at=8))) == 0
    assert train_alone(in_parts) == 0
    assert metrics_of_steps(tmp_path / "in parts") == rewound


def test_a_loss_that_stays_high_ends_the_run(tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_batches(48, math.inf, monkeypatch)
    config = spike_config(corpus, tmp_path, spikes={"deviations": 10.0, "window": 4, "patience": 2})
    with pytest.raises(SpikeError, match=r"after 2 returns to the checkpoint after step 4"):
        train_alone(config)
    assert len((tmp_path / SKIPPED).read_text().splitlines()) == 2


def run_with_a_slow_rank(mesh: Mesh, config: PretrainConfig, slow: int, late: Callable[[int], None]) -> list[str]:
    replica, given = opened(mesh, config)
    said: list[str] = []
    measured: list[dict[str, Any]] = []
    watch = StragglerWatch(
        config.reliability, mesh, said.append, lambda name, **fields: measured.append({"event": name, **fields})
    )
    if mesh.rank == slow:
        module = replica.stages[0].units[-1][0]
        assert isinstance(module, torch.nn.Module)
        module.register_forward_hook(lambda *_: late(50_000_000))
    for step in range(14):
        watch.before(step, replica.engine, busy=False)
        replica.engine.run(given(step))
    assert [each["step"] for each in measured] == [1, 3, 5, 7, 9, 11, 13]
    for each in measured:
        assert each["event"] == RANKS
        assert each["forward"][slow] == max(each["forward"]) > 0.4, "ten micro-batches of 0.05 s"
        assert all(len(each[part]) == mesh.world_size for part in (*TIME_PARTS, "peak_bytes"))
        assert min(each["backward"]) > 0
        assert min(each["optimizer"]) > 0
        assert min(each["peak_bytes"]) > 1e7, "the interpreter and torch alone have more"
    return said


def test_a_slow_rank_is_named(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second more in each step, which has a few milliseconds of work. The clock counts a rank's own work alone,
    so that a busy machine does not make the others slow."""
    lateness = threading.local()

    def late(nanoseconds: int) -> None:
        lateness.sum = getattr(lateness, "sum", 0) + nanoseconds

    monkeypatch.setattr(
        "megapipe.engine.trace.time.perf_counter_ns", lambda: time.thread_time_ns() + getattr(lateness, "sum", 0)
    )
    config = make_config(
        corpus,
        GPT2_SHAPE,
        batch={"global_size": 30},
        reliability={"stragglers_every": 2, "straggler_reports": 3, "straggler_factor": 2.0},
    )
    for said in run_threads({"data": 3}, run_with_a_slow_rank, config, 1, late):
        assert said
        assert all(line.startswith("warning: rank 1 is slow: busy for ") for line in said)
