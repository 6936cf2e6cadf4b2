"""Covering arrays hold every possible pair and nothing forbidden, compared with a search of all cases."""

import itertools
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from tests.support.covering import covering_array, pairs_of, possible_pairs

AXES = st.lists(st.integers(1, 4), min_size=2, max_size=4).map(
    lambda sizes: {f"axis{i}": [str(value) for value in range(size)] for i, size in enumerate(sizes)}
)


@given(AXES, st.data())
def test_every_possible_pair_is_covered(axes: dict[str, list[str]], data: st.DataObject) -> None:
    places = [(axis, value) for axis, values in axes.items() for value in values]
    forbidden = data.draw(st.lists(st.sets(st.sampled_from(places), min_size=1, max_size=3), max_size=3))

    def allowed(case: Mapping[str, str]) -> bool:
        return not any(rule <= set(case.items()) for rule in forbidden)

    everything = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    wanted = set().union(*(pairs_of(case) for case in everything if allowed(case)))
    cases = covering_array(axes, allowed)
    assert all(allowed(case) and list(case) == list(axes) for case in cases)
    assert set().union(*map(pairs_of, cases)) == wanted == possible_pairs(axes, allowed)
    assert covering_array(axes, allowed) == cases


def test_the_array_is_small() -> None:
    """Thirteen axes of three values: 1,594,323 cases, of which 15 to 20 hold all pairs (Cohen et al., table 1)."""
    axes = {f"axis{i}": ["a", "b", "c"] for i in range(13)}
    assert len(covering_array(axes, lambda case: True)) <= 24
