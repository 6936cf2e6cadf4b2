"""Plans of the planners of Galvatron, PipeDream and PipeDream-2BW for runs of this project."""

import json
import shlex
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import pytest

from megapipe.config import ConfigError
from megapipe.config.load import parse
from megapipe.config.memory import RecomputeConfig
from megapipe.config.parallel import LayerStrategy, ZeroConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import load_hardware
from megapipe.layout.stages import layers_of
from megapipe.planner.command.layouts import print_advice
from megapipe.planner.command.planning import config_yaml
from megapipe.planner.cost.model import estimate, predict
from megapipe.planner.papers.galvatron import Method, OpCosts, Strategy, iteration_seconds, per_layer
from megapipe.planner.papers.pipedream import Machine, partition_plan, two_buffered_plan, uniform_run
from megapipe.planner.search.plan import slowest_times
from tests.planner.search.runs import machine, run


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "levels", [(), (("data", 8),), (("sharded", 8),), (("tensor", 8),), (("data", 4), ("tensor", 2))]
)
def test_costs_of_one_strategy_match_the_cost_model(levels: tuple[tuple[Method, int], ...], recompute: bool) -> None:
    """On nodes of two devices. Memory is a bound, as the parts of a stage need not peak together. A step of the engine
    hides all but the last layer's sum, and sums sharded gradients with every micro-batch, of which there is one here.
    """
    base, hardware = run(num_layers=6, hidden_size=512, num_heads=8, tie_embeddings=False), machine(node=2, nodes=4)
    strategy = Strategy(1, levels, recompute)
    devices, size = prod(degree for _, degree in levels), strategy.replicas
    base = replace(base, batch=replace(base.batch, global_size=size if strategy.degree("sharded") > 1 else 4 * size))
    times = slowest_times(base, hardware, devices)
    costs = OpCosts(base, hardware, devices, times)
    layers = [costs.of(kind, strategy, size) for kind in costs.kinds]
    forward, backward, reduction, state, activations, _ = np.sum(layers, axis=0)
    config = replace(
        uniform_run(base, 1),
        parallel=replace(base.parallel, data=size, tensor=strategy.degree("tensor")),
        zero=ZeroConfig(stage=3 if strategy.degree("sharded") > 1 else 0),
        recompute=RecomputeConfig(method="full" if recompute else "none"),
    )
    ours = estimate(config, hardware, times=times)
    (memory,) = ours.memory
    assert state == memory.weights + memory.master + memory.gradients + memory.moments
    assert memory.total <= state + activations + max(each.working for each in layers) <= 1.01 * memory.total
    microbatches = base.batch.global_size // size
    seconds = iteration_seconds([forward], [backward], [reduction], microbatches)
    ends = ours.seconds_of("update") + ours.seconds_of("scalars")
    if strategy.degree("sharded") == 1:
        assert seconds == pytest.approx(ours.step_seconds - ends, rel=0.02 if size > 1 else 1e-9)
        return
    # The paper gathers the weights of every layer before either pass, as a rank with one buffer does. It hides the sum
    # of a layer's gradient in the layer's own backward; such a rank hides no compute.
    step = predict(replace(config, zero=replace(config.zero, weight_buffers=1)), hardware, times=times).estimate
    assert 0 <= step.step_seconds - ends - seconds <= ours.seconds_of("compute") + ours.seconds_of("recompute")


