"""Sharded state: bytes and exchanges of a step, overlap with compute, training in a limit."""

import ctypes
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.config.parallel import ZeroConfig
from megapipe.config.run import PretrainConfig
from megapipe.engine.assembly import Assembly
from megapipe.engine.step import StepInput
from megapipe.engine.trace import Recorder
from megapipe.layout.prediction import predict_rank
from megapipe.layout.units import flat_elements
from megapipe.parallel.mesh import Mesh
from megapipe.schedules.measured.traces import Event
from megapipe.spec.layers import model_layers
from megapipe.training.loop.replica import Replica
from tests.distributed.test_covering import check_state_and_traffic
from tests.support.counting_groups import Place
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, load_batches, make_config
from tests.support.layout_runs import LayoutRun, run_layout
from tests.support.meshes import run_mesh
from tests.support.ranks import RankError
from tests.support.sleeping_groups import SleepingGroup

LLAMA = replace(LLAMA_SHAPE, num_layers=4)
TIED = replace(GPT2_SHAPE, num_layers=4)
UNITS = 6
"""Embedding, blocks, head."""
LAYERED = {"name": "modular", "chunks": UNITS}
REPLICAS = [Place("data+context", name) for name in ("all_gather", "reduce_scatter")]
UNCLIPPED = {"clip_norm": None}


RUNS: list[tuple[ModelConfig, dict[str, dict[str, Any]]]] = [
    *(
        (LLAMA, {"zero": {"stage": 3, **buffers}, "batch": {"global_size": 2 * microbatches}})
        for microbatches, buffers in (
            (1, {"weight_buffers": 3}),
            (5, {"weight_buffers": 1, "gradient_buffers": 1}),
            (5, {}),
        )
    ),
    (TIED, {"zero": {"stage": 1}, "training": {"precision": "bf16"}, "optimizer": {"name": "muon", **UNCLIPPED}}),
    (TIED, {"zero": {"stage": 2}}),
    (replace(TIED, tie_embeddings=False), {"zero": {"stage": 3}, "training": {"precision": "bf16"}}),
]


def run_each(mesh: Mesh, configs: list[PretrainConfig]) -> list[LayoutRun]:
    """Several runs, one after the other, on the same ranks."""
    return [run_layout(mesh, config) for config in configs]


@pytest.mark.slow
def test_sharded_state_takes_the_predicted_bytes_and_exchanges(corpus: str) -> None:
    """Layers are gathered twice and reduced once, whatever the micro-batches (arXiv 2106.02679); layers that the
    forward ended with are still there."""
    fields = {"parallel": {"data": 2}, "schedule": LAYERED, "optimizer": UNCLIPPED}
    configs = [make_config(corpus, model, **{**fields, **groups}) for model, groups in RUNS]
    sizes = [flat_elements(layer.parameters.values(), alignment=64, num_shards=2) for layer in model_layers(LLAMA)]
    for number, runs in enumerate(run_mesh({"data": 2}, run_each, configs, timeout=240.0)):
        for config, run in zip(configs, runs, strict=True):
            check_state_and_traffic(predict_rank(config, run.schedule, number), run)
            if config.model is LLAMA:
                kept = config.zero.weight_buffers
                assert [run.traffic.calls[place] for place in REPLICAS] == [2 * UNITS - kept, UNITS]
                gathered = 2 * sum(sizes) - sum(sizes[-kept:])
                assert [run.traffic.elements[place] for place in REPLICAS] == [gathered, sum(sizes)]


# Overlap, in a measured trace: collectives take 10 ms, on a stream of their own, and a layer at least 20 ms a pass.


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
    (batch,) = load_batches(replica, config, mesh)
    engine.run(StepInput(0, batch.contexts, batch.token_counts, 1e-3))
    recorder = Recorder(engine.schedule, replica.rank, mesh.device)
    engine.record(recorder)
    made[-1].log.clear()
    engine.run(StepInput(1, batch.contexts, batch.token_counts, 1e-3))
    return recorder.events(), made[-1].log


