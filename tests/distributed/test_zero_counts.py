"""Counted costs of sharded state: collectives and elements of a step, layers that are whole at once, bytes."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from torch import Tensor

from megapipe.config.parallel import ZeroConfig
from megapipe.config.run import PretrainConfig
from megapipe.engine.assembly import Assembly
from megapipe.engine.step import StepInput
from megapipe.layout.prediction import predict_rank
from megapipe.layout.units import StateBytes, flat_elements
from megapipe.parallel.groups import Group, Work
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState, is_allocated
from megapipe.spec.layers import model_layers
from megapipe.training.loop.batches import open_loader, split_samples
from megapipe.training.loop.replica import Replica
from tests.support.counting_groups import CountingGroup, Traffic
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, make_config
from tests.support.live_bytes import LiveBytes
from tests.support.meshes import run_mesh

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


def storages(tensors: list[Tensor]) -> int:
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def bytes_of(states: list[UnitState]) -> StateBytes:
    weights = storages([tensor for state in states for tensor in (*state.weights, *state.weight_shards)])
    return StateBytes(
        weights=weights,
        master=storages([t for s in states for t in (*s.weights, *s.weight_shards, s.master)]) - weights,
        gradients=storages([t for state in states for t in (*state.gradients, *state.gradient_shards)]),
        moments=storages([tensor for state in states for tensor in state.moments.values()]),
    )


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
        now = bytes_of(states)
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


LAYERED = {"name": "modular", "chunks": UNITS}


def test_layered_accumulation_gathers_twice_and_reduces_once_a_layer(corpus: str) -> None:
    """Whatever the micro-batches (arXiv 2106.02679); layers that the forward ended with are still there. Buffers of
    one step's end are its own: the next one starts with none."""
    sizes = [flat_elements(layer.parameters.values(), alignment=64, num_shards=2) for layer in model_layers(LLAMA)]
    cases = [(1, 3), (5, 1), (5, 2)]
    configs = [
        config_of(corpus, microbatches, LAYERED, stage=3, weight_buffers=buffers, gradient_buffers=min(buffers, 2))
        for microbatches, buffers in cases
    ]
    for rank in run_mesh({"data": 2}, counted_all, configs, timeout=240.0):
        for counts, (_, buffers) in zip(rank, cases, strict=True):
            gathered = 2 * sum(sizes) - sum(sizes[-buffers:])
            assert counts.calls == {"all_gather": 2 * UNITS - buffers, "reduce_scatter": UNITS}
            assert counts.elements == {"all_gather": gathered, "reduce_scatter": sum(sizes)}
            assert (counts.whole_weights, counts.whole_gradients) == (buffers, min(buffers, 2))


@pytest.mark.exhaustive
def test_single_micro_batches_gather_and_reduce_each_time(corpus: str) -> None:
    cases = (1, 3)
    configs = [config_of(corpus, microbatches, {"name": "gpipe"}, stage=3) for microbatches in cases]
    for rank in run_mesh({"data": 2}, counted_all, configs, timeout=240.0):
        for counts, microbatches in zip(rank, cases, strict=True):
            gathers, reductions = 2 * microbatches * UNITS - 2, microbatches * UNITS
            assert counts.calls == {"all_gather": gathers, "reduce_scatter": reductions}
            assert (counts.whole_weights, counts.whole_gradients) == (2, 2)


@pytest.mark.exhaustive
def test_each_version_is_gathered_and_reduced_independently(corpus: str) -> None:
    """2bw reads one version in all of a step's micro-batches, so that layers at both turns stay on hand, as in 1f1b;
    pipedream reads another in each. Room for every layer's gradient leaves one reduction an update."""
    microbatches = 3
    gathers, reductions = 2 * microbatches * UNITS, microbatches * UNITS
    cases = (
        ({"name": "2bw", "update": "lazy"}, 2, gathers - 2 * (2 * microbatches - 1), reductions),
        ({"name": "2bw", "update": "eager"}, UNITS, gathers - 2 * (2 * microbatches - 1), UNITS),
        ({"name": "pipedream"}, 2, gathers - 2 * microbatches, reductions),
    )
    configs = []
    for schedule, buffers, _, _ in cases:
        config = config_of(corpus, microbatches, schedule, stage=3, gradient_buffers=buffers)
        config.optimizer = replace(config.optimizer, clip_norm=None)
        configs.append(config)
    for rank in run_mesh({"data": 2}, counted_all, configs, timeout=240.0):
        for counts, (_, buffers, gathered, reduced) in zip(rank, cases, strict=True):
            assert counts.calls == {"all_gather": gathered, "reduce_scatter": reduced}
            assert (counts.whole_weights, counts.whole_gradients) == (2, buffers)
            assert (counts.state, counts.created) == (counts.predicted, counts.predicted_new)


@pytest.mark.exhaustive
def test_whole_gradients_are_reduced_once(corpus: str) -> None:
    configs = [config_of(corpus, 3, {"name": "1f1b"}, stage=stage) for stage in (0, 1)]
    for plain, shared in run_mesh({"data": 2}, counted_all, configs, timeout=240.0):
        assert plain.calls == {"all_reduce": UNITS}
        assert shared.calls == {"all_gather": UNITS, "reduce_scatter": UNITS}


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
