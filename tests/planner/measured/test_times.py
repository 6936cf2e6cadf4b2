"""Times of layers from rows: exact where measured, interpolated between, the roofline with a note elsewhere."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config.parallel import ScheduleConfig
from megapipe.layout.hardware.description import (
    Contention,
    Hardware,
    LayerRow,
    MeasuredLayer,
    Measurements,
    written,
)
from megapipe.layout.hardware.placement import Placement, ring_time
from megapipe.layout.units import Unit
from megapipe.planner.command.planning import provenance
from megapipe.planner.cost.layer_costs import MEASURED_WAITS
from megapipe.planner.cost.layer_times import RooflineTimes
from megapipe.planner.cost.model import estimate, explain_stages, predict
from megapipe.planner.measured import MeasuredTimes, at_ease, between, is_measured, shares_a_machine
from megapipe.schedules import Kind
from megapipe.spec.layers import model_layers
from tests.planner.command.plan import json_of
from tests.planner.measured.machines import DEVICE, MODEL, machine, run

EMBEDDING, BLOCK, *_, HEAD = model_layers(MODEL)
AT_EASE = Contention(1, 1.0), Contention(4, 1.0)


def measurements(hardware: Hardware) -> Measurements:
    assert hardware.measured is not None
    return hardware.measured


HALVES = {"schedule": {"name": "zb_h1"}, "parallel": {"pipeline": 2}}
FULL = {"recompute": {"method": "full"}}
ALL_TO_ALL = {"parallel": {"context_attention": "all_to_all"}}


@pytest.mark.parametrize(
    ("groups", "layer", "micro_size", "forward", "backward", "recompute"),
    [
        ({}, BLOCK, 4, 5e-3, [10e-3], 0.0),
        (HALVES, BLOCK, 4, 5e-3, [7.5e-3, 5e-3], 0.0),
        (FULL, BLOCK, 4, 5e-3, [10e-3], 4.5e-3),
        (FULL, HEAD, 4, 10e-3, [20e-3], 0.0),
        ({"parallel": {"tensor": 2}}, BLOCK, 2, 1.5e-3, [3e-3], 0.0),
        (ALL_TO_ALL, BLOCK, 4, 5e-3, [10e-3], 0.0),
    ],
    ids=["whole", "halves", "block runs again", "head runs once", "between sizes", "no tokens sharded"],
)
def test_a_measured_layer_is_what_its_row_says(groups, layer, micro_size, forward, backward, recompute) -> None:
    """Rows are proportional to 1 + micro_size, so every size between follows. Halves of a backward that run apart are
    slower than the whole, whose two parts are not measured."""
    times = MeasuredTimes(machine(), contended=False).of(run(batch={"micro_size": micro_size}, **groups), layer)
    halves = [times.backward_input, times.backward_weight]
    assert times.forward == pytest.approx(forward)
    assert (halves if len(backward) > 1 else [sum(halves)]) == pytest.approx(backward)
    assert times.recompute == pytest.approx(recompute)
    assert "measured 2026-01-31 on made up: tensor" in times.source


def test_busy_ranks_slow_layers_down_as_measured() -> None:
    """Three busy ranks are between two and four."""
    config = run(parallel={"tensor": 2})
    assert MeasuredTimes(machine()).of(config, BLOCK).forward == pytest.approx(1.1 * 1.5e-3)
    slowdowns = [measurements(machine()).slowdown(each) for each in (1, 2, 3, 4, 8)]
    assert slowdowns == pytest.approx([1.0, 1.1, 1.7, 2.3, 4.6])


@given(
    points=st.dictionaries(st.integers(1, 64), st.floats(1e-6, 1.0), min_size=1, max_size=5), at=st.floats(0.25, 128.0)
)
def test_times_between_sizes_stay_positive_and_meet_every_point(points: dict[int, float], at: float) -> None:
    ordered = sorted(points.items())
    assert between(ordered, at) > 0.0
    assert [between(ordered, place) for place, _ in ordered] == pytest.approx([value for _, value in ordered])


def test_updates_go_by_the_elements_that_a_rank_owns() -> None:
    whole = MeasuredTimes(machine(), contended=False)
    unit, sharded = Unit(tuple(BLOCK.parameters.values())), run(parallel={"data": 2}, zero={"stage": 1})
    elements, seconds = sum(spec.num_elements for spec in unit.specs), whole.update(run(), BLOCK, unit)
    assert seconds == pytest.approx(2e-9 * elements, rel=1e-3)
    assert whole.update(sharded, BLOCK, unit) == pytest.approx(seconds / 2, rel=0.01)


@pytest.mark.parametrize(("schedule", "pipeline", "ranks"), [("1f1b", 1, 1), ("1f1b", 2, 2), ("zb_v", 2, 1)])
def test_ranks_update_their_tied_weight_once(schedule: str, pipeline: int, ranks: int) -> None:
    """zb_v has the embedding and the head on one rank, in two stages."""
    config = run(parallel={"pipeline": pipeline}, schedule={"name": schedule})
    (tied,) = {spec.name for spec in EMBEDDING.parameters.values()} & {spec.name for spec in HEAD.parameters.values()}
    sizes = {spec.name: spec.num_elements for layer in model_layers(MODEL) for spec in layer.parameters.values()}
    seconds = 2e-9 * (sum(sizes.values()) + (ranks - 1) * sizes[tied])
    stages = explain_stages(config, machine(contention=AT_EASE))
    assert sum(stage["update"] for stage in stages) == pytest.approx(seconds, rel=1e-3)
    simulation = predict(config, machine(contention=AT_EASE)).simulation
    updates = simulation.table.rows_with(Kind.UPDATE)
    assert simulation.durations[updates].sum() == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (run(recompute={"method": "selective"}), "recomputed_parts attention mlp norms instead of none"),
        (run(parallel={"tensor": 4}), "tensor 4 with context 1 was not measured"),
        (run(parallel={"tensor": 4}, recompute={"method": "full"}), "tensor 4 with context 1 was not measured"),
        (run(parallel={"tensor": 2, "sequence": True}), "sequence_parallel True instead of False"),
        (run(parallel={"context": 2}), "tensor 1 with context 2 was not measured"),
    ],
)
@pytest.mark.parametrize("layer", [EMBEDDING, BLOCK, HEAD])
def test_other_layouts_of_a_measured_layer_are_in_proportion(config, why, layer) -> None:  # type: ignore[no-untyped-def]
    """On a machine whose every layer takes three times its roofline forward, and five times backward."""
    times, exact = MeasuredTimes(in_proportion(3.0, 5.0), contended=False), RooflineTimes(DEVICE).of(config, layer)
    measured = times.of(config, layer)
    # A layer that one rank has alone, or a head without recomputed logits, may have been measured all the same.
    assert why in measured.source or "measured 2026" in measured.source
    assert measured.forward == pytest.approx(3 * exact.forward)
    whole = measured.backward_input + measured.backward_weight
    assert whole == pytest.approx(5 * (exact.backward_input + exact.backward_weight))
    assert measured.recompute == pytest.approx(3 * exact.recompute)
    if layer is BLOCK:
        assert why in measured.source
        assert "scaled by times measured" in measured.source


def in_proportion(forward: float, backward: float) -> Hardware:
    """A machine whose layers, measured on one rank and two, are slower than their roofline by the given factors."""
    rows = []
    for layer, tensor, micro_size in product((EMBEDDING, BLOCK, HEAD), (1, 2), (1, 2)):
        config = run(parallel={"tensor": tensor}, batch={"micro_size": micro_size}, recompute={"method": "full"})
        each = RooflineTimes(DEVICE).of(config, layer)
        halves = backward * each.backward_input, backward * each.backward_weight
        seconds = forward * each.forward, sum(halves), *halves, forward * each.recompute
        rows.append(MeasuredLayer(layer.kind, tensor, 1, micro_size, *seconds))
    return machine(layers=tuple(rows))


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ({"model": {"hidden_size": 128}}, "measured for another shape (hidden_size 128 instead of 64"),
        ({"data": {"sequence_length": 32}}, "sequence_length 32 instead of 64"),
    ],
)
def test_another_shape_is_the_rooflines_and_says_so(groups: dict[str, dict[str, int]], why: str) -> None:
    """The file's device is a quarter of a busy machine: a rank by itself is faster than that."""
    config = run(**groups)
    layer = model_layers(config.model)[1]
    measured = MeasuredTimes(machine(), contended=False).of(config, layer)
    assert why in measured.source
    assert measured.forward == pytest.approx(RooflineTimes(DEVICE).of(config, layer).forward / 2.3)


