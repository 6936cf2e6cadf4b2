"""Compare predictions of a rank with closed forms; tests/distributed/test_covering.py has counted runs."""

from dataclasses import replace
from typing import Any

import pytest

from megapipe.config.model import ModelConfig
from megapipe.config.parallel import ZeroConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.costs import LayoutCosts
from megapipe.layout.prediction import RankPrediction
from megapipe.layout.units import StateBytes, flat_elements
from megapipe.schedules import build
from megapipe.schedules.states import StateTable
from megapipe.spec.layers import model_layers

MODEL = ModelConfig(
    vocabulary_size=128, num_layers=4, hidden_size=64, num_heads=4, max_positions=32, tie_embeddings=False
)
LAYERS = model_layers(MODEL)
UNITS = len(LAYERS)
REPLICAS = 4


def layered(microbatches: int, buffers: int = 2, **groups: Any) -> RankPrediction:
    """One of four replicas that share all state, each of whose layers takes all micro-batches in a row."""
    config = PretrainConfig(model=MODEL, zero=ZeroConfig(stage=3, weight_buffers=buffers, **groups.pop("zero", {})))
    config.data = replace(config.data, sequence_length=32)
    config = replace(config, **{name: replace(getattr(config, name), **values) for name, values in groups.items()})
    units = (1,) * UNITS
    states = StateTable.uniform(units, weight_pool=buffers, gradient_pool=2)
    schedule = build(
        "modular", 1, microbatches, units_per_stage=units, data_parallel=True, chunks=UNITS, states=states
    )  # fmt: skip
    costs = LayoutCosts(config, LAYERS, REPLICAS, "sdpa", alignment=64)
    return RankPrediction(costs, schedule, tuple(range(index, index + 1) for index in range(UNITS)), (), 0)


def sizes() -> list[int]:
    return [flat_elements(layer.parameters.values(), alignment=64, num_shards=REPLICAS) for layer in LAYERS]


@pytest.mark.parametrize("microbatches", [1, 7])
@pytest.mark.parametrize("buffers", [1, 3])
def test_layered_accumulation_gathers_twice_and_reduces_once(microbatches: int, buffers: int) -> None:
    """Rajbhandari et al. (2020, section 7): weights twice and gradients once, but for the layers that are still
    gathered when the backward starts."""
    traffic = layered(microbatches, buffers).traffic()
    elements, saved = sum(sizes()), sum(sizes()[-buffers:])
    assert traffic["data+context", "reduce_scatter"] == (UNITS, elements, 4 * elements)
    gathered = 2 * elements - saved
    assert traffic["data+context", "all_gather"] == (2 * UNITS - buffers, gathered, 4 * gathered)
    assert {group for group, _ in traffic} == {"data+context", "world"}  # nothing between copies of the shards


def test_state_peaks_are_those_of_rajbhandari() -> None:
    rank = layered(3)
    peak, lasting = rank.peak(), rank.state()
    shard = 4 * sum(sizes()) // REPLICAS
    assert lasting == StateBytes(weights=shard, master=0, gradients=shard, moments=2 * shard)
    assert peak.weights == peak.gradients == 4 * sum(sorted(sizes())[-2:])


@pytest.mark.parametrize("offload", [{}, {"optimizer": True}, {"optimizer": True, "weights": True}])
def test_offloaded_state_is_in_host_memory(offload: dict[str, bool]) -> None:
    rank = layered(3, offload=offload, training={"precision": "bf16"})
    lasting = rank.state()
    of_optimizer = (lasting.master + lasting.moments) * ("optimizer" in offload)
    assert lasting.master > 0
    assert rank.in_host() == of_optimizer + lasting.weights * ("weights" in offload)


def test_a_step_starts_and_ends_without_activations() -> None:
    activations = layered(3).timeline.activations
    assert activations[0] == activations[-1] == 0
    assert max(activations) >= 3 * layered(3).costs.kept(LAYERS[1])


def test_nccl_sums_without_memory_of_its_own() -> None:
    rank = layered(3)
    largest = sorted(sizes())[-2:]
    assert rank.peak().summands == sum(4 * size * (REPLICAS - 1) // REPLICAS for size in largest)
    assert replace(rank, over_gloo=False).peak().summands == 0


def test_hybrid_shards_are_summed_over_their_copies_once() -> None:
    traffic = layered(3, zero={"shard_size": 2}).traffic()
    elements = sum(flat_elements(layer.parameters.values(), alignment=64, num_shards=2) for layer in LAYERS)
    assert traffic["shards", "reduce_scatter"] == (UNITS, elements, 4 * elements)
    assert traffic["shard copies", "all_reduce"] == (UNITS, elements // 2, 2 * elements)