def test_groups_of_an_inner_method_stay_in_a_node() -> None:
    base, hardware = run(num_heads=8), machine(node=2, nodes=4)
    costs = OpCosts(base, hardware, 8, slowest_times(base, hardware, 1))
    block = costs.kinds[1]
    inner, outer = Strategy(1, (("data", 4), ("tensor", 2))), Strategy(1, (("tensor", 2), ("data", 4)))
    assert costs.of(block, inner, 8).forward < costs.of(block, outer, 8).forward
    assert costs.of(block, inner, 8).reduction > costs.of(block, outer, 8).reduction
    assert costs.of(block, inner, 8)[3:] == costs.of(block, outer, 8)[3:]
    halves = [Strategy(pipeline, (("data", 8 // pipeline),)) for pipeline in (2, 4)]
    assert costs.send(halves[0], 8) == pytest.approx(2 * (5e-6 + 2 * 128 * 256 * 2 / 5e8))
    assert costs.send(halves[1], 8) == pytest.approx(2 * (5e-6 + 4 * 128 * 256 * 2 / 5e8))


def test_a_transition_moves_what_a_device_lacks_both_ways() -> None:
    data, tensor = Strategy(1, (("data", 4),)), Strategy(1, (("tensor", 4),))
    sharded = Strategy(1, (("sharded", 4),))
    outer, inner = Strategy(1, (("data", 2), ("tensor", 2))), Strategy(1, (("tensor", 2), ("data", 2)))
    base, hardware = run(), machine(node=2, nodes=2)
    costs = OpCosts(base, hardware, 4, slowest_times(base, hardware, 1))
    seconds = costs.transitions([data, sharded, tensor, outer, inner], 8)
    whole = 8 * 128 * 256 * 2 / 5e8  # the micro-batch's boundary over a device's share of the slow link
    assert seconds[0].tolist() == pytest.approx([0, 0, 0.75 * whole, 0.25 * whole, seconds[4, 0]])
    assert seconds[2, 2] == 0
    assert seconds[3, 4] == pytest.approx(whole)
    assert (seconds == seconds.T).all()


def test_machines_are_judged_by_their_worst_node() -> None:
    fast, slow = machine(memory=2e9, node=4, nodes=1), machine(memory=1e9, inside=5e9, node=2, nodes=1)
    both = replace(fast, groups=fast.groups + slow.groups)
    assert Machine.of(both, 6) == Machine(6, 2, 1e9, 5e9, 1e9 / 4)
    assert Machine.of(both, 4).memory_bytes == 2e9
    assert OpCosts(run(), both, 6, slowest_times(run(), both, 1)).memory_bytes == 1e9


@pytest.mark.parametrize("memory", [1e9, 2.5e7])
def test_per_layer_plans_name_every_strategy_within_memory(memory: float) -> None:
    base = run(num_layers=4)
    plan = per_layer(base, machine(memory), 4)
    assert json.loads(json.dumps(plan)) == plan
    assert plan["note"].startswith("this is a paper's method; megapipe can train it only if")
    assert len(plan["stages"]) == plan["pipeline"]
    layers = [layer for stage in plan["stages"] for layer in stage["layers"]]
    assert [each["name"] for each in layers] == ["embedding", *(f"blocks.{index}" for index in range(4)), "head"]
    for layer in layers:
        assert layer["data"] * layer["sharded_data"] * layer["tensor"] == 4 // plan["pipeline"]
    assert all(stage["memory_bytes"] <= memory for stage in plan["stages"])
    assert plan["tokens_per_s"] == pytest.approx(8 * 128 / plan["step_time_s"])


def test_layers_choose_fp8_themselves_and_planners_their_sharding() -> None:
    base = run(num_layers=4)
    base = replace(base, training=replace(base.training, fp8="tensorwise"))
    layers = {"blocks.1": LayerStrategy(fp8=False, recompute="full", zero=1), "head": LayerStrategy(zero=1)}
    whole = uniform_run(replace(base, parallel=replace(base.parallel, layers=layers)), 1)
    assert whole.parallel.layers == {"blocks.1": LayerStrategy(fp8=False)}
    assert OpCosts(whole, machine(), 4, slowest_times(run(), machine(), 1)).kinds == (0, 1, 2, 1, 1, 3)


@pytest.mark.parametrize(("heads", "sizes"), [(5, {1}), (4, {2})])
def test_a_per_layer_plan_cuts_only_what_divides(heads: int, sizes: set[int]) -> None:
    """Two tensor ranks are fastest for both models, but 5 heads cannot be shared by 2 ranks."""
    plan = per_layer(run(num_layers=4, num_heads=heads, hidden_size=640), machine(), 4)
    assert {layer["tensor"] for stage in plan["stages"] for layer in stage["layers"]} == sizes


def test_less_memory_never_makes_a_per_layer_plan_faster() -> None:
    base = run(num_layers=4)
    times = [per_layer(base, machine(memory), 4)["step_time_s"] for memory in (2e7, 3e7, 6e7, 1e9)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_what_galvatron_cannot_plan_is_said() -> None:
    with pytest.raises(ConfigError, match="per-layer plan: devices must be a power of 2"):
        per_layer(run(), machine(), 6)
    with pytest.raises(ConfigError, match="per-layer plan: no strategy of 4 devices fits"):
        per_layer(run(), machine(1e6), 4)


def paper(hidden: int) -> PretrainConfig:
    """A model of the paper with 32 layers on sequences of 512 tokens, in batches of 512."""
    base = run(num_layers=32, hidden_size=hidden, num_heads=32, vocabulary_size=51200, max_positions=512)
    base = replace(base, training=replace(base.training, precision="fp16"), batch=replace(base.batch, global_size=512))
    return replace(base, data=replace(base.data, sequence_length=512))


@pytest.mark.parametrize("hidden", [2304, 2816])
def test_two_buffered_plans_can_run_and_are_estimated(hidden: int) -> None:
    base, hardware = paper(hidden), load_hardware("v100-16")
    plan = two_buffered_plan(base, hardware, 64)
    assert json.loads(json.dumps(plan)) == plan
    assert plan["memory_bytes"] <= hardware.groups[0].device.memory_bytes
    assert plan["width"] * plan["depth"] * plan["micro_size"] * plan["accumulation"] == 512
    settings = plan["settings"]
    config = replace(
        base,
        parallel=replace(base.parallel, data=plan["width"], pipeline=plan["depth"]),
        batch=replace(base.batch, micro_size=plan["micro_size"]),
        schedule=replace(base.schedule, name=settings["schedule.name"]),
        recompute=replace(base.recompute, method=settings["recompute.method"]),
    )
    ours = estimate(config, hardware)  # raises where it could not run
    assert plan["by_cost_model"] == ours.as_json()
    assert ours.fits
    assert plan["memory_bytes"] == ours.peak_bytes


def test_printed_2bw_settings_turn_any_layout_into_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, hardware = paper(2304), load_hardware("v100-16")
    base = replace(base, zero=ZeroConfig(stage=3), recompute=RecomputeConfig(method="full", num_blocks=2))
    split = replace(base.parallel, tensor=2, pipeline=4, context=2, sequence=True, layers_per_stage=[4] * 8)
    interleaved = replace(base.schedule, name="interleaved_1f1b", chunks=2)
    base = replace(base, parallel=replace(split, sequence_chunks=2), schedule=interleaved)
    (tmp_path / "best.yaml").write_text(config_yaml(base))
    plan = two_buffered_plan(base, hardware, 64)
    print_advice({"two_buffered": plan})
    flags = shlex.split(capsys.readouterr().out.rpartition("add to the best layout: ")[2])
    config = parse(["--config", str(tmp_path / "best.yaml"), *flags])
    assert estimate(config, hardware).as_json() == plan["by_cost_model"]


def test_what_2bw_cannot_plan_is_said() -> None:
    with pytest.raises(ConfigError, match="2bw plan: no width and depth of 4 devices fits"):
        two_buffered_plan(run(), machine(1e6), 4)
    auto = replace(run(), training=replace(run().training, precision="auto"))
    with pytest.raises(ConfigError, match=r"training\.precision auto is decided by measurements"):
        two_buffered_plan(auto, machine(), 4)


@pytest.mark.parametrize("devices", [4, 32])
def test_partitions_use_all_devices_and_layers(devices: int) -> None:
    base, hardware = paper(2304), load_hardware("v100-16")
    shares: list[float] = []
    plan = partition_plan(base, hardware, devices, shares.append)
    assert json.loads(json.dumps(plan)) == plan
    assert shares[-1] > 0.9
    names = [layer.name for layer in layers_of(base)]
    ends = [tuple(map(names.index, stage["layers"])) for stage in plan["stages"]]
    assert [ends[0][0], ends[-1][1]] == [0, len(names) - 1]
    assert all(one[1] + 1 == other[0] for one, other in pairwise(ends))
    assert sum(stage["replicas"] for stage in plan["stages"]) == devices
    # No stage is faster than its layers' share of the compute, and all devices together not than all of it.
    alone = estimate(uniform_run(replace(base, batch=replace(base.batch, global_size=1)), 1), hardware)
    ideal = devices * base.data.sequence_length / alone.seconds_of("compute")
    assert 0.5 * ideal < plan["tokens_per_s"] <= ideal


def test_partitions_need_nodes_of_one_size() -> None:
    with pytest.raises(ConfigError, match="PipeDream's partitioner: 12 devices are not whole nodes of 8"):
        partition_plan(paper(2304), load_hardware("v100-16"), 12)
