"""The order of a published table of large vocabularies."""

from itertools import combinations

import pytest

from tests.planner.fitting.vocabularies import ROWS, Published, predicted


def sign(first: float, second: float) -> int:
    """Which is larger; values within 2% are level."""
    return 0 if abs(first - second) <= 0.02 * max(first, second) else 1 if first > second else -1


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.sequence}k-{row.vocabulary}k")
def test_predicted_speeds_have_the_published_order(row: Published) -> None:
    found = [speed for speed, _ in predicted(row.sequence, row.vocabulary)]
    for one, other in combinations(range(len(found)), 2):
        assert sign(found[one], found[other]) == sign(row.speeds[one], row.speeds[other])
