"""Copies to host memory in the cost model: bytes and times, in closed form compared with the simulation."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import PRESETS, Hardware, HostLink, load_hardware, read_hardware, written
from megapipe.layout.prediction import predict_rank
from megapipe.planner.cost.model import estimate, predict
from megapipe.planner.search.plan import search_speed
from megapipe.spec.layers import model_layers
from tests.planner.cost.runs import SMALL, config_of, machine
from tests.planner.measured.machines import machine as measured_machine
from tests.planner.measured.machines import run as measured_run
from tests.spec.sizes import predicted_bytes

NO_TIME = 1e30
STATE = {"optimizer": True}
WEIGHTS = {"optimizer": True, "weights": True}
BLOCKS = {"activations": "blocks"}
KINDS = [STATE, WEIGHTS, BLOCKS, {**BLOCKS, "every": 3}, {**BLOCKS, "prefetch": 3}, {**BLOCKS, **STATE}]
COUNT = 8


def on(bandwidth: float, latency: float = 0.0) -> Hardware:
    hardware = machine()
    return replace(hardware, groups=(replace(hardware.groups[0], host=HostLink(bandwidth, latency)),))


def run(offload: dict[str, Any], pipeline: int = 1, **groups: Any) -> PretrainConfig:
    batch = {"global_size": 2 * COUNT, "micro_size": 2}
    return config_of(offload=dict(offload), parallel={"pipeline": pipeline}, batch=batch, **groups)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("offload", KINDS, ids=str)
def test_copies_that_take_no_time_cost_none(offload: dict[str, Any], pipeline: int) -> None:
    plain = predict(run({}, pipeline), machine()).estimate
    result = predict(run(offload, pipeline), on(NO_TIME)).estimate
    assert result.step_seconds == pytest.approx(plain.step_seconds, rel=1e-9)
    closed = estimate(run(offload, pipeline), on(NO_TIME))
    assert closed.step_seconds == pytest.approx(estimate(run({}, pipeline), machine()).step_seconds, rel=1e-9)
    assert sum(term.seconds for term in result.terms) == pytest.approx(result.step_seconds)
    assert result.peak_bytes < plain.peak_bytes


@given(
    offload=st.sampled_from(KINDS),
    pipeline=st.sampled_from([1, 2, 4]),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
    slower=st.floats(1.1, 10.0),
    bandwidth=st.floats(1e9, 1e12),
)
@settings(max_examples=20, deadline=None)
def test_slower_links_never_speed_up_or_change_memory(
    offload: dict[str, Any], pipeline: int, schedule: str, slower: float, bandwidth: float
) -> None:
    config = run(offload, pipeline, schedule={"name": schedule})
    for ask in (estimate, lambda *given: predict(*given).estimate):
        fast, slow = ask(config, on(bandwidth)), ask(config, on(bandwidth / slower))
        assert fast.step_seconds <= slow.step_seconds * (1 + 1e-9)
        assert fast.memory == slow.memory


@pytest.mark.one_in(3)
@pytest.mark.parametrize("pipeline", [1, 4])
@pytest.mark.parametrize("offload", KINDS, ids=str)
def test_the_closed_form_is_near_the_simulation(offload: dict[str, Any], pipeline: int) -> None:
    """From links that hide to those that take several times as long as all compute. Reloads that start long before
    their backward are hidden by forwards of a pipeline too, which the closed form does not see: then it is a bound."""
    most = 1.6 if offload.get("prefetch", 1) > 1 and pipeline > 1 else 1.2
    for bandwidth in (400e9, 63e9, 15.75e9):
        config = run(offload, pipeline)
        closed, simulated = estimate(config, on(bandwidth)), predict(config, on(bandwidth)).estimate
        assert 0.8 <= closed.step_seconds / simulated.step_seconds <= most


def test_optimizer_state_copies_overlap_both_ways_after_steps() -> None:
    """12 bytes a parameter in bf16 with AdamW: master and two moments, in fp32 each; docs/offload.md has 0.48 s for a
    billion parameters at 25 GB/s. The last unit's copy out is additional."""
    parameters = sum(spec.num_elements for layer in model_layers(SMALL) for spec in layer.parameters.values())
    seconds = predict(run(STATE), on(25e9)).estimate.seconds_of("offload")
    once = 12 * parameters / 25e9
    assert once <= seconds <= once * (1 + 1 / (SMALL.num_layers + 2)) * 1.01
    assert 0.48 * parameters / 1e9 == pytest.approx(once)


