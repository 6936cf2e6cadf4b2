"""Published and exactly known figures of every schedule, simulated."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.schedules import Kind, Link, Times, build, dumps, loads, lower, order, rank_costs, simulate, validate
from megapipe.schedules.simulation import CostPlace
from tests.schedules.support import words


def simulated(name, ranks, microbatches, steps=1, costs=None, **options):
    schedule = build(name, ranks, microbatches, **options)
    validate(schedule)
    return simulate(schedule, rank_costs(schedule.header, **(costs or {})), steps)


HALVES = {"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0}


@pytest.mark.parametrize(
    ("name", "rate", "late_rate", "stash"),
    [("1f1b", 0.179, 0.284, 8), ("interleaved_1f1b", 0.099, 0.158, 11.5), ("modular", 0.099, 0.127, 32)],
)
def test_rates_of_another_implementations_orders(name, rate, late_rate, stash):
    """p=8, m=32, two chunks, equal halves: figures simulated from torch.distributed.pipelining's own orders."""
    run = simulated(name, 8, 32, costs=HALVES)
    assert round(run.bubble_rate, 3) == rate
    assert max(run.peak_activations) == stash
    assert round(simulated(name, 8, 32, costs={**HALVES, "link": Link(latency=0.25)}).bubble_rate, 3) == late_rate


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 5))
def test_modular_formula(ranks, microbatches, chunks):
    """(p-1)/(m v) of the ideal for m >= p, ((v-1)p + m + p - 1 - v m)/(v m) below."""
    passes = chunks * microbatches
    idle = ranks - 1 if microbatches >= ranks else (chunks - 1) * ranks + microbatches + ranks - 1 - passes
    run = simulated("modular", ranks, microbatches, chunks=chunks)
    assert run.bubble == pytest.approx(idle / passes, abs=1e-12)
    assert run.peak_activations == (microbatches,) * ranks


# Times of the 1.5B, 6.2B, 14.6B and 28.3B models and their rates; the authors' own evaluation script prints them too.
TABLE_9 = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083)),
    (8, 32, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.1242, 0.0837)),
    (8, 64, (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0674, 0.0444)),
    (8, 24, (29.718, 29.444, 19.927, 0.527), (0.2347, 0.1323, 0.0698)),
    (8, 32, (29.802, 29.428, 19.530, 0.577), (0.1898, 0.1045, 0.0559)),
    (8, 64, (29.935, 29.621, 19.388, 0.535), (0.1091, 0.0554, 0.0294)),
    (16, 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672)),
    (16, 64, (11.307, 11.254, 8.101, 0.379), (0.2082, 0.1088, 0.0516)),
    (16, 128, (11.325, 11.308, 8.109, 0.378), (0.1251, 0.0576, 0.0266)),
    (32, 96, (10.419, 10.207, 7.715, 0.408), (0.2646, 0.1421, 0.0641)),
    (32, 128, (10.408, 10.204, 7.703, 0.408), (0.2168, 0.1106, 0.0490)),
    (32, 256, (10.402, 10.248, 7.698, 0.460), (0.1352, 0.0594, 0.0257)),
]


def measured(times):
    forward, backward_input, backward_weight, latency = times
    return {
        "forward": forward, "backward_input": backward_input, "backward_weight": backward_weight,
        "link": Link(latency=latency),
    }  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("ranks", "microbatches", "times", "rates"), TABLE_9)
def test_zero_bubble_table_5(ranks, microbatches, times, rates):
    """Bubble rates of arXiv 2401.10241, Table 5, from the times of its Table 9, to its four decimals."""
    for name, rate in zip(("1f1b", "zb_h1", "zb_h2"), rates, strict=True):
        assert round(simulated(name, ranks, microbatches, costs=measured(times)).bubble_rate, 4) == rate


