"""Splitting layers into stages against brute force."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.models.stages import even_split


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_the_dearest_stage_is_as_cheap_as_brute_force_finds(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    ranges = even_split(costs, num_stages)
    assert [layer for part in ranges for layer in part] == [*range(len(costs))]
    assert len(ranges) == num_stages
    assert all(len(part) > 0 for part in ranges)

    def value(bounds: tuple[int, ...]) -> tuple[int, int]:
        stages = [sum(costs[start:stop]) for start, stop in pairwise((0, *bounds, len(costs)))]
        return max(stages), sum(stage**2 for stage in stages)

    best = min(value(bounds) for bounds in combinations(range(1, len(costs)), num_stages - 1))
    assert value(tuple(part.start for part in ranges[1:])) == best


@given(st.integers(1, 40), st.data())
def test_equal_layers_are_shared_evenly(num_layers: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, num_layers))
    sizes = {len(part) for part in even_split([1.0] * num_layers, num_stages)}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("num_stages", [0, 4])
def test_impossible_numbers_of_stages_are_refused(num_stages: int) -> None:
    with pytest.raises(ValueError, match="choose from 1 to 3 stages"):
        even_split([1, 2, 3], num_stages)


@pytest.mark.parametrize("cost", [-1.0, float("inf"), float("nan")])
def test_impossible_costs_are_refused(cost: float) -> None:
    with pytest.raises(ValueError, match="layer 1 has cost"):
        even_split([1.0, cost], 1)