def test_bottleneck_links_carry_every_block_of_micro_batches() -> None:
    """In a pipeline of one rank a step takes at least as long as its blocks' offloads and reloads."""
    kept = predicted_bytes(SMALL, model_layers(SMALL)[1], 2, 1024, "bf16", "sdpa")
    bandwidth = 1e9
    blocks = SMALL.num_layers - 1  # the last one's backward follows at once: it stays
    seconds = predict(run(BLOCKS), on(bandwidth)).estimate.step_seconds
    assert seconds >= 2 * COUNT * blocks * kept / bandwidth
    assert seconds <= 2 * COUNT * (blocks + 2) * kept / bandwidth + predict(run({}), machine()).estimate.step_seconds


def test_latency_is_paid_for_every_copy() -> None:
    latency = 1.0
    seconds = predict(run(STATE), on(NO_TIME, latency)).estimate.seconds_of("offload")
    assert seconds >= latency * (SMALL.num_layers + 2)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("offload", KINDS, ids=str)
def test_memory_is_what_ranks_hold_on_their_devices(offload: dict[str, Any], pipeline: int) -> None:
    """`predict_rank`, which tests/distributed holds to the bytes of real runs with offload."""
    prediction = predict(run(offload, pipeline), on(63e9))
    for rank, memory in enumerate(prediction.estimate.memory):
        exact = predict_rank(prediction.estimate.config, prediction.schedule, rank, device="cuda")
        lasting = memory.weights + memory.master + memory.gradients + memory.moments
        assert lasting == exact.state().total - exact.in_host()
        assert exact.device_bytes() <= memory.total
    assert estimate(run(offload, pipeline), on(63e9)).memory == prediction.estimate.memory


def test_a_measured_machine_is_simulated_without_its_ranks_contention() -> None:
    """The simulator of ranks that share a machine has no copies: each rank then has a device of its own."""
    hardware = measured_machine()
    hardware = replace(hardware, groups=(replace(hardware.groups[0], host=HostLink(1e9)),))
    config = measured_run(offload={"optimizer": True})
    result = predict(config, hardware).estimate
    assert result.seconds_of("offload") > 0
    assert any("measured" in term.source for term in result.terms)


def test_what_has_no_price_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hardware 'machine' does not describe the link between GPU and host"):
        estimate(run(STATE), machine())
    with pytest.raises(ConfigError, match=r"offload is set, but a search does not model copies to host memory"):
        search_speed(run(STATE), on(1e9), 1)
    full = run(BLOCKS, recompute={"method": "full", "num_blocks": SMALL.num_layers})
    with pytest.raises(ConfigError, match=r"offload.activations blocks has nothing to move"):
        estimate(full, on(1e9))


def test_hardware_files_name_the_link() -> None:
    """PCI Express: line rate of 16 lanes less its code's share, 128 of 130 bits."""
    hardware = on(25e9, 1e-5)
    assert read_hardware(written(hardware)).groups[0].host == HostLink(25e9, 1e-5)
    rates = {"v100": 8e9, "a100": 16e9, "h100": 32e9, "h200": 32e9, "b200": 32e9}
    for preset in PRESETS:
        host = load_hardware(preset).groups[0].host
        assert host is not None
        rate = rates.get(preset[:4])
        assert rate is None or host.bandwidth == pytest.approx(16 * rate * 128 / 130 / 8, rel=1e-3)
    text = written(hardware).replace("latency: 1.0e-05", "lag: 1.0e-05")
    with pytest.raises(ConfigError, match=r"host.lag is an unknown key"):
        read_hardware(text)
