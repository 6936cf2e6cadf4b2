"""Gathers and reductions overlap compute of layers: the order in a measured trace of slow collectives.

Collectives take 10 ms, on a stream of their own, and a layer at least 20 ms a pass.
"""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.config.parallel import ZeroConfig
from megapipe.config.run import PretrainConfig
from megapipe.engine.assembly import Assembly
from megapipe.engine.step import StepInput
from megapipe.engine.trace import Recorder
from megapipe.parallel.mesh import Mesh
from megapipe.schedules.measured.traces import Event
from megapipe.training.loop.batches import open_loader, split_samples
from megapipe.training.loop.replica import Replica
from tests.support.gpt_runs import LLAMA_SHAPE, make_config
from tests.support.meshes import run_mesh
from tests.support.sleeping_groups import SleepingGroup

UNITS = 5
COLLECTIVE, LAYER = 0.01, 0.02
Log = list[tuple[str, int, int]]


class Slow(torch.autograd.Function):
    """The identity, which takes a while either way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(LAYER)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        time.sleep(LAYER)
        return dy


def slow(unit: Any) -> Any:
    """A unit whose forward and backward take a while."""

    def run(*inputs: Tensor, context: Any) -> tuple[Tensor, ...]:
        (output,) = unit(*inputs, context=context)
        return (Slow.apply(output),)

    return run


def traced(mesh: Mesh, config: PretrainConfig) -> tuple[list[Event], Log]:
    """A rank's second step, and what its group of shards did in it."""
    made: list[SleepingGroup] = []
    communicators = Assembly.communicators

    def slowed(*arguments: Any) -> Any:
        groups = communicators(*arguments)
        ((size, group),) = groups.shards.items()
        made.append(SleepingGroup(group, COLLECTIVE))
        return replace(groups, shards={size: made[-1]})

    Assembly.communicators = slowed  # type: ignore[method-assign]
    replica = Replica(config, mesh)
    for stage in replica.stages.values():
        stage.units = [[slow(twin) for twin in twins] for twins in stage.units]
    engine = replica.engine_for(config.batch.global_size)
    loader = open_loader(config, mesh, replica, split_samples(config, "train"))
    batch = loader.load(0)
    engine.run(StepInput(0, batch.contexts, batch.token_counts, 1e-3))
    recorder = Recorder(engine.schedule, replica.rank, mesh.device)
    engine.record(recorder)
    made[-1].log.clear()
    engine.run(StepInput(1, batch.contexts, batch.token_counts, 1e-3))
    return recorder.events(), made[-1].log


@pytest.fixture(scope="module")
def two_buffers(corpus: str) -> list[tuple[list[Event], Log]]:
    """A run with room for the weights of two layers."""
    return run(corpus, weight_buffers=2)


def run(corpus: str, weight_buffers: int) -> list[tuple[list[Event], Log]]:
    config = make_config(
        corpus,
        replace(LLAMA_SHAPE, num_layers=UNITS - 2),
        parallel={"data": 2},
        batch={"global_size": 4},
        schedule={"name": "modular", "chunks": UNITS},
    )
    config.zero = ZeroConfig(stage=3, weight_buffers=weight_buffers)
    return run_mesh({"data": 2}, traced, config)


def passes(events: list[Event], letter: str) -> list[tuple[int, int]]:
    """Beginning and end of each layer's run of forwards or backwards, in order."""
    times: dict[str, tuple[int, int]] = {}
    for event in events:
        if event.action.startswith(letter):
            stage = event.action.split("/")[0]
            times[stage] = (times.get(stage, (event.start, 0))[0], event.end)
    return list(times.values())


def test_the_next_weights_arrive_before_a_forward_ends(two_buffers: list[tuple[list[Event], Log]]) -> None:
    for events, log in two_buffers:
        gathers = [(start, end) for operation, start, end in log if operation == "gather_into"][:UNITS]
        layers = passes(events, "F")
        assert len(layers) == UNITS
        for layer, gather in zip(layers, gathers[1:], strict=False):
            assert gather[0] < layer[0]
            assert gather[1] < layer[1]


def test_without_a_second_buffer_weights_come_after_it(corpus: str) -> None:
    for events, log in run(corpus, weight_buffers=1):
        gathers = [start for operation, start, _ in log if operation == "gather_into"][:UNITS]
        for layer, start in zip(passes(events, "F"), gathers[1:], strict=False):
            assert start > layer[1]


def test_gradients_are_reduced_while_the_previous_layer_computes(two_buffers: list[tuple[list[Event], Log]]) -> None:
    for events, log in two_buffers:
        reductions = [(start, end) for operation, start, end in log if operation == "reduce_into_part"]
        layers = passes(events, "B")
        assert len(reductions) == len(layers) == UNITS
        # The first pair shares its stream with the gathers at the start of the backward.
        for layer, following, reduction in list(zip(layers, layers[1:], reductions, strict=False))[1:]:
            assert layer[1] <= reduction[0] <= following[0]
            assert reduction[1] < following[1]
