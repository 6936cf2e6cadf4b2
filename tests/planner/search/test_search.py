"""Objectives, reasons why alternatives lose, what is refined, errors, hints, and properties of every plan."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config import ConfigError
from megapipe.config.run import BatchConfig, PretrainConfig, TrainingConfig
from megapipe.layout.hardware.description import PRESETS, Hardware, load_hardware
from megapipe.layout.hardware.placement import Placement
from megapipe.layout.validation import run_problems
from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.cost.model import estimate, predict
from megapipe.planner.fitting import A100
from megapipe.planner.search.findings import (
    NothingFits,
    faster_or_slower,
    hints,
    neighbour_batches,
    neighbour_devices,
    single_groups,
    term_differences,
)
from megapipe.planner.search.plan import QUICK, Effort, device_counts, family, search, search_speed
from megapipe.planner.search.space import Layouts, SearchSpace
from megapipe.schedules import GENERATORS, build, dumps, order
from megapipe.training.validation import validate
from tests.planner.search.runs import machine, run, runs

SPACE = SearchSpace(max_micro_size=2, max_chunks=2, other_schedules=())
CLOSED = Effort(actions=0, alternatives=False, stages=False)


def everything(base: PretrainConfig, hardware: Hardware, devices: int) -> float:
    """Most tokens per second of any layout that fits, 0 where none does."""
    estimates = (estimate(each.applied(base), hardware) for each in Layouts(base, devices, frozenset(), SPACE))
    return max((each.tokens_per_second for each in estimates if each.fits), default=0.0)


def test_cost_and_time_are_best_over_device_counts() -> None:
    base, hardware = run(), machine(4e7)
    counts = device_counts(4, hardware)
    assert counts == (1, 2, 3, 4)
    speeds = {count: everything(base, hardware, count) for count in counts}
    cost = search(base, hardware, 4, objective="cost", space=SPACE, effort=CLOSED)
    prices = {
        count: (hardware.price_per_hour(count) or 0) / 3600 / speed * 1e6 for count, speed in speeds.items() if speed
    }
    assert cost.devices == min(prices, key=lambda count: (prices[count], count))
    assert {each.name: each.value for each in cost.trials if each.layout} == {
        f"{count} devices": pytest.approx(price) for count, price in prices.items()
    }
    assert cost.best.price == pytest.approx(min(prices.values()))
    soonest = search(base, hardware, 4, objective="time", tokens=1e9, space=SPACE, effort=CLOSED)
    assert soonest.devices == max(speeds, key=lambda count: speeds[count])
    days = {each.name: each.value for each in soonest.trials}
    assert days[f"{soonest.devices} devices"] == pytest.approx(1e9 / max(speeds.values()) / 86400)


@pytest.mark.slow
def test_size_is_the_largest_of_the_family_that_fits() -> None:
    base, hardware = run(), machine(4e7)
    result = search(base, hardware, 4, objective="size", space=SPACE, effort=CLOSED)
    models = family(base)
    assert list(models) == sorted(models, key=lambda each: each.parameters)
    assert all(each.model.head_dim == base.model.head_dim and not each.model.problems() for each in models)
    fits = [each for each in models if everything(replace(base, model=each.model), hardware, 4)]
    assert result.best.config.model == fits[-1].model
    assert result.trials[len(fits) - 1].value == fits[-1].parameters
    given = [("small", models[0].model), ("huge", models[-1].model)]
    assert search(base, hardware, 4, objective="size", models=given, space=SPACE, effort=QUICK).best.config.model == (
        models[0].model
    )


def test_a_family_keeps_grouped_queries_and_the_mlps_ratio() -> None:
    base = run(num_heads=8, num_kv_heads=2, ffn_hidden_size=512)
    for each in family(base):
        assert each.model.num_heads == 4 * each.model.kv_heads
        assert each.model.ffn_size == pytest.approx(2 * each.model.hidden_size, abs=32)


def test_alternatives_say_why_they_lose() -> None:
    hardware = machine(3e7)
    judged = search(run(num_layers=6), hardware, 8, space=SearchSpace(max_micro_size=2), effort=Effort(actions=0))
    best = judged.best.estimate
    by_name = {each.name: each for each in judged.alternatives}
    plain, pipeline, tensor = (by_name[f"{name} parallelism alone"] for name in ("data", "pipeline", "tensor"))
    assert plain.estimate is not None
    assert not plain.estimate.fits
    assert plain.reason.startswith(f"out of memory by {(plain.estimate.peak_bytes - 3e7) / 1e6:.1f} MB")
    assert pipeline.estimate is not None
    assert pipeline.estimate.config.parallel.pipeline == 8
    share = pipeline.estimate.seconds_of("bubble") / pipeline.estimate.step_seconds
    assert f"bubble {share:.1%} of the step" in pipeline.reason
    assert tensor.estimate is None
    assert tensor.reason.startswith("cannot run: model.num_heads 4 is not divisible by parallel.tensor 8")
    rule = next(each for name, each in by_name.items() if "then as little pipeline as fits" in name)
    assert rule.name.startswith("tensor 4,")
    assert rule.estimate is not None
    assert rule.estimate.config.recompute.method == "full"
    for each in judged.alternatives:
        if each.estimate is not None and each.estimate.fits:
            assert estimate(each.estimate.config, hardware).step_seconds >= best.step_seconds
            slower = 1 - each.estimate.tokens_per_second / best.tokens_per_second
            reason = "is the best layout" if each.estimate.config == best.config else f"{slower:.1%} slower"
            assert reason in each.reason or slower < 0.0005
    report, price = judged.as_json(), 16.0 / 3600 / best.tokens_per_second * 1e6
    assert report["best"]["step_time_s"] == best.step_seconds
    assert report["best"]["price_per_million_tokens"] == pytest.approx(price)
    assert [each["name"] for each in report["alternatives"]] == [each.name for each in judged.alternatives]


def test_the_best_are_simulated_and_ordered_by_that() -> None:
    base, hardware = run(num_layers=6), machine(1e9, inside=1e9, outside=2e8)
    pinned = frozenset({"parallel.pipeline", "parallel.tensor"})
    base = replace(base, parallel=replace(base.parallel, pipeline=4))
    result = search(base, hardware, 4, pinned, space=SPACE, effort=Effort(alternatives=False, stages=False))
    assert [each.simulated for each in result.ranked] == [True] * 5
    steps = [each.estimate.step_seconds for each in result.ranked]
    assert steps == sorted(steps)
    assert steps[0] == predict(result.best.config, hardware).estimate.step_seconds
    # Each takes 2 x 8 micro-batches x 4 stages or more: there is time for one of them.
    some = search(base, hardware, 4, pinned, space=SPACE, effort=Effort(actions=130, alternatives=False))
    assert [each.simulated for each in some.ranked].count(True) == 1
    assert some.ranked[0].simulated
    closed = search(base, hardware, 4, pinned, space=SPACE, effort=Effort(actions=0, alternatives=False))
    assert some.best.config == closed.best.config
    assert not any(each.simulated for each in closed.ranked)


def test_much_faster_schedules_without_bubbles_are_found() -> None:
    """On slow links only a pipeline pays, and with two micro-batches per rank its bubble is large."""
    base, hardware = run(num_layers=8, tie_embeddings=False), machine(inside=1e8, outside=1e8, node=1, nodes=4)
    result = search(base, hardware, 4, space=SearchSpace())
    assert result.best.config.schedule.name == "zb_h2"
    without = search(base, hardware, 4, space=SearchSpace(other_schedules=()))
    assert result.best.estimate.tokens_per_second > 1.3 * without.best.estimate.tokens_per_second


def test_layers_move_between_stages_where_their_times_say_so() -> None:
    """A large vocabulary: by FLOPs its head weighs less than by its kernels, which make little of narrow matrices."""
    base = run(num_layers=10, vocabulary_size=8000, hidden_size=128)
    base = replace(base, parallel=replace(base.parallel, pipeline=4))
    pinned = frozenset({"parallel.pipeline", "schedule.name"})
    result = search(base, machine(), 4, pinned, effort=Effort(actions=0, alternatives=False))
    moved = [each.estimate for each in result.ranked if each.config.parallel.layers_per_stage is not None]
    assert moved
    for each in moved:
        assert sum(each.config.parallel.layers_per_stage or ()) == 12
        parallel = replace(each.config.parallel, layers_per_stage=None)
        assert each.step_seconds < estimate(replace(each.config, parallel=parallel), machine()).step_seconds
    still = search(base, machine(), 4, pinned, effort=Effort(actions=0, alternatives=False, stages=False))
    assert all(each.config.parallel.layers_per_stage is None for each in still.ranked)


def test_measured_links_give_an_order_of_the_nodes() -> None:
    """Nodes 0 and 1 have a slow link to each other: they are no neighbours in the pipeline."""
    slow, fast = 1e7, 1e9
    rows = tuple(tuple(slow if {a, b} == {0, 1} else fast for b in range(4)) for a in range(4))
    hardware = replace(machine(node=1), link_matrix=rows)
    base = run(num_layers=6)
    base = replace(base, parallel=replace(base.parallel, pipeline=4))
    space, effort = SearchSpace(schedules=("1f1b",), max_micro_size=2), Effort(alternatives=False, slowest=0)
    result = search(base, hardware, 4, frozenset({"parallel.pipeline"}), space=space, effort=effort)
    order = result.best.node_order
    assert order is not None
    assert all({a, b} != {0, 1} for a, b in pairwise(order))
    assert Placement(hardware, {"pipeline": 4}, order).node_order == order
    assert result.best.estimate.step_seconds < estimate(result.best.config, hardware).step_seconds


FREE = replace(machine(), groups=(replace(machine().groups[0], price_per_hour=None),))
PRECISION_AUTO = replace(run(), training=TrainingConfig(precision="auto"))


@pytest.mark.parametrize(
    ("base", "hardware", "devices", "objective", "message"),
    [
        (run(), machine(), 4, "time", "objective time needs the number of tokens to train on; set it, as in --tokens"),
        (run(), machine(), 4, "fast", "unknown objective 'fast'; it must be one of speed, cost, time, size"),
        (run(), FREE, 4, "cost", "objective cost needs prices, but hardware 'small' has groups without"),
        (run(), machine(nodes=2), 12, "speed", "12 devices are requested, but hardware 'small' has 8"),
        (PRECISION_AUTO, machine(), 4, "speed", r"training\.precision auto is decided by measurements"),
        (run(), machine(), 7, "speed", r"no layout of 7 devices can run|not divisible"),
    ],
)
def test_impossible_searches_are_refused_with_the_fix(base, hardware, devices, objective, message) -> None:
    with pytest.raises(ConfigError, match=message):
        search(base, hardware, devices, objective=objective)


def test_the_layout_of_least_memory_is_nearest_to_fitting() -> None:
    base, hardware = run(), machine(1e6)
    message = r"no layout fits 2 devices of 'small'; the layout that needs the least memory is out of"
    with pytest.raises(NothingFits, match=message) as error:
        search(base, hardware, 2, space=SPACE)
    sizes = [estimate(each.applied(base), hardware).peak_bytes for each in Layouts(base, 2, frozenset(), SPACE)]
    assert error.value.nearest.peak_bytes == min(sizes)
    assert search(base, FREE, 1, space=SPACE, effort=QUICK).best.price is None


def test_schedule_files_are_used_where_they_fit_the_run(tmp_path: Path) -> None:
    """Two ranks with three layers each: only meshes of its own ranks and micro-batches are left."""
    path = tmp_path / "own.txt"
    path.write_text(dumps(order("gpipe", 2, 8, units_per_stage=[3, 3])))
    base = replace(run(), schedule=replace(run().schedule, name=str(path)))
    result = search(base, machine(), 2, effort=CLOSED)
    assert {(each.config.parallel.pipeline, each.config.batch.micro_size) for each in result.ranked} == {(2, 1)}
    assert result.best.config.schedule.file == str(path)
    path.write_text(GENERATORS["gpipe"].text)  # for any mesh
    for ranks in (2, 3):
        split = replace(base, parallel=replace(base.parallel, pipeline=ranks))
        result = search(split, machine(), ranks, frozenset({"parallel.pipeline"}), effort=CLOSED)
        assert {each.config.parallel.pipeline for each in result.ranked} == {ranks}
    other = tmp_path / "other.txt"
    other.write_text(dumps(build("gpipe", 2, 8)))  # lowered, for one layer a stage
    base = replace(base, schedule=replace(base.schedule, file=str(other)))
    with pytest.raises(ConfigError, match=r"schedule .*other\.txt: .* made for units"):
        search(base, machine(), 2, effort=CLOSED)


OTHERS_TOO = SearchSpace(max_micro_size=2, max_chunks=2)


@settings(max_examples=6, deadline=None)
@given(
    base=runs(),
    devices=st.sampled_from([2, 4, 8]),
    memory=st.floats(5e6, 2e8),
    pinned=st.sets(
        st.sampled_from(["parallel.tensor", "zero.stage", "recompute.method", "schedule.name"]), max_size=2
    ),
)
def test_plans_stay_within_memory_and_can_start(
    base: PretrainConfig, devices: int, memory: float, pinned: set[str]
) -> None:
    effort = Effort(actions=300, alternatives=False)
    try:
        findings = search_speed(base, machine(memory), devices, frozenset(pinned), space=OTHERS_TOO, effort=effort)
    except NothingFits:
        return
    except ConfigError:
        if list(Layouts(base, devices, frozenset(pinned), OTHERS_TOO)):
            raise  # only where no layout can run
        return
    proposed = (*findings.ranked, *findings.pareto)
    for each in proposed:
        assert each.estimate.peak_bytes <= memory
        assert run_problems(each.config, devices) == []
        assert each.estimate.world_size == devices
        for path in pinned:
            group, name = path.split(".")
            assert getattr(getattr(each.config, group), name) == getattr(getattr(base, group), name)
    for each in proposed[:2]:
        validate(each.config, devices)


ROWS = {run.name: run for run in (*A100.rows, *A100.unfitted)}


@pytest.mark.parametrize(
    "name",
    ["1.7B", *(pytest.param(row, marks=pytest.mark.exhaustive) for row in ("7.5B", "39.1B", "145.6B", "1008B"))],
)
def test_the_best_is_as_fast_as_the_authors_layout(name: str) -> None:
    """SC21 table 1, everything recomputed and nothing sharded there. Micro-batch size and chunks are free for them."""
    row, hardware = ROWS[name], load_hardware("a100-80")
    theirs = min(
        (estimate(each, hardware) for each in ROWS[name].candidates()),
        key=lambda each: (not each.fits, each.step_seconds),
    )
    base = replace(theirs.config, parallel=replace(theirs.config.parallel, layers_per_stage=None, data=None))
    base = replace(base, data=replace(base.data, prefix="corpus"))
    findings = search_speed(base, hardware, row.devices, effort=replace(CLOSED, slowest=0, keep=1))
    best = findings.best.estimate
    assert best.step_seconds <= theirs.step_seconds
    assert "faster in tokens per second" in faster_or_slower(best, theirs)
    assert any(line.startswith("recompute") and line.endswith("less") for line in term_differences(best, theirs))


def test_findings_count_every_layout_once() -> None:
    findings = search_speed(run(), machine(3e7), 4, space=OTHERS_TOO, effort=CLOSED)
    assert findings.examined + sum(findings.pruned.values()) == findings.layouts
    assert findings.pruned["memory"] > 0
    assert findings.ranked[0].estimate.step_seconds == findings.pareto[0].estimate.step_seconds


@pytest.mark.parametrize(
    ("samples", "devices", "expected"),
    [(1023, 64, [1024]), (1024, 64, []), (1536, 64, []), (32, 256, []), (100, 64, [96])],
)
def test_batches_that_more_sizes_divide(samples: int, devices: int, expected: list[int]) -> None:
    assert neighbour_batches(samples, devices)[:1] == expected


def test_devices_that_fill_nodes_have_no_better_neighbour() -> None:
    hardware = load_hardware("a100-80")
    assert neighbour_devices(hardware, 63) == [56, 60]
    assert neighbour_devices(hardware, 64) == neighbour_devices(hardware, 8) == neighbour_devices(hardware, 1) == []


class _Speed:
    def __init__(self, tokens_per_second: float) -> None:
        self.tokens_per_second = tokens_per_second


def test_hints_name_what_is_much_faster() -> None:
    slow, fast = (load_hardware(name).groups[0] for name in ("v100-32", "a100-80"))
    mixed = Hardware("two kinds", (replace(slow, num_nodes=1), replace(fast, num_nodes=1)))
    assert [(each.groups[0].device.name, count) for each, count in single_groups(mixed, 16)] == [
        (slow.device.name, 8),
        (fast.device.name, 8),
    ]

    def fastest(config: PretrainConfig, machine: Hardware, count: int) -> Estimate:
        alone = len(machine.groups) == 1 and machine.groups[0].device.name == fast.device.name
        faster = alone or config.batch.global_size == 1024
        return _Speed(1.3 if faster else 0.5)  # type: ignore[return-value]

    base = PretrainConfig(batch=BatchConfig(global_size=1023))
    said = list(hints(base, mixed, 16, _Speed(1.0), fastest))  # type: ignore[arg-type]
    assert len(said) == 2
    assert "--batch.global_size 1024 trains 1.3 times as many tokens" in said[0]
    assert "the 8 A100-SXM4-80GB alone are 1.30 times as fast as all 16 devices" in said[1]


def test_a_hint_names_the_batch_that_it_needs() -> None:
    def fastest(config: PretrainConfig, machine: Hardware, count: int) -> Estimate:
        return _Speed(1.5 if (count, config.batch.global_size) == (60, 1020) else 1.0)  # type: ignore[return-value]

    base = PretrainConfig(batch=BatchConfig(global_size=1024))
    said = list(hints(base, load_hardware("a100-80"), 63, _Speed(1.0), fastest))  # type: ignore[arg-type]
    assert said == ["60 devices with --batch.global_size 1020 are 1.5 times as fast as 63, which has few divisors"]


def test_presets_of_one_chip_share_its_fitted_efficiency() -> None:
    devices = {name: load_hardware(name).groups[0].device for name in PRESETS}
    for chip, source in (("A100", "a100-80"), ("H100", "h100"), ("H200", "h100")):
        same = [each for each in devices.values() if each.name.startswith(chip)]
        assert {each.efficiency for each in same} == {devices[source].efficiency}
