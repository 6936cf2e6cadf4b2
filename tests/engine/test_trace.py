"""A recorder notes the actions of a rank, and recording changes nothing."""

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from inspect import Parameter, signature
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from megapipe.config.run import PretrainConfig
from megapipe.engine.host_memory import ThreadCopies
from megapipe.engine.pipeline import Pipeline
from megapipe.engine.reductions import Reductions
from megapipe.engine.step import Scalars, StepInput, StepState
from megapipe.engine.trace import HostClock, Recorder, Stopwatch, _WatchedGroup, clock_offset
from megapipe.parallel.groups import Group, Work
from megapipe.parallel.mesh import Mesh
from megapipe.schedules.actions import write_action
from megapipe.schedules.measured.traces import Event
from megapipe.training.loop.replica import Replica
from tests.engine.library_models import SAMPLE, SGD, adoptable, batch, loss, solo
from tests.support.gpt_runs import GPT2_SHAPE, load_batches, make_config, write_shard
from tests.support.meshes import Backend, run_mesh, run_threads
from tests.support.patience import wait_until

MICROBATCHES = 4
LATE = 30_000_000
"""Nanoseconds."""


def recorded(
    mesh: Mesh, layers: list[torch.nn.Module], name: str, per_stage: list[int], records: bool = True
) -> tuple[list[Event], list[str], list[float], Any]:
    """Events of the second and third step; the words of the schedule's actions; losses; final weights."""
    pipeline = Pipeline(
        layers, mesh, loss=loss, sample=SAMPLE, microbatches=MICROBATCHES, schedule=name, optimizer=SGD,
        layers_per_stage=per_stage,
    )  # fmt: skip
    rank = mesh.coordinate("pipeline")
    recorder = Recorder(pipeline.schedule, rank, mesh.device)
    losses = []
    for step in range(3):
        if step == 1 and records:
            pipeline._engine.record(recorder)
        losses += [result.loss for result in pipeline.step(*batch(step, MICROBATCHES))]
    words = [write_action(action._replace(version=-1, slot=-1)) for action in pipeline.schedule.actions("body", rank)]
    return recorder.events(), words, losses, list(pipeline.state_dict().values())


@pytest.mark.parametrize(
    ("backend", "name", "per_stage"), [("threads", "1f1b", [2, 2]), ("processes", "zb_v", [1, 1, 1, 1])]
)
def test_actions_are_recorded_in_order_without_side_effects(backend: Backend, name: str, per_stage: list[int]) -> None:
    layers = adoptable(2)  # ranks that are threads share torch's random numbers
    ranks = run_mesh({"pipeline": 2}, recorded, layers, name, per_stage, backend=backend)
    expected = run_mesh({"pipeline": 2}, recorded, layers, name, per_stage, False, backend=backend)
    for (events, words, losses, weights), (_, _, plain_losses, plain_weights) in zip(ranks, expected, strict=True):
        assert {event.step for event in events} == {1, 2}
        done = [event.action for event in events]
        assert [word for word in done if word[0] != "U"] == [word for word in words if word[0] != "U"] * 2
        assert sum(word[0] == "U" for word in done) == 2
        assert all(words[event.position] == event.action for event in events)
        for one, next_one in itertools.pairwise(events):
            assert (one.step, one.position) < (next_one.step, next_one.position)
            assert one.end <= next_one.start
        for event in events:
            assert 0 <= event.wait <= event.end - event.start
        assert losses == plain_losses
        assert all(torch.equal(a, b) for a, b in zip(weights, plain_weights, strict=True))


