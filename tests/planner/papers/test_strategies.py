"""The decision tree compared with the paper's counts (arXiv 2211.13878) and enumerated labelled factorisations."""

import math
from itertools import product

import pytest

from megapipe.planner.papers.galvatron import METHODS, Strategy, stage_strategies


def strategies(devices: int, *, pruned: bool = True, recompute: bool = False) -> list[Strategy]:
    """All strategies of a machine, over every pipeline degree that is a power of 2."""
    depths = [2**power for power in range(devices.bit_length())]
    return [each for depth in depths for each in stage_strategies(devices, depth, pruned, recompute)]


@pytest.mark.parametrize(("devices", "whole", "pruned"), [(8, 34, 22), (16, 73, 37), (32, 136, 56), (64, 229, 79)])
def test_the_tree_has_the_papers_number_of_strategies(devices: int, whole: int, pruned: int) -> None:
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
    tree = strategies(devices, pruned=False)
    assert len(tree) == len(set(tree))
    assert set(tree) == expected
    assert set(strategies(devices)) == {
        each for each in expected if not {"data", "sharded"} <= dict(each.levels).keys()
    }


def test_placement_follows_the_nesting() -> None:
    outer = Strategy(1, (("data", 2), ("tensor", 4)))
    inner = Strategy(1, (("tensor", 4), ("data", 2)))
    assert [outer.block(device) for device in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [inner.block(device) for device in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [Strategy(1, (("data", 2), ("tensor", 2), ("sharded", 2))).block(device) for device in range(8)] == [
        0, 1, 0, 1, 2, 3, 2, 3,
    ]  # fmt: skip
