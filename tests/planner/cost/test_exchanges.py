"""Messages inside layers by phase, groups of shards, and traffic during compute, compared with totals and by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.layout.costs import LayoutCosts
from megapipe.layout.hardware.description import IntraNodeLink
from megapipe.layout.hardware.placement import GroupLinks, Placement
from megapipe.planner.cost.layer_costs import exchanges_seconds, layer_exchange_seconds, overlapped, shard_groups
from megapipe.spec.attention import attention_path
from megapipe.spec.layers import model_layers
from tests.planner.cost.runs import SELENE, SMALL, config_of

INSIDE = IntraNodeLink(1e-6, 100.0, 50.0)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("group", ["tensor", "context"])
def test_phases_add_up_to_a_micro_batch(sequence: bool, group: str) -> None:
    config = config_of(parallel={"tensor": 4, "context": 2, "sequence": sequence})
    layers = model_layers(SMALL)
    costs = LayoutCosts(config, layers, 1, attention_path(SMALL, "bf16", "cuda", 1024), 64)
    placement = Placement(SELENE, {"tensor": 4, "context": 2})
    for layer in (layers[0], layers[1], layers[-1]):
        seconds = layer_exchange_seconds(costs, placement, layer, group)
        once, twice, halves = (
            exchanges_seconds(placement, costs.within_layer(layer, **asked).get(group, []), group)  # type: ignore[arg-type]
            for asked in ({"forwards": 1, "halves": False}, {"forwards": 2, "halves": False},
                          {"forwards": 1, "halves": True})
        )  # fmt: skip
        assert seconds.forward + seconds.backward_input == pytest.approx(once)
        assert min(seconds) >= 0
        if layer.kind == "block":
            assert seconds.forward == pytest.approx(twice - once)
            assert seconds.backward_weight == pytest.approx(halves - once)
            assert seconds.forward > 0


@pytest.mark.parametrize(
    ("members", "shards", "sharing", "holding"),
    [
        ((8, 8), 16, (8, 8), (1,)),
        ((8, 8), 8, (8,), (1, 1)),
        ((8, 8), 4, (4,), (2, 2)),
        ((8,), 4, (4,), (2,)),
        ((2, 2, 2, 2), 4, (2, 2), (1, 1)),
    ],
)
def test_neighbours_share_and_strangers_hold_the_same(
    members: tuple[int, ...], shards: int, sharing: tuple[int, ...], holding: tuple[int, ...]
) -> None:
    """A node's adapters are shared by all its members: a group with fewer of them on a node has as much less."""
    crossing = 80.0 if len(members) > 1 else 0.0
    together, apart = shard_groups(GroupLinks(members, INSIDE, crossing, 1e-5), shards)
    assert (together.members, apart.members) == (sharing, holding)
    for group in (together, apart):
        expected = crossing * max(group.members) / max(members) if group.crosses else 0.0
        assert group.crossing == pytest.approx(expected)


@settings(max_examples=40)
@given(compute=st.floats(0, 1e3), communication=st.floats(0, 1e3), slow_down=st.floats(1, 2))
def test_overlap_slows_both_until_the_shorter_ends(compute: float, communication: float, slow_down: float) -> None:
    shorter, longer = sorted((compute, communication))
    both = slow_down * shorter + (longer - shorter)
    assert overlapped(compute, communication, slow_down) == pytest.approx(both, rel=1e-12)