class LateMessages:
    """Two ranks whose messages come late by a clock that only they advance, so that the machine's speed plays no part:
    a forward ends 30 ms after the other rank has begun to wait for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 0
        self._waits: dict[int, int] = {}
        wait = Stopwatch.wait

        def noted(stopwatch: Stopwatch, function: Callable[[], Any]) -> Any:
            def waits() -> Any:
                self._waits[threading.get_ident()] = self._waits.get(threading.get_ident(), 0) + 1
                return function()

            return wait(stopwatch, waits)

        monkeypatch.setattr(HostClock, "mark", lambda _: self._now)
        monkeypatch.setattr(Stopwatch, "wait", noted)

    def run(self, mesh: Mesh) -> list[Event]:
        """Run a recorded step and a plain one. The forwards of rank 0 are late, and the last forward of rank 1, before
        the gradient that rank 0 waits for."""
        peer = mesh.world.all_gather_object(threading.get_ident())[1 - mesh.rank]
        layers = [torch.nn.Linear(1, 1) for _ in range(2)]
        rows = torch.ones(MICROBATCHES, 1)
        pipeline = Pipeline(
            layers, mesh, loss=torch.Tensor.sum, sample=rows[:1], microbatches=MICROBATCHES, schedule="gpipe"
        )
        unit: Any = pipeline.stages[mesh.rank].units[0][0]
        forward, forwards = unit.forward, itertools.count(1)

        def late(*inputs: torch.Tensor, context: Any) -> tuple[torch.Tensor, ...]:
            number = next(forwards)
            waits = number if mesh.rank == 0 else 1
            if number <= MICROBATCHES and (mesh.rank == 0 or number == MICROBATCHES):
                wait_until(lambda: self._waits.get(peer, 0) >= waits)
                self._now += LATE
            return forward(*inputs, context=context)

        unit.forward = late
        recorder = Recorder(pipeline.schedule, mesh.rank, mesh.device)
        for each in (recorder, None):
            pipeline._engine.record(each)
            pipeline.step(rows)
        return recorder.events()


def test_waiting_for_a_slow_peer_is_distinguished_from_working(monkeypatch: pytest.MonkeyPatch) -> None:
    def durations(events: list[Event], kind: str) -> list[tuple[int, int]]:
        """Those of waits and of work."""
        return [(e.wait, e.end - e.start - e.wait) for e in events if e.action.startswith(kind)]

    first, second = run_threads({"pipeline": 2}, LateMessages(monkeypatch).run)
    assert durations(first, "F") == [(0, LATE)] * MICROBATCHES
    assert durations(second, "F") == [(LATE, 0)] * (MICROBATCHES - 1) + [(LATE, LATE)]
    assert durations(first, "B") == [(LATE, 0)] + [(0, 0)] * (MICROBATCHES - 1)
    assert durations(second, "B") == [(0, 0)] * MICROBATCHES


def recorded_training(mesh: Mesh, config: PretrainConfig) -> list[Event]:
    """Events of two steps."""
    replica = Replica(config, mesh)
    recorder = Recorder(replica.schedule, mesh.coordinate("pipeline"), mesh.device)
    replica.engine.record(recorder)
    for step, loaded in enumerate(load_batches(replica, config, mesh, 2)):
        replica.engine.feed(StepInput(step, loaded.contexts, loaded.token_counts, learning_rate=0.01))
    replica.engine.drain()
    return recorder.events()


def test_an_update_waits_for_the_sums_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a schedule that never flushes, which are computed alongside its actions: here until 20 ms after the
    update has asked for them, however slow the machine is."""
    shared, result = Reductions._shared, Future.result
    asked: set[int] = set()

    def late(self: Reductions, step: StepState, scalars: torch.Tensor) -> Scalars:
        sums = shared(self, step, scalars)
        while id(step.scalars) not in asked:
            time.sleep(0.001)
        time.sleep(0.02)
        return sums

    def noted(self: Future[Any], timeout: float | None = None) -> Any:
        asked.add(id(self))
        return result(self, timeout)

    monkeypatch.setattr(Reductions, "_shared", late)
    monkeypatch.setattr(Future, "result", noted)
    config = make_config(write_shard(tmp_path), GPT2_SHAPE, schedule={"name": "2bw"}, parallel={"pipeline": 2})
    for events in run_threads({"pipeline": 2}, recorded_training, config):
        updates = [event for event in events if event.action.startswith("U")]
        assert len(updates) == 2
        assert min(event.wait for event in updates) >= 20e6


def test_a_wait_for_a_copy_is_a_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Activations that come back from host memory late."""
    copied = ThreadCopies.copy

    def late(self: ThreadCopies, moves: Any) -> None:
        time.sleep(0.02)
        copied(self, moves)

    monkeypatch.setattr(ThreadCopies, "copy", late)
    config = make_config(write_shard(tmp_path), GPT2_SHAPE, offload={"activations": "blocks"})
    events = recorded_training(solo(), config)
    assert max(event.wait for event in events if event.action.startswith("B")) >= 10e6


def test_forwards_of_a_single_rank_do_not_wait() -> None:
    events, *_ = recorded(solo(), adoptable(2), "1f1b", [4])
    assert {event.wait for event in events if event.action[0] == "F"} == {0}


def compared(mesh: Mesh, one_host: bool) -> tuple[int, int, bool]:
    """On two hosts, the clock of rank 1's is 5 s fast."""
    lead = 5_000_000_000 * mesh.rank
    arguments = () if one_host else (f"host {mesh.rank}", lambda: time.perf_counter_ns() + lead)
    offset = clock_offset(mesh.world, *arguments)
    return offset.nanoseconds, offset.error, offset.leads_host


def test_two_hosts_clocks_are_compared_and_one_hosts_shared() -> None:
    zero, one = run_threads({"pipeline": 2}, compared, False)
    assert zero == (0, 0, True)
    assert one[1] > 0
    assert one[0] == pytest.approx(5e9, abs=20e6 + 10 * one[1])
    assert one[2]
    assert run_mesh({"pipeline": 2}, compared, True) == [(0, 0, True), (0, 0, False)]


@pytest.mark.parametrize("name", [name for name in vars(_WatchedGroup) if not name.startswith("_")])
def test_a_watched_group_does_what_its_group_does(name: str) -> None:
    group = MagicMock(spec=Group)
    group.configure_mock(name="data", ranks=(0, 1), rank=0)
    watched = _WatchedGroup(group, Stopwatch(HostClock()))
    operation = getattr(watched, name)
    required = [each for each in signature(operation).parameters.values() if each.default is Parameter.empty]
    result = operation(*(object() for _ in required))
    getattr(group, name).assert_called_once()
    answer = getattr(group, name).return_value
    if isinstance(result, Work):
        result.wait()
        answer.wait.assert_called()
    else:
        assert result is (None if name in ("broadcast", "barrier") else answer)