@pytest.mark.parametrize(
    ("ranks", "microbatches", "times", "rates"),
    [pytest.param(*row, marks=[pytest.mark.exhaustive] if row[1] > 32 else []) for row in TABLE_9],
)
def test_zb_auto_is_not_worse_than_handmade_orders(ranks, microbatches, times, rates):
    for limit, rate in ((ranks, rates[1]), (2 * ranks, rates[2])):
        options = {"memory_limit": limit, "times": Times(*times)}
        auto = simulated("zb_auto", ranks, microbatches, costs=measured(times), **options)
        assert round(auto.bubble_rate, 4) <= rate


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 12), (8, 24)])
def test_zb_v_has_no_bubble(ranks, microbatches):
    """No idle time on any rank and the activations of 2p chunks, that is p whole micro-batches."""
    run = simulated("zb_v", ranks, microbatches, costs=HALVES)
    assert run.bubble == 0.0
    assert run.peak_activations == (ranks,) * ranks


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_two_bp_bubble_rates(ranks):
    """The ratios of arXiv 2405.18047, Table 1, before and after, with equal times."""
    n = ranks
    for name, microbatches, before, after in (
        ("gpipe", 1, (n - 1) / n, 2 * (n - 1) / (2 * n + 1)),
        ("gpipe", n, (n - 1) / (2 * n - 1), 2 * (n - 1) / (2 * (n - 1) + 3 * n)),
        ("1f1b", n, (n - 1) / (2 * n - 1), (n - 1) / (4 * n - 1)),
        ("1f1b", 2 * n, (n - 1) / (3 * n - 1), (n - 1) / (7 * n - 1)),
    ):
        assert simulated(name, n, microbatches, costs=HALVES).bubble_rate == pytest.approx(before, abs=1e-12)
        split = simulated(name, n, microbatches, costs=HALVES, two_bp=True)
        assert split.bubble_rate == pytest.approx(after, abs=1e-12)


@pytest.mark.parametrize(("ranks", "microbatches", "steps"), [(4, 4, 6), (4, 8, 3), (2, 2, 5), (4, 5, 6), (1, 2, 3)])
def test_2bw_never_idles_after_its_warm_up(ranks, microbatches, steps):
    """(T m + p - 1)(tf + tb) for T batches, global norm and finite check included; stash p - r."""
    run = simulated("2bw", ranks, microbatches, steps)
    assert run.finish == (steps * microbatches + ranks - 1) * 3
    assert run.peak_activations == tuple(range(ranks, 0, -1))


def test_2bw_slack_hides_reductions():
    """(m - p + 1) forward-backward pairs pass between a batch's last gradient and the first forward that needs it."""
    for microbatches in (4, 6):
        slack = (microbatches - 3) * 3.0
        free, hidden, late = (
            simulated("2bw", 4, microbatches, 20, costs={"reduce_scalars": wait}).finish - wait  # the last one shows
            for wait in (0.0, slack, slack + 1.0)
        )
        assert free == hidden < late


def test_pipedream_never_idles_after_its_warm_up():
    assert simulated("pipedream", 4, 8, 5).finish == (5 * 8 + 3) * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks"), [(64, 512, 4), pytest.param(512, 2048, 2, marks=pytest.mark.exhaustive)]
)
def test_largest_schedules_build_and_validate(ranks, microbatches, chunks):
    schedule = build("interleaved_1f1b", ranks, microbatches, chunks=chunks)
    assert validate(schedule).canonical_order
    forwards = sum(int((rows[:, 0] == Kind.FORWARD).sum()) for rows in schedule.sections.body)
    assert forwards == ranks * microbatches * chunks


def test_eager_2bw_idles_except_for_one_backward():
    """(p-1) B a step, by the closed form in docs/schedules.md."""
    for ranks, microbatches, backward, steps in ((4, 4, 2.0, 20), (3, 5, 1.0, 7), (2, 6, 3.0, 1)):
        schedule = build("2bw", ranks, microbatches, update="eager")
        run = simulate(schedule, rank_costs(schedule.header, backward=backward), steps)
        step = microbatches * (1 + backward) + (ranks - 1) * backward
        assert run.finish == steps * step + (ranks - 1)


