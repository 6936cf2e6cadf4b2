"""Plans of Galvatron's and PipeDream-2BW's planners for runs of this project."""

import json
from dataclasses import replace

import pytest

from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.reader import load_hardware
from megapipe.planner.cost.model import estimate
from megapipe.planner.search.per_layer import per_layer
from megapipe.planner.search.plan import slowest_times
from megapipe.planner.search.profiles import layer_figures, machine_figures
from megapipe.planner.search.two_buffered import two_buffered_plan
from megapipe.spec.dtypes import FULL_BYTES
from tests.planner.search.runs import machine, run


def test_figures_are_those_of_one_device() -> None:
    """State and time of the cost model's own estimate of the whole model on one device."""
    base, hardware = run(num_layers=3, tie_embeddings=False), machine()
    figures = layer_figures(base, hardware, slowest_times(base, hardware, 1), micro_size=2)
    assert [each.name for each in figures] == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    alone = estimate(replace(base, batch=replace(base.batch, micro_size=2)), hardware, world_size=1)
    (memory,) = alone.memory
    assert sum(each.state for each in figures) == memory.weights + memory.master + memory.gradients + memory.moments
    seconds = sum(each.forward + each.backward for each in figures)
    assert 4 * seconds == pytest.approx(alone.seconds_of("compute"))
    # What is kept, and the gradient in hand.
    assert sum(each.kept for each in figures) + figures[0].boundary == memory.activations
    assert all(each.parameters * (2 + 4 * FULL_BYTES) == each.state for each in figures[1:-1])


def test_a_machine_is_as_good_as_the_worst_of_its_nodes() -> None:
    fast, slow = machine(memory=2e9, node=4, nodes=1), machine(memory=1e9, inside=5e9, node=2, nodes=1)
    both = replace(fast, groups=fast.groups + slow.groups)
    figures = machine_figures(both, 6)
    assert (figures.devices_per_node, figures.memory_bytes, figures.inside) == (2, 1e9, 5e9)
    assert figures.outside == 1e9 / 4
    assert machine_figures(both, 4).memory_bytes == 2e9


@pytest.mark.parametrize("memory", [1e9, 2.5e7])
def test_a_per_layer_plan_names_a_strategy_for_every_layer_within_memory(memory: float) -> None:
    base = run(num_layers=4)
    plan = per_layer(base, machine(memory), 4)
    assert json.loads(json.dumps(plan)) == plan
    assert plan["note"].startswith("this is a paper's method; megapipe cannot train it")
    assert len(plan["stages"]) == plan["pipeline"]
    layers = [layer for stage in plan["stages"] for layer in stage["layers"]]
    assert [each["name"] for each in layers] == ["embedding", *(f"blocks.{index}" for index in range(4)), "head"]
    for layer in layers:
        assert layer["data"] * layer["sharded_data"] * layer["tensor"] == 4 // plan["pipeline"]
    assert all(stage["memory_bytes"] <= memory for stage in plan["stages"])
    assert plan["tokens_per_s"] == pytest.approx(8 * 128 / plan["step_time_s"])


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
def test_a_two_buffered_plan_can_run_and_is_told_by_the_cost_model_too(hidden: int) -> None:
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


def test_what_2bw_cannot_plan_is_said() -> None:
    with pytest.raises(ConfigError, match="2bw plan: no width and depth of 4 devices fits"):
        two_buffered_plan(run(), machine(1e6), 4)
    auto = replace(run(), training=replace(run().training, precision="auto"))
    with pytest.raises(ConfigError, match=r"training\.precision auto is decided by measurements"):
        two_buffered_plan(auto, machine(), 4)
