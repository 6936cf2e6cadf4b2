"""Keep, move or recompute: compared with every combination, and with the simulator for whether copies hide."""

from itertools import product
from math import ceil

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from megapipe.layout.offload import BlockCost, DoesNotFit, treat
from megapipe.schedules import GENERATORS, Offload, build, rank_costs, simulate

BLOCKS = st.lists(
    st.builds(
        BlockCost,
        forward=st.integers(2, 6).map(float),
        backward=st.integers(1, 12).map(float),
        kept=st.integers(4, 12),
        input=st.integers(0, 3),
    ),
    min_size=1,
    max_size=6,
)


def copies_hide(blocks, moved, bandwidth, prefetch):
    """The rule as docs/offload.md words it, window by window."""
    for place, block in enumerate(moved):
        seconds = blocks[block].kept / bandwidth
        later = range(block + 1, len(blocks))
        between = [blocks[each].forward for each in later] + [blocks[each].backward for each in reversed(later)]
        windows = [sum(between[: max(0, len(between) - prefetch)])]
        if block == moved[-1]:
            windows.append(sum(blocks[each].forward for each in later) + blocks[0].forward)
        else:
            later = range(block + 1, moved[place + 1] + 1)
            windows.append(sum(blocks[each].forward for each in later))
        windows.append(sum(blocks[each].backward for each in later[:prefetch]))
        if seconds > min(windows):
            return False
    return True


def best_of_all(blocks, microbatches, memory, bandwidth, prefetch):
    """(recomputed, moved bytes) of the best combination, None where none fits; and the least bytes of any."""
    most = max(block.kept for block in blocks)
    combinations, least = [], []
    for names in product(("keep", "move", "recompute"), repeat=len(blocks)):
        moved = [index for index, name in enumerate(names) if name == "move"]
        if not copies_hide(blocks, moved, bandwidth, prefetch):
            continue
        needed = ceil(microbatches * sum(
            {"keep": block.kept, "move": 0, "recompute": block.input}[name]
            for block, name in zip(blocks, names, strict=True)
        ))  # fmt: skip
        needed += most * ("recompute" in names) + most * min(prefetch + 2, ceil(microbatches * len(moved)))
        least.append(needed)
        again = sum(block.forward for block, name in zip(blocks, names, strict=True) if name == "recompute")
        if needed <= memory:
            combinations.append((again, sum(blocks[index].kept for index in moved)))
    return min(combinations, default=None), min(least)


@settings(max_examples=300, deadline=None)
@given(BLOCKS, st.integers(1, 4), st.integers(3, 10), st.integers(2, 12), st.integers(1, 3))
def test_it_is_the_best_of_all_combinations(blocks, microbatches, tenths, bandwidth, prefetch):
    memory = microbatches * sum(block.kept for block in blocks) * tenths / 10
    best, least = best_of_all(blocks, microbatches, memory, bandwidth, prefetch)
    arguments = {"microbatches": microbatches, "memory": memory, "bandwidth": bandwidth, "prefetch": prefetch}
    if best is None:
        event("does not fit")
        with pytest.raises(DoesNotFit) as error:
            treat(blocks, **arguments)
        assert error.value.least <= least
        return
    plan = treat(blocks, **arguments)
    event("+".join(sorted(set(plan.of_blocks))))
    assert (plan.recomputed, plan.moved) == best
    assert plan.bytes <= memory
    moved = [index for index, name in enumerate(plan.of_blocks) if name == "move"]
    assert copies_hide(blocks, moved, bandwidth, prefetch)


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "modular", "zb_h1", "zb_v", "2bw"]), st.integers(4, 8),
    st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.sampled_from([0.5, 1.0, 1.5]),
    st.sampled_from([0.4, 0.6, 0.8]),
)  # fmt: skip
def test_copies_meant_to_hide_add_no_simulated_time(name, units, ranks, rounds, prefetch, copy, share):
    """Equal blocks of a forward of 1 and a backward of 2, in halves where it is split; a copy takes `copy`."""
    generator = GENERATORS[name]
    in_flight = ranks
    blocks = [BlockCost(1.0, 1.0 if generator.splits else 2.0, kept=100, input=10)] * units
    memory = share * in_flight * units * 100
    try:
        plan = treat(blocks, microbatches=in_flight, memory=memory, bandwidth=100 / copy, prefetch=prefetch)
    except DoesNotFit:
        return
    moves = tuple(unit for unit, treatment in enumerate(plan.of_blocks) if treatment == "move")
    again = [range(unit, unit + 1) for unit, treatment in enumerate(plan.of_blocks) if treatment == "recompute"]
    event(f"{name}: {'some' if moves else 'none'} move")
    stages = ranks * generator.chunks
    schedule = build(
        name, ranks, rounds * ranks, units_per_stage=[units] * stages, recompute=[again] * stages,
        offload=Offload((moves,) * stages, prefetch),
    )  # fmt: skip
    a_rank = float(units * generator.chunks)
    finish = [
        simulate(
            schedule, rank_costs(schedule.header, forward=a_rank, offload=a_rank * each), 1 if schedule.flushes else 3
        ).finish
        for each in (0.0, copy)
    ]
    assert finish[1] == pytest.approx(finish[0], abs=1e-9)


def test_what_cannot_fit_says_what_it_needs():
    blocks = [BlockCost(1.0, 2.0, kept=100, input=10)] * 3
    with pytest.raises(
        DoesNotFit,
        match=r"need at least 130 bytes with any offloading and recomputation, but offload.memory allows 99",
    ):
        treat(blocks, microbatches=1, memory=99, bandwidth=1e-9)