def test_the_cost_model_uses_the_machines_measurements() -> None:
    """One rank: its layers, its update and what the engine takes around 2 x 8 actions, and nothing else."""
    config, times = run(), MeasuredTimes(machine())
    layers = [times.of(config, layer) for layer in model_layers(MODEL)]
    work = 8 * sum(each.forward + each.backward_input + each.backward_weight for each in layers)
    work += sum(stage["update"] for stage in explain_stages(config, machine()))
    assert estimate(config, machine()).step_seconds == pytest.approx(work)
    assert predict(config, machine()).estimate.step_seconds == pytest.approx(work + 16 * 5e-5)


def test_two_replicas_slow_each_other_down_as_measured() -> None:
    """On machines that differ in contention alone; sums that overlap compute are the same."""
    config = run(parallel={"data": 2})
    free = predict(config, machine(contention=AT_EASE)).estimate.step_seconds
    slow = predict(config, machine(contention=(Contention(1, 1.0), Contention(2, 2.0)))).estimate.step_seconds
    assert 1.8 * free < slow < 2.2 * free


def test_a_measured_sum_takes_its_measured_time() -> None:
    """A group of the measured size: latency and bytes over bandwidth, with no ring's formula."""
    placement = Placement(machine(), {"tensor": 2, "data": 2})
    assert placement.slowest("all_reduce", 1e6, "tensor").seconds == pytest.approx(2e-3)
    assert placement.slowest("all_reduce", 1e6, "tensor", "data").seconds == pytest.approx(6e-3)
    ring = ring_time("all_gather", 1e6, placement.groups("tensor")[0])
    assert placement.slowest("all_gather", 1e6, "tensor") == ring
    assert Placement(machine(), {"pipeline": 2}).send(4e6, 0).seconds == pytest.approx(1.01e-3)


