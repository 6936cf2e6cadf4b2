"""Halves of pairs that run at the same time: the stream of each, whose turn it is, and numbers that stay the same."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config.memory import OffloadConfig
from megapipe.config.run import PretrainConfig
from megapipe.engine.assembly import Holding, pair_overlap
from megapipe.engine.pairs import AbandonedError, Alternation, HalfError, TwoStreams
from megapipe.engine.program import Instruction
from megapipe.layout.table import LayerChoice
from megapipe.parallel.groups import DistributedGroup, SilentGroup, SoloGroup
from megapipe.parallel.mesh import Mesh
from megapipe.schedules import build
from megapipe.schedules.actions import Kind, on_side_stream, pairs_of
from megapipe.training.loop import replica
from tests.support.gpt_runs import GPT2_SHAPE, RankRun, make_config, run_gpt, write_shard
from tests.support.meshes import run_mesh


@given(ranks=st.integers(1, 5), extra=st.integers(0, 6))
def test_halves_of_a_pair_never_share_a_stream(ranks: int, extra: int) -> None:
    schedule = build("dualpipe_v", ranks, 2 * ranks + extra)
    for rank in range(ranks):
        actions = list(schedule.actions("body", rank))
        side, pairs = on_side_stream(actions), pairs_of(actions)
        assert len(pairs) == len({action.group for action in actions} - {-1})
        for first in pairs:
            one, other = actions[first : first + 2]
            assert {one.kind, other.kind} == {Kind.FORWARD, Kind.BACKWARD}
            assert ((one.stage, one.microbatch) in side) != ((other.stage, other.microbatch) in side)


@pytest.mark.parametrize("in_order", [False, True])
def test_actions_keep_their_numbers_in_pairs(in_order: bool) -> None:
    actions = list(build("dualpipe_v", 2, 6).actions("body", 0))
    compiled = [Instruction(lambda step: None, action, 0, number) for number, action in enumerate(actions)]
    with streams_on_cpu():
        joined = TwoStreams(torch.device("cpu")).instructions(compiled, in_order=in_order)
    assert (len(joined) < len(actions)) != in_order
    for instruction in joined:
        assert actions[instruction.number] is instruction.action
        assert instruction.partner is None or actions[instruction.number + 1] is instruction.partner.action


def test_halves_take_turns_at_every_pause() -> None:
    turns, order, threads = Alternation(), [], set()

    def half(name: str, pauses: int) -> None:
        for number in range(pauses):
            order.append(f"{name}{number}")
            threads.add(threading.get_ident())
            turns.pause()
        order.append(f"{name} ends")

    turns.run(lambda: half("f", 2), lambda: half("b", 4))
    assert order == ["f0", "b0", "f1", "b1", "f ends", "b2", "b3", "b ends"]
    assert len(threads) == 2
    turns.pause()  # outside of a pair nothing waits


@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize("pauses", [0, 1, 3])
def test_a_half_that_fails_ends_the_other(fails: int, pauses: int) -> None:
    turns, abandoned = Alternation(), []

    def failing() -> None:
        for _ in range(pauses):
            turns.pause()
        raise ValueError("broken")

    def other() -> None:
        try:
            for _ in range(10):
                turns.pause()
        except AbandonedError:
            abandoned.append(True)
            raise

    with pytest.raises((HalfError, ValueError)) as raised:
        turns.run(*((other, failing) if fails else (failing, other)))
    error = raised.value.__cause__ if fails else raised.value
    assert isinstance(raised.value, HalfError) == bool(fails)
    assert str(error) == "broken"
    assert abandoned == ([] if not fails and not pauses else [True])


class Streams:
    """In place of a stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.waits = 0

    def wait_stream(self, stream: "Streams") -> None:
        self.waits += 1


@contextmanager
def streams_on_cpu() -> Iterator[list[int]]:
    """Let pairs overlap on a CPU: the halves take turns, and their streams do nothing. Yields the pairs that ran."""
    count = []
    run = Alternation.run

    def counted(turns: Alternation, *halves: Any) -> None:
        count.append(1)
        run(turns, *halves)

    with (
        mock.patch.object(replica, "pair_overlap", return_value=(True, None)),
        mock.patch.object(torch.cuda, "Stream", Streams),
        mock.patch.object(torch.cuda, "current_stream", Streams),
        mock.patch.object(torch.cuda, "stream", return_value=nullcontext()),
        mock.patch.object(torch.cuda, "device", return_value=nullcontext()),
        mock.patch.object(torch.Tensor, "record_stream", return_value=None),
        mock.patch.object(Alternation, "run", counted),
    ):
        yield count


def run_both(mesh: Mesh, config: PretrainConfig) -> tuple[RankRun, RankRun, int]:
    """The run with the halves of pairs in order, the run with overlapping ones, and the number of these."""
    in_order = run_gpt(mesh, config, 2)
    with streams_on_cpu() as count:
        return in_order, run_gpt(mesh, config, 2), len(count)


@pytest.mark.parametrize(
    ("pipeline", "sequence"),
    [pytest.param(1, False, marks=pytest.mark.slow), pytest.param(2, True, marks=pytest.mark.exhaustive)],
)
def test_halves_that_take_turns_compute_the_same_bits(tmp_path: Path, pipeline: int, sequence: bool) -> None:
    """Over gloo, whose collectives mix up their data where ranks call them in another order."""
    model = replace(GPT2_SHAPE, num_layers=4, hidden_dropout=0.1)
    groups: Any = {"parallel": {"sequence": sequence}, "schedule": {"name": "dualpipe_v"}}
    config = make_config(write_shard(tmp_path), model, **groups)
    for in_order, overlapping, count in run_mesh({"pipeline": pipeline, "tensor": 2}, run_both, config):
        assert count > 0
        assert [result.loss for result in overlapping.results] == [result.loss for result in in_order.results]
        for actual, wanted in ((overlapping.gradients, in_order.gradients), (overlapping.weights, in_order.weights)):
            assert wanted
            assert all(torch.equal(one.values, other.values) for one, other in zip(actual, wanted, strict=True))


def test_pairs_that_run_in_order_print_the_reason() -> None:
    schedule, distributed = build("dualpipe_v", 2, 4), mock.Mock(spec=DistributedGroup, size=2)

    def overlap_of(tensor: Any = distributed, device: str = "cuda", name: str = "dualpipe_v", **fields: Any) -> Any:
        groups = {("tensor",): tensor, ("context",): SoloGroup("context"), ("data", "context"): distributed}
        mesh: Any = SimpleNamespace(device=torch.device(device), group=lambda *names: groups[names])
        return pair_overlap(Holding(**fields), mesh, schedule if name == "dualpipe_v" else build(name, 2, 4))

    assert overlap_of() == (True, "pairs of a forward and a backward overlap on two streams")
    assert overlap_of(device="cpu") == overlap_of(name="zb_v") == (False, None)
    assert overlap_of(choices=[LayerChoice(1, "selective", fp8=True)])[0]
    for words, changes in {
        "parallel.tensor and parallel.context are 1": {"tensor": SoloGroup("tensor")},
        "tensor and context ranks are threads": {"tensor": SilentGroup("tensor", (0, 1), 0)},
        "training.compile": {"compile": True},
        "zero.stage above 1": {"choices": [LayerChoice(2)]},
        "offload.activations": {"choices": [LayerChoice(0, offload=True)]},
        "offload.weights": {"offload": OffloadConfig(weights=True)},
    }.items():
        overlaps, remark = overlap_of(**changes)  # type: ignore[arg-type]
        assert not overlaps
        assert words in remark