def peak_until_weight_half(name, ranks, microbatches, **options):
    """Return the peak micro-batches of activations on any rank."""
    compute = order(name, ranks, microbatches, **options)
    change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}
    counts = [np.cumsum([change.get(each.kind, 0) for each in compute.actions("body", rank)]) for rank in range(ranks)]
    return max(map(max, counts)) * ranks / len(compute.header.stages)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(2, 4), st.data())
def test_grouped_interleaving(ranks, chunks, groups, data):
    """arXiv 2503.01328, Table 1, with one time for all: g (v - 1) + p chunks, and (p - g)(v - 1) more slots idle."""
    size = data.draw(st.integers(-(-ranks // 2), ranks))
    options = {"chunks": chunks, "group_size": size}
    run = simulated("gis", ranks, groups * size, costs=HALVES, **options)
    idle = 2 * (ranks - 1) + (ranks - size) * (chunks - 1)
    assert run.bubble == pytest.approx(idle / (3 * groups * size * chunks))
    peak = peak_until_weight_half("gis", ranks, groups * size, **options)
    assert peak * chunks == pytest.approx(size * (chunks - 1) + ranks)


@pytest.mark.parametrize(
    ("name", "options", "bubble", "peak"),
    [
        ("interleaved_1f1b", {}, 0.1094, 11.5),
        ("gis", {}, 0.0729, 8),
        ("gis_h", {}, 0.0938, 6),
        ("gis_h", {"chunks": 4}, 0.0677, 5),
    ],
)
def test_grouped_interleaving_against_interleaved_1f1b(name, options, bubble, peak):
    assert round(simulated(name, 8, 32, costs=HALVES, **options).bubble, 4) == bubble
    assert peak_until_weight_half(name, 8, 32, **options) == peak


@pytest.mark.parametrize(
    "ranks", [*range(1, 9), *(pytest.param(ranks, marks=pytest.mark.exhaustive) for ranks in range(9, 17))]
)
def test_v_half_holds_half_and_v_min_a_third(ranks):
    """The peaks of arXiv 2405.15362 for any number of ranks, counted until the weight half."""
    for name, most in (("v_half", (ranks + 2) // 2), ("v_min", (ranks + 4) // 3)):
        for microbatches in (1, ranks, 2 * ranks, 4 * ranks):
            peak = peak_until_weight_half(name, ranks, microbatches)
            assert peak == most if microbatches >= 2 * ranks else peak <= most


@pytest.mark.parametrize(("ranks", "half", "third"), [(8, 0.099, 0.124), (16, 0.105, 0.134)])
def test_v_half_and_v_min_bubble_rates(ranks, half, third):
    assert simulated("v_half", ranks, 4 * ranks, costs=HALVES).bubble_rate <= half
    assert simulated("v_min", ranks, 4 * ranks, costs=HALVES).bubble_rate <= third


@pytest.mark.parametrize(
    ("ranks", "limit", "rate"),
    [(8, 4, 0.1233), pytest.param(8, 5, 0.09, marks=pytest.mark.exhaustive), (8, 8, 0), (5, 3, None), (1, 1, None)],
)
def test_v_auto_is_not_worse_than_other_v_schedules(ranks, limit, rate):
    bubble_rate = simulated("v_auto", ranks, 4 * ranks, costs=HALVES, memory_limit=limit).bubble_rate
    assert peak_until_weight_half("v_auto", ranks, 4 * ranks, memory_limit=limit) <= limit
    assert rate is None or round(bubble_rate, 4) == rate
    for name in ("v_min", "v_half", "zb_v"):
        if peak_until_weight_half(name, ranks, 4 * ranks) <= limit:
            assert bubble_rate <= simulated(name, ranks, 4 * ranks, costs=HALVES).bubble_rate + 1e-9


@given(st.integers(1, 8), st.integers(0, 9))
def test_dualpipe_v_idles_for_all_or_half_its_pairs(ranks, more):
    """(p - 1) t where a pair sends at its end (66 half chunks for 4 ranks and 10 micro-batches, 6 of them idle, in
    DeepSeek's drawing); (p - 1) t / 2 where a forward's output leaves at once."""
    microbatches = 2 * ranks + more
    paired = simulated("dualpipe_v", ranks, microbatches, costs=HALVES)
    apart = lower(loads(dumps(order("dualpipe_v", ranks, microbatches)).replace("+", " ")))
    validate(apart)
    assert paired.finish - 3 * microbatches == pytest.approx(ranks - 1)
    assert simulate(apart, rank_costs(apart.header, **HALVES)).finish - 3 * microbatches == pytest.approx(
        (ranks - 1) / 2
    )
    assert max(paired.peak_activations) == pytest.approx(ranks + 0.5)


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 5))
def test_seq1f1b_has_the_figures_of_its_paper(ranks, microbatches, slices):
    """Bubble (p - 1) / (s m) of the ideal time and (p + s - 1) / s micro-batches on rank 0 (golden: p = m = 8, s = 4
    leaves .219 and 2.75), where there are units enough to fill the pipeline."""
    schedule = build("seq1f1b", ranks, microbatches, slices=slices)
    report = validate(schedule)
    simulation = simulate(schedule, rank_costs(schedule.header, forward=1.0, backward=2.0))
    if microbatches * slices >= ranks + slices - 1:
        assert simulation.bubble == pytest.approx((ranks - 1) / (slices * microbatches))
        assert report.peak_activations[0] == pytest.approx((ranks + slices - 1) / slices)
    assert loads(dumps(schedule)) == schedule


@given(st.integers(1, 6), st.integers(1, 4), st.integers(2, 4), st.integers(1, 5))
def test_interleaved_slices_have_the_figures_of_the_paper(ranks, rounds, chunks, slices):
    """Bubble (p - 1) / (v s m), and the warm-up and one forward on rank 0, in groups of g slices:
    ((v - 1) g + 2 (p - 1) + s) / (v s) micro-batches. s divides g; the paper's groups have p slices."""
    group = -(-ranks // slices) * slices
    microbatches = rounds * group // slices
    schedule = build("seq1f1b", ranks, microbatches, chunks=chunks, slices=slices)
    report = validate(schedule)
    simulation = simulate(schedule, rank_costs(schedule.header, forward=1.0, backward=2.0))
    assert simulation.bubble == pytest.approx((ranks - 1) / (chunks * slices * microbatches))
    in_flight = min(2 * (ranks - 1), 2 * group) + (chunks - 1) * group + slices
    assert report.peak_activations[0] == pytest.approx(min(microbatches, in_flight / (chunks * slices)))
    assert loads(dumps(schedule)) == schedule


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 3))
def test_one_slice_is_1f1b(ranks, microbatches, chunks):
    other = {"chunks": chunks, "group_size": ranks} if chunks > 1 else {}
    whole = build("interleaved_1f1b" if chunks > 1 else "1f1b", ranks, microbatches, **other)
    sliced = build("seq1f1b", ranks, microbatches, slices=1, chunks=chunks)
    assert all(words(sliced, rank) == words(whole, rank) for rank in range(ranks))


def test_each_slice_may_take_its_own_time():
    """Attention makes later slices longer; the sum of both is the time of a micro-batch on one rank."""
    schedule = build("seq1f1b", 1, 1, slices=2)
    costs = rank_costs(schedule.header).with_times({CostPlace(Kind.FORWARD, 0, slice=1): 5.0})
    assert simulate(schedule, costs).finish == 0.5 + 5.0 + 2 * 1.0
