"""Layer assignment against every possible cut."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedules import ScheduleError
from megapipe.schedules.building_blocks import balance_layers, check_assignment


@settings(max_examples=150, deadline=None)
@given(st.data(), st.lists(st.integers(0, 40).map(lambda halves: halves / 2), min_size=1, max_size=9))
def test_no_cut_is_better(data, costs):
    stages = data.draw(st.integers(1, len(costs)))
    sizes = balance_layers(costs, stages)
    assert sizes[0][0] == 0
    assert sizes[-1][1] == len(costs)
    assert all(here[1] == there[0] for here, there in pairwise(sizes))
    assert all(first < last for first, last in sizes)
    scores = []
    for inner in combinations(range(1, len(costs)), stages - 1):
        sums = [sum(costs[first:last]) for first, last in pairwise((0, *inner, len(costs)))]
        scores.append((max(sums), sum(value**2 for value in sums)))
    mine = [sum(costs[first:last]) for first, last in sizes]
    assert (max(mine), sum(value**2 for value in mine)) == min(scores)


def test_given_sizes_become_ranges():
    assert check_assignment([3, 1, 2], 6, 3) == ((0, 3), (3, 4), (4, 6))


@pytest.mark.parametrize(
    ("cut", "arguments", "message"),
    [
        *(
            (check_assignment, (sizes, 6, 3), "3 numbers of at least 1 with sum 6")
            for sizes in ([3, 3], [3, 1, 1], [6, 0, 0])
        ),
        (balance_layers, ([1, 1], 3), "2 layers cannot fill 3 stages"),
        (balance_layers, ([1, -1], 2), "not negative"),
    ],
)
def test_what_cannot_be_cut(cut, arguments, message):
    with pytest.raises(ScheduleError, match=message):
        cut(*arguments)
