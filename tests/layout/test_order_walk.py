"""Walks of few micro-batches, which a search shares among layouts, compared with walks of all of them, and walks of
all ranks compared with one of each rank."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.layout.order_walk import FewRanks, Order, ShardedRanks, before_backwards, stage_walk
from megapipe.layout.walk import Sizes, Tensor
from megapipe.schedules.registry import find_generator
from megapipe.schedules.states import StateTable
from tests.schedules.support import TRAINED, chunks_at_once, fewest_microbatches

MOST_LAYERS = 3


@st.composite
def orders(draw: st.DrawFn, most_ranks: int, most_rounds: int) -> Order:
    """Any schedule with any number of ranks, chunks and micro-batches that it can run."""
    generator = find_generator(draw(st.sampled_from(sorted(TRAINED))))
    ranks = draw(st.integers(1, most_ranks))
    options: dict[str, Any] = {}
    if "chunks" in generator.order_options:
        options["chunks"] = draw(st.integers(1, 3))
    if generator.takes_two_bp and draw(st.booleans()):
        options["two_bp"] = True
    count = draw(st.integers(fewest_microbatches(generator.name, ranks), most_rounds * ranks + 3))
    return Order(generator.name, tuple(sorted(options.items())), ranks, count, draw(st.integers(1, 2)))


def stages_of(order: Order) -> int:
    return order.num_ranks * find_generator(order.name).number_of_chunks(order.given)


@st.composite
def shardings(draw: st.DrawFn, order: Order) -> ShardedRanks:
    """Uneven stages, each layer with a ZeRO stage of its own, some recomputed, some without parameters."""
    units = draw(st.lists(st.integers(1, MOST_LAYERS), min_size=stages_of(order), max_size=stages_of(order)))
    pools = [(0, 0), (0, 1), (0, 2), (1, 1), (2, 2), (3, 1)]
    weights, gradients = draw(
        st.sampled_from([each for each in pools if each[0] != 1 or chunks_at_once(order.name) == 1])
    )
    zero = 3 if weights else 2 if gradients else 1
    stages = [[draw(st.sampled_from([1, zero, zero])) for _ in range(count)] for count in units]
    states = StateTable.uniform(units, weight_pool=weights, gradient_pool=gradients, zero=stages)
    filled = tuple(tuple(draw(st.booleans()) or unit == 0 for unit in range(count)) for count in units)
    spans = tuple((range(draw(st.integers(0, count - 1)), count),) for count in units) if draw(st.booleans()) else ()
    ranks = tuple(range(order.num_ranks))
    return ShardedRanks(ranks, states, filled, spans or ((),) * len(units), draw(st.booleans()))


def check_held_bytes(order: Order, seed: int) -> None:
    """Activations and messages of each rank, and the slots that messages arrive in."""
    numbers = np.random.default_rng(seed).integers(0, 1000, (Tensor.WEIGHTS, stages_of(order)))
    short = order.short()[0]
    short_walk, whole = (
        (walk.header, walk.by_rank(sizes.activations + sizes.temporaries), walk.by_rank(sizes.sent))
        for walk in map(stage_walk, (short, order))
        for sizes in [walk.held(filled_sizes(walk.num_places, numbers))]
    )
    assert np.array_equal(short_walk[1], whole[1])
    assert np.array_equal(short_walk[2], whole[2])
    if order.actions.flushes:
        assert short_walk[0].activation_slots == whole[0].activation_slots
        assert short_walk[0].gradient_slots == whole[0].gradient_slots
    moments = before_backwards(order, np.arange(stages_of(order)))
    assert np.array_equal(moments.kept.max(axis=0), moments.most)
    assert moments.kept.min() >= 0


def filled_sizes(num_places: int, numbers: Any) -> Sizes:
    sizes = Sizes(num_places, 1, 7, 5)
    sizes.of[: Tensor.WEIGHTS, :, 0] = numbers
    return sizes


def of_rank(sharding: ShardedRanks, rank: int, stages: list[int]) -> ShardedRanks:
    units = sharding.states.units
    states = replace(sharding.states, units=tuple(units[stage] for stage in stages) if units else ())
    filled, spans = (tuple(each[stage] for stage in stages) for each in (sharding.filled, sharding.spans))
    return sharding._replace(ranks=(rank,), states=states, filled=filled, spans=spans)


def check_sharded(order: Order, sharding: ShardedRanks, seed: int) -> None:
    """Whole weights, gradients and summands of each rank, and how often they are exchanged."""
    short, period = order.short()
    few, whole = FewRanks(short, sharding), FewRanks(order, sharding)
    numbers = np.random.default_rng(seed).integers(0, 1000, (3, whole.walk.num_places))
    for part in ("weights", "gradients", "summands"):
        peaks = []
        for walk in (few.walk, whole.walk):
            sizes = Sizes(walk.num_places, 1, 0, 0)
            sizes.of[Tensor.WEIGHTS : Tensor.STATE, :, 0] = numbers
            peaks.append(walk.by_rank(getattr(walk.held(sizes), part)))
        assert np.array_equal(*peaks)
        for rank, peak in enumerate(peaks[0]):
            own = [stage for stage, place in enumerate(short.actions.header.stages) if place.rank == rank]
            alone = FewRanks(short, of_rank(sharding, rank, own)).walk
            sizes = Sizes(alone.num_places, 1, 0, 0)
            by_stage = numbers.reshape(3, stages_of(order), -1)[:, own, : alone.num_places // len(own)]
            sizes.of[Tensor.WEIGHTS : Tensor.STATE, :, 0] = by_stage.reshape(3, -1)
            assert alone.by_rank(getattr(alone.held(sizes), part)) == [peak]
    longer = order.short(3)[0]
    if longer.num_microbatches < order.num_microbatches:
        fewer = longer._replace(num_microbatches=longer.num_microbatches - period)
        times = (order.num_microbatches - longer.num_microbatches) // period
        for part in ("gathers", "sums"):
            alone = sharding.of_weights() if part == "gathers" else sharding.of_gradients()
            start, step = (getattr(FewRanks(each, alone), part) for each in (longer, fewer))
            assert np.array_equal(start + (start - step) * times, getattr(whole, part))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), order=orders(4, 5), seed=st.integers(0, 99))
def test_few_microbatches_show_all_that_ranks_hold(data: st.DataObject, order: Order, seed: int) -> None:
    check_held_bytes(order, seed)
    check_sharded(order, data.draw(shardings(order)), seed)


@pytest.mark.exhaustive
@settings(max_examples=1500, deadline=None)
@given(data=st.data(), order=orders(8, 8), seed=st.integers(0, 99))
def test_few_microbatches_show_peaks_in_many_orders(data: st.DataObject, order: Order, seed: int) -> None:
    check_held_bytes(order, seed)
    check_sharded(order, data.draw(shardings(order)), seed)
