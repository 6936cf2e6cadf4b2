"""Messages inside layers, groups of shards, traffic during compute and counts of schedules, compared with totals."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config.run import PretrainConfig
from megapipe.layout.costs import LayoutCosts
from megapipe.layout.hardware.description import IntraNodeLink
from megapipe.layout.hardware.placement import GroupLinks, Placement
from megapipe.layout.table import lowered_schedule
from megapipe.planner.cost.layer_costs import exchanges_seconds, layer_exchange_seconds, overlapped, shard_groups
from megapipe.planner.cost.run_layout import lay_run
from megapipe.planner.cost.step_time import traffic_counts
from megapipe.schedules import Kind
from megapipe.schedules.actions import KIND, STAGE
from megapipe.spec.attention import attention_path
from megapipe.spec.layers import model_layers
from tests.planner.cost.runs import SELENE, SMALL, config_of, machine

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


CHUNKS = {"1f1b": 1, "gpipe": 1, "interleaved_1f1b": 2, "modular": 2, "zb_h1": 1, "zb_v": 2, "2bw": 1, "pipedream": 1}


def check_counts(config: PretrainConfig, count: int, rel: float | None = None) -> None:
    """Gathers and sums of each stage and micro-batch are those of the lowered schedule."""
    run = lay_run(config, machine())
    counts, rows = traffic_counts(run), np.concatenate(lowered_schedule(run.config, run.stages).sections.body)
    passes = np.array(run.stages.units_per_stage) * count
    for kind, counted in ((Kind.GATHER_WEIGHTS, counts.all_gathers), (Kind.REDUCE_GRADIENTS, counts.all_sums)):
        exact = np.bincount(rows[rows[:, KIND] == kind, STAGE], minlength=len(passes)) / passes
        assert counted == pytest.approx(exact, rel=rel)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(CHUNKS)),
    ranks=st.integers(1, 4),
    count=st.integers(1, 8),
    buffers=st.integers(1, 3),
    gradients=st.integers(1, 3),
    stage=st.integers(2, 3),
    layers=st.integers(0, 8),
)
def test_traffic_of_replicas_is_that_of_the_lowered_schedule(
    name: str, ranks: int, count: int, buffers: int, gradients: int, stage: int, layers: int
) -> None:
    """Action by action, up to three micro-batches a rank: of a schedule that never flushes in its steady step."""
    count = min(3 * ranks, max(count, ranks) if name in ("2bw", "pipedream") else count)
    zero = {"stage": stage, "gradient_buffers": gradients} | ({"weight_buffers": buffers} if stage == 3 else {})
    config = config_of(
        replace(SMALL, num_layers=ranks * CHUNKS[name] + layers),
        parallel={"pipeline": ranks, "data": 2},
        schedule={"name": name},
        batch={"global_size": 2 * count},
        zero=zero,
        optimizer={"clip_norm": None if name == "pipedream" else 1.0},
    )
    check_counts(config, count)


@pytest.mark.parametrize(
    ("name", "ranks", "count"), [("1f1b", 4, 40), ("interleaved_1f1b", 4, 24), ("zb_h1", 3, 31), ("2bw", 4, 200)]
)
def test_traffic_of_many_micro_batches_is_periodic(name: str, ranks: int, count: int) -> None:
    config = config_of(
        replace(SMALL, num_layers=24),
        parallel={"pipeline": ranks, "data": 2},
        schedule={"name": name},
        batch={"global_size": 2 * count},
        zero={"stage": 3},
    )
    check_counts(config, count, rel=0.1)
