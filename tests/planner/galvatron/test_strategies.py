"""The decision tree beside the paper's counts (arXiv 2211.13878) and an enumeration of labelled factorisations."""

import math
from itertools import product

import pytest

from megapipe.planner.galvatron.strategies import METHODS, Strategy, strategies


@pytest.mark.parametrize(("devices", "whole", "pruned"), [(8, 34, 22), (16, 73, 37), (32, 136, 56), (64, 229, 79)])
def test_the_tree_has_as_many_strategies_as_the_paper_s(devices: int, whole: int, pruned: int) -> None:
    assert len(strategies(devices, pruned=False)) == whole
    assert len(strategies(devices)) == pruned
    assert len(strategies(devices, recompute=True)) == 2 * pruned


@pytest.mark.parametrize("devices", [1, 2, 8, 16])
def test_the_tree_has_every_nesting_of_distinct_methods_once(devices: int) -> None:
    """Found here by trying every row of up to three methods and degrees."""
    expected = set()
    degrees = [degree for degree in (2, 4, 8, 16) if degree <= devices]
    for count in range(4):
        for levels in product(product(METHODS, degrees), repeat=count):
            group = math.prod(degree for _, degree in levels)
            if len({method for method, _ in levels}) == count and group <= devices:
                expected.add(Strategy(devices // group, levels))
    found = strategies(devices, pruned=False)
    assert len(found) == len(set(found))
    assert set(found) == expected
    assert set(strategies(devices)) == {
        each for each in expected if not {"data", "sharded"} <= dict(each.levels).keys()
    }


def test_placement_follows_the_nesting() -> None:
    outer = Strategy(1, (("data", 2), ("tensor", 4)))
    inner = Strategy(1, (("tensor", 4), ("data", 2)))
    assert [outer.span(method) for method in METHODS] == [8, 1, 4]
    assert [inner.span(method) for method in METHODS] == [2, 1, 8]
    assert [outer.block(device) for device in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [inner.block(device) for device in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [Strategy(1, (("data", 2), ("tensor", 2), ("sharded", 2))).block(device) for device in range(8)] == [
        0, 1, 0, 1, 2, 3, 2, 3,
    ]  # fmt: skip


def test_devices_that_are_no_power_of_two_are_refused() -> None:
    with pytest.raises(ValueError, match="devices must be a power of 2, got 12"):
        strategies(12)