WAITS = tuple(
    LayerRow(kind, 2, 1, micro, *(seconds * micro for seconds in (1e-3, 2e-3, 1.5e-3, 0.25e-3)))
    for kind in ("embedding", "block", "head")
    for micro in (1, 4)
)  # type: ignore[arg-type]


@pytest.mark.parametrize(("tensor", "context"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_that_share_a_layer_wait_as_measured(tensor: int, context: int) -> None:
    """2 samples per micro-batch are on the line between 1 and 4: a layer waits 2 ms forward and 4 ms backward, tensor
    or context ranks as well as both together. The embedding's tokens are shared without a message; its ranks wait all
    the same."""
    config = run(parallel={"tensor": tensor, "context": context})
    layers = [row for row in measurements(machine()).layers if row.tensor == 2]
    rows, waits = (tuple(replace(row, tensor=tensor, context=context) for row in each) for each in (layers, WAITS))
    alone, waiting = (machine(layers=rows, waits=each, contention=AT_EASE) for each in ((), waits))
    for result in (estimate(config, waiting), predict(config, waiting).estimate):
        seconds = {name: result.seconds_of(name) for name in ("tensor", "context")}
        assert {name for name, each in seconds.items() if each} == {
            name for name, size in (("tensor", tensor), ("context", context)) if size > 1
        }
        assert sum(seconds.values()) == pytest.approx(8 * (MODEL.num_layers + 2) * 6e-3)
        assert {term.source for term in result.terms if term.name in seconds} == {MEASURED_WAITS}
    plain = estimate(config, alone)
    assert plain.seconds_of("tensor") + plain.seconds_of("context") != pytest.approx(sum(seconds.values()))
    apart = replace(config, parallel=replace(config.parallel, pipeline=2), schedule=ScheduleConfig(name="zb_h1"))
    assert MeasuredTimes(waiting, contended=False).of(apart, BLOCK).waits == pytest.approx((2e-3, 3e-3, 0.5e-3))


def test_measured_waits_do_not_apply_across_nodes() -> None:
    config = run(parallel={"tensor": 2, "data": 2})
    hardware = machine(waits=WAITS)
    (group,) = hardware.groups
    spread = replace(hardware, groups=(replace(group, devices_per_node=1, num_nodes=4),))
    without = replace(spread, measured=replace(measurements(spread), waits=()))
    assert estimate(config, spread).seconds_of("tensor") == estimate(config, without).seconds_of("tensor")
    on_one = replace(hardware, measured=replace(measurements(hardware), waits=()))
    assert estimate(config, hardware).seconds_of("tensor") != estimate(config, on_one).seconds_of("tensor")


def test_contention_of_uncontended_collectives_gives_measured_times() -> None:
    eased = at_ease(machine())
    for before, after in zip(machine().groups[0].inside.collectives, eased.groups[0].inside.collectives, strict=True):
        factor = 1.0 if before.operation == "send" else measurements(machine()).slowdown(before.ranks)
        assert factor * after.latency == pytest.approx(before.latency)
        assert after.bandwidth == pytest.approx(factor * before.bandwidth)


def test_only_nodes_of_the_measured_kind_use_its_times(tmp_path: Path) -> None:
    """Eight ranks on two nodes: four on each slow each other down, whatever the other node does."""
    here = machine().groups[0]
    two = replace(machine(), groups=(replace(here, num_nodes=2),))
    config = run(parallel={"data": 8})
    source = {term.name: term.source for term in estimate(config, two).terms}["compute"]
    assert "4 ranks of a node computing" in source
    assert not shares_a_machine(Placement(two, {"data": 8}))
    assert predict(config, two).estimate.step_seconds == pytest.approx(estimate(config, two).step_seconds, rel=0.2)
    file = tmp_path / "two.yaml"
    file.write_text(written(two))
    sizes = ("vocabulary_size", "num_layers", "hidden_size", "num_heads", "max_positions")
    flags = [f"--hardware={file}", "--devices=8", "--batch.global_size=16", "--data.sequence_length=64"]
    searched = json_of("search", *flags, *(f"--model.{name}={getattr(MODEL, name)}" for name in sizes))
    source = {term["name"]: term["source"] for term in searched["terms"]}["compute"]
    assert "measured 2026-01-31 on made up: tensor" in source
    other = replace(machine(), groups=(here, replace(here, name="there", device=replace(DEVICE))))
    assert not is_measured(other, 8)
    assert is_measured(other, 4)
    assert "layers if a run also uses other devices" in provenance(other)


def test_a_machine_without_measurements_has_no_measured_times() -> None:
    bare = replace(machine(), measured=None)
    assert not shares_a_machine(Placement(bare, {}))
    assert at_ease(bare) is bare
