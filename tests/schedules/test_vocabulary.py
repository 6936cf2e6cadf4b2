"""Orders in which all ranks share output layer and input embedding (arXiv 2411.05288)."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedules import ScheduleError, build, dumps, loads, rank_costs, simulate, validate, vocabulary
from megapipe.schedules.actions import KIND, MICROBATCH, STAGE, Kind
from megapipe.schedules.schedule import Schedule
from tests.schedules.support import NEVER_FLUSHING, TRAINED, layouts

REFUSED = (*NEVER_FLUSHING, "seq1f1b", "dualpipe_v")
BARRIERS = {1: 2, 2: 1}
"""By variant."""
NAMES = [name for name in TRAINED if name not in REFUSED]


def passes(schedule: Schedule, rank: int) -> list[tuple[bool, int, int]]:
    """Each pass of a rank's shards that has collectives: whether it is one of the embedding, kind and micro-batch."""
    rows, (output, words) = schedule.sections.body[rank], schedule.header.vocabulary[rank :: schedule.header.num_ranks]
    kinds = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT
    own = rows[np.isin(rows[:, KIND], kinds) & np.isin(rows[:, STAGE], (output, words))]
    return [
        (stage == words, kind, microbatch) for stage, kind, microbatch in own[:, [STAGE, KIND, MICROBATCH]].tolist()
    ]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=3, deadline=None)
@given(data=st.data(), mode=st.sampled_from(["train", "forward"]), variant=st.sampled_from([1, 2]))
def test_orders_with_shards_are_valid_and_equal_everywhere(
    name: str, data: st.DataObject, mode: Any, variant: int
) -> None:
    given: dict[str, Any] = data.draw(layouts(name))
    ranks = given["num_ranks"]
    arguments = {
        key: value for key, value in given.items() if key not in ("states", "offload", "recompute", "units_per_stage")
    }
    units = [*given["units_per_stage"], *(1 for _ in range(2 * ranks))]
    schedule = build(name, **arguments, units_per_stage=units, vocabulary=variant, mode=mode)
    report = validate(schedule)
    assert loads(dumps(schedule)) == schedule
    first, *others = (passes(schedule, rank) for rank in range(ranks))
    assert all(each == first for each in others)
    count = arguments["num_microbatches"]
    assert sorted(first) == sorted(
        (*which, number) for which in {each[:2] for each in first} for number in range(count)
    )
    assert len({each[:2] for each in first}) == (4 if mode == "train" else 2)
    if mode == "train":
        whole = validate(build(name, **arguments, units_per_stage=given["units_per_stage"]))
        more = np.subtract(report.peak_activations, whole.peak_activations)
        assert more.max() <= BARRIERS[variant] + 1e-9


@pytest.mark.parametrize("variant", [1, 2])
def test_1f1b_keeps_micro_batches_of_ranks_and_barriers(variant: int) -> None:
    """Algorithms 1 and 2 of the paper have two barriers and one between forward and backward (section 5.1)."""
    for ranks in (2, 4, 8):
        schedule = build("1f1b", ranks, 3 * ranks, vocabulary=variant)
        more = BARRIERS[variant]
        assert validate(schedule).peak_activations == tuple(ranks + more - rank for rank in range(ranks))


@pytest.mark.parametrize("variant", [1, 2])
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_h1"])
def test_passes_fill_idle_time(name: str, variant: int) -> None:
    """Every rank works for a pass more a micro-batch and direction; the bubble stays that of whole layers."""
    plain, shared = build(name, 4, 32), build(name, 4, 32, vocabulary=variant)
    before, after = (simulate(each, rank_costs(each.header)) for each in (plain, shared))
    assert after.ideal == before.ideal + 32 * 2 * 0.25
    assert after.makespan - after.ideal <= before.makespan - before.ideal + 0.75


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6, deadline=None)
@given(ranks=st.integers(2, 8), data=st.data(), variant=st.sampled_from([1, 2]))
def test_forwards_that_come_earlier_never_add_idle_time(
    name: str, ranks: int, data: st.DataObject, variant: int
) -> None:
    """Compared with the order in which each backward comes after the same number of further forwards."""
    count = data.draw(st.integers(1, 4 * ranks))
    orders = vocabulary._orders
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "_orders", lambda *given: orders(*given)[-1:])
        before = build(name, ranks, count, vocabulary=variant)
    after, plain = (build(name, ranks, count, vocabulary=number) for number in (variant, 0))
    assert after == build(name, ranks, count, vocabulary=variant)
    old, new = (simulate(each, rank_costs(each.header)) for each in (before, after))
    assert new.makespan <= old.makespan + 1e-9
    more = np.subtract(validate(after).peak_activations, validate(plain).peak_activations)
    assert more.max() <= BARRIERS[variant] + 1e-9


@pytest.mark.parametrize("variant", [1, 2])
def test_orders_in_a_v_hold_what_hides_the_barriers(variant: int) -> None:
    """On eight ranks, zb_v and v_min hold one more micro-batch; v_half, which has gaps between its blocks, holds no
    more. The additional micro-batch costs v_min a forward and both halves of a backward at the start of a step."""
    for name, peak, idle in (("zb_v", 8 + 1, 0.0), ("v_half", 5, 10.5), ("v_min", 3 + 1, 13.5 + 3.0)):
        schedule = build(name, 8, 32, vocabulary=variant)
        result = simulate(schedule, rank_costs(schedule.header))
        assert (max(validate(schedule).peak_activations), result.makespan - result.ideal) == (peak, idle)


@pytest.mark.parametrize("name", [*REFUSED, "chimera"])
def test_other_orders_are_refused(name: str) -> None:
    ranks = 2
    with pytest.raises(ScheduleError, match="its output layer cannot be sharded"):
        build(name, ranks, 2 * ranks, vocabulary=2)