@pytest.fixture(scope="module")
def two_buffers(corpus: str) -> list[tuple[list[Event], Log]]:
    """A run with room for the weights of two layers."""
    return overlapped(corpus, weight_buffers=2)


def overlapped(corpus: str, weight_buffers: int) -> list[tuple[list[Event], Log]]:
    zero = {"stage": 3, "weight_buffers": weight_buffers}
    config = make_config(corpus, LLAMA, parallel={"data": 2}, batch={"global_size": 4}, schedule=LAYERED, zero=zero)
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


@pytest.mark.slow
def test_without_a_second_buffer_weights_come_after_it(corpus: str) -> None:
    for events, log in overlapped(corpus, weight_buffers=1):
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


# Four ranks that share out all state train a model three times as large as one rank can under the same limit.


MODEL = replace(LLAMA_SHAPE, hidden_size=256, num_heads=4, num_kv_heads=4, ffn_hidden_size=1024)
LIMIT = 320 * 2**20
FEW, MANY = 16, 30
"""Blocks that one rank surely trains within the limit, and surely not."""


def deep_config(corpus: str, blocks: int, data: int, global_size: int = 1, **groups: dict[str, Any]) -> PretrainConfig:
    model = replace(MODEL, num_layers=blocks)
    return make_config(corpus, model, parallel={"data": data}, batch={"global_size": global_size}, **groups)


def needed_bytes(blocks: int) -> int:
    """fp32 weights, gradients and two moments."""
    model = replace(MODEL, num_layers=blocks)
    return 16 * sum(spec.num_elements for layer in model_layers(model) for spec in layer.parameters.values())


def without_a_heap() -> None:
    """Let glibc map every larger buffer by itself, so that what is freed is gone and holes count for nothing."""
    mmap_threshold = -3
    assert ctypes.CDLL(None).mallopt(mmap_threshold, 2**16) == 1


def train_within_limit(mesh: Mesh, config: PretrainConfig) -> list[float]:
    """Losses of two steps under the limit, which counts from what the process has after a small model."""
    without_a_heap()
    train(
        mesh, replace(config, model=replace(config.model, num_layers=1), schedule=replace(config.schedule, chunks=3))
    )
    status = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + LIMIT, used + LIMIT))
    return train(mesh, config)


def train(mesh: Mesh, config: PretrainConfig) -> list[float]:
    replica = Replica(config, mesh)
    losses = []
    for step, batch in enumerate(load_batches(replica, config, mesh, 2)):
        losses.append(replica.engine.run(StepInput(step, batch.contexts, batch.token_counts, 1e-3)).loss)
    return losses


def train_alone(corpus: str, blocks: int) -> None:
    layered = {"name": "modular", "chunks": blocks + 2}
    run_mesh({}, train_within_limit, deep_config(corpus, blocks, 1, schedule=layered), timeout=300.0)


def largest_alone(corpus: str) -> int:
    """Blocks that one rank just trains."""
    train_alone(corpus, FEW)
    for blocks in range(FEW + 1, MANY):
        try:
            train_alone(corpus, blocks)
        except RankError as error:
            if "allocate memory" not in str(error):
                raise
            return blocks - 1
    raise AssertionError(f"one rank trains {MANY - 1} blocks within {LIMIT:,} bytes")


@pytest.mark.exhaustive
def test_four_ranks_train_three_times_what_one_can(corpus: str) -> None:
    largest = largest_alone(corpus)
    blocks = next(n for n in range(largest, 200) if needed_bytes(n) >= 3 * needed_bytes(largest))
    config = deep_config(corpus, blocks, 4, global_size=4, schedule={"name": "modular", "chunks": blocks + 2})
    config.zero = ZeroConfig(stage=3)
    ranks = run_mesh({"data": 4}, train_within_limit, config, timeout=600.0)
    (expected,) = run_mesh({}, train, deep_config(corpus, blocks, 1, global_size=4), timeout=600.0)
    for losses in ranks:
        assert losses == pytest.approx(expected, rel=1e-4)
