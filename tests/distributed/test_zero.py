"""Sharded state: collectives of a step, whole layers and bytes at once, overlap with compute, training in a limit."""

import ctypes
import itertools
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megapipe.config.parallel import ZeroConfig
from megapipe.config.run import PretrainConfig
from megapipe.engine.assembly import Assembly
from megapipe.engine.step import StepInput
from megapipe.engine.trace import Recorder
from megapipe.layout.prediction import predict_rank
from megapipe.layout.units import StateBytes, flat_elements
from megapipe.parallel.groups import Group, Work
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import is_allocated
from megapipe.schedules.measured.traces import Event
from megapipe.spec.layers import model_layers
from megapipe.training.loop.batches import open_loader, split_samples
from megapipe.training.loop.replica import Replica
from tests.support.counting_groups import CountingGroup, Traffic
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, make_config
from tests.support.layout_runs import state_bytes
from tests.support.live_bytes import LiveBytes
from tests.support.meshes import run_mesh
from tests.support.ranks import RankError
from tests.support.sleeping_groups import SleepingGroup

LLAMA = replace(LLAMA_SHAPE, num_layers=4)
UNITS = 6
"""Embedding, blocks, head."""
ONE_COEFFICIENT = 4
"""Bytes of what gradients are multiplied by where nothing is clipped."""


@dataclass
class Counts:
    """calls, elements: by collective over the replicas, in a second step. whole_weights, whole_gradients: most layers
    that were whole at once. state: most bytes of it at once, by kind. created: live bytes of a new replica.
    predicted, predicted_new: the same two, predicted."""

    calls: dict[str, int] = field(default_factory=dict)
    elements: dict[str, int] = field(default_factory=dict)
    whole_weights: int = 0
    whole_gradients: int = 0
    state: StateBytes = field(default_factory=lambda: StateBytes(0, 0, 0, 0))
    created: int = 0
    predicted: StateBytes = field(default_factory=lambda: StateBytes(0, 0, 0, 0))
    predicted_new: int = 0


class Watched(CountingGroup):
    """Looks at the states whenever a collective starts."""

    def __init__(self, group: Group, traffic: Traffic, look: Callable[[], None]) -> None:
        super().__init__(group, traffic)
        self._look = look

    def gather_into(self, whole: Tensor, part: Tensor) -> Work:
        self._look()
        return super().gather_into(whole, part)

    def reduce_into_part(self, whole: Tensor) -> Work:
        self._look()
        return super().reduce_into_part(whole)


def counted(mesh: Mesh, config: PretrainConfig) -> Counts:
    """One rank's second step; where the pipeline never empties, what is done between two feeds."""
    counts, traffic, states = Counts(), Traffic(), []  # type: ignore[var-annotated]
    communicators = Assembly.communicators

    def look() -> None:
        full = [state for state in states if state.table.num_elements and state.sharding.gradients]
        whole = sum(is_allocated(copy) for state in full if state.sharding.weights for copy in state.weights)
        counts.whole_weights = max(counts.whole_weights, whole)
        gradients = sum(is_allocated(gradient) for state in full for gradient in state.gradients)
        counts.whole_gradients = max(counts.whole_gradients, gradients)
        now = state_bytes(states)
        most = {name: max(value, getattr(now, name)) for name, value in counts.state._asdict().items()}
        counts.state = StateBytes(**most)

    def watching(*arguments: Any) -> Any:
        groups = communicators(*arguments)
        if not groups.shards:
            return replace(groups, data=CountingGroup(groups.data, traffic))
        return replace(groups, shards={size: Watched(each, traffic, look) for size, each in groups.shards.items()})

    Assembly.communicators = watching  # type: ignore[method-assign]
    with LiveBytes() as live:
        replica = Replica(config, mesh)
        counts.created = live.current
    states.extend(replica.states())
    rank = predict_rank(config, replica.schedule, mesh.rank)
    lasting, whole = rank.state(), rank.peak()
    counts.predicted = lasting._replace(
        weights=lasting.weights + whole.weights, gradients=lasting.gradients + whole.gradients
    )
    counts.predicted_new = lasting.total - lasting.moments + ONE_COEFFICIENT
    loader = open_loader(config, mesh, replica, split_samples(config, "train"))
    for step in range(2):
        batch = loader.load(step * config.batch.global_size)
        traffic.clear()
        replica.engine.feed(StepInput(step, batch.contexts, batch.token_counts, 1e-3))
        look()
    counts.calls = {place.operation: calls for place, calls in traffic.calls.items()}
    counts.elements = {place.operation: elements for place, elements in traffic.elements.items()}
    replica.engine.drain()
    return counts


def config_of(corpus: str, microbatches: int, schedule: dict[str, Any], **zero: Any) -> PretrainConfig:
    config = make_config(
        corpus, LLAMA, parallel={"data": 2}, batch={"global_size": 2 * microbatches}, schedule=schedule
    )
    config.zero = ZeroConfig(**zero)
    return config


def counted_all(mesh: Mesh, configs: list[PretrainConfig]) -> list[Counts]:
    """Several runs, one after the other, on the same ranks."""
    return [counted(mesh, config) for config in configs]


class Expected(NamedTuple):
    """A run, its collectives in a step, and the most whole weights and gradients at once, which stage 3 counts."""

    schedule: dict[str, Any]
    microbatches: int
    zero: dict[str, Any]
    calls: dict[str, int]
    whole: tuple[int, int] = (0, 0)


LAYERED = {"name": "modular", "chunks": UNITS}
SIZES = [flat_elements(layer.parameters.values(), alignment=64, num_shards=2) for layer in model_layers(LLAMA)]


def layered(microbatches: int, buffers: int) -> Expected:
    zero = {"stage": 3, "weight_buffers": buffers, "gradient_buffers": min(buffers, 2)}
    calls = {"all_gather": 2 * UNITS - buffers, "reduce_scatter": UNITS}
    return Expected(LAYERED, microbatches, zero, calls, (buffers, min(buffers, 2)))


def single(schedule: dict[str, Any], microbatches: int, kept: int, buffers: int = 2) -> Expected:
    """A schedule of single micro-batches. kept: gathers that find their layer still there."""
    reductions = UNITS if buffers == UNITS else microbatches * UNITS
    calls = {"all_gather": 2 * microbatches * UNITS - kept, "reduce_scatter": reductions}
    return Expected(schedule, microbatches, {"stage": 3, "gradient_buffers": buffers}, calls, (2, buffers))


@pytest.mark.parametrize(
    "cases",
    [
        # Twice and once a layer, whatever the micro-batches (arXiv 2106.02679); layers that the forward ended with are
        # still there. Buffers of one step's end are its own: the next one starts with none.
        [layered(1, 3), layered(5, 1), layered(5, 2)],
        pytest.param(
            [
                single({"name": "gpipe"}, 1, kept=2),
                single({"name": "gpipe"}, 3, kept=2),
                # 2bw reads one version in all of a step's micro-batches, so that layers at both turns stay on hand,
                # as in 1f1b; pipedream reads another in each. Room for every layer's gradient leaves one reduction
                # an update.
                single({"name": "2bw", "update": "lazy"}, 3, kept=10),
                single({"name": "2bw", "update": "eager"}, 3, kept=10, buffers=UNITS),
                single({"name": "pipedream"}, 3, kept=6),
                Expected({"name": "1f1b"}, 3, {"stage": 0}, {"all_reduce": UNITS}),
                Expected({"name": "1f1b"}, 3, {"stage": 1}, {"all_gather": UNITS, "reduce_scatter": UNITS}),
            ],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_schedules_gather_and_reduce_layers_no_more_than_needed(corpus: str, cases: list[Expected]) -> None:
    configs = []
    for case in cases:
        config = config_of(corpus, case.microbatches, case.schedule, **case.zero)
        config.optimizer = replace(config.optimizer, clip_norm=None)
        configs.append(config)
    for rank in run_mesh({"data": 2}, counted_all, configs, timeout=240.0):
        for counts, case in zip(rank, cases, strict=True):
            assert counts.calls == case.calls
            assert (counts.whole_weights, counts.whole_gradients) == case.whole
            assert (counts.state, counts.created) == (counts.predicted, counts.predicted_new)
            if case.schedule == LAYERED:
                gathered = 2 * sum(SIZES) - sum(SIZES[-case.whole[0] :])
                assert counts.elements == {"all_gather": gathered, "reduce_scatter": sum(SIZES)}


FEW_STATES = [(1, True, "bf16", "muon"), (2, True, "fp32", "adamw"), (3, False, "bf16", "adamw")]
MORE_STATES = [(*case, "adamw") for case in itertools.product((1, 2, 3), (False, True), ("fp32", "bf16"))]
MORE_STATES += [(3, False, "fp32", "muon")]


@pytest.mark.parametrize("cases", [FEW_STATES, pytest.param(MORE_STATES, marks=pytest.mark.exhaustive)])
def test_state_takes_the_predicted_bytes(corpus: str, cases: list[tuple[int, bool, str, str]]) -> None:
    configs = []
    for stage, tied, precision, optimizer in cases:
        config = config_of(corpus, 2, LAYERED, stage=stage)
        config.optimizer = replace(config.optimizer, name=optimizer)  # type: ignore[arg-type]
        config.model = replace(GPT2_SHAPE, num_layers=4, tie_embeddings=tied)
        config.training = replace(config.training, precision=precision)  # type: ignore[arg-type]
        configs.append(config)
    for rank in run_mesh({"data": 2}, counted_all, configs, timeout=240.0):
        for counts in rank:
            assert (counts.state, counts.created) == (counts.predicted, counts.predicted_new)


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
    return overlapped(corpus, weight_buffers=2)


def overlapped(corpus: str, weight_buffers: int) -> list[tuple[list[Event], Log]]:
    config = make_config(
        corpus,
        LLAMA,
        parallel={"data": 2},
        batch={"global_size": 4},
        schedule=LAYERED,
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
    loader = open_loader(config, mesh, replica, split_samples(config, "train"))
    losses = []
    for step in range(2):
        batch = loader.load(step * config.batch.global_size)
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
