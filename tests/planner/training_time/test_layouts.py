"""Training time of layouts compared with figures by hand, simulated bubbles and a brute-force search."""

from itertools import product

import pytest

from megapipe.planner.command.train_time import (
    METHODS,
    Cluster,
    MethodLayout,
    Transformer,
    bubble,
    critical_batch_tokens,
    layout_seconds,
    memory_bytes,
    overheads,
    shortest,
)
from megapipe.schedules import build
from megapipe.schedules.simulation.costs import rank_costs
from megapipe.schedules.simulation.simulate import simulate

X_160 = Transformer(160, 160**2, 160, 16 * 160)
"""The paper's X_n has n layers of n heads of n numbers, on sequences of 16 n tokens."""
A100 = 312e12
INFINIBAND = Cluster(A100, 80e9, tensor_link=300e9, link=25e9, node_size=16)
BATCH = 2415
TOKENS = 1e5 * BATCH * 2560
DAY = 86400.0


@pytest.mark.parametrize(("size", "parameters"), [(160, 1.258e12), (108, 176e9), (64, 12.9e9), (32, 403e6)])
def test_the_family_has_its_sizes(size: int, parameters: float) -> None:
    num_parameters = Transformer(size, size**2, size, 16 * size).parameters
    assert num_parameters == 12 * size**5
    assert num_parameters == pytest.approx(parameters, rel=3e-3)


@pytest.mark.parametrize(
    ("bytes_per_second", "threshold"), [(300e9, 1040), (31.5e9, 9905), (25e9, 12480), (3.125e9, 99840)]
)
def test_thresholds_of_an_a100(bytes_per_second: float, threshold: float) -> None:
    thresholds = Cluster(A100, 80e9, bytes_per_second, 2 * bytes_per_second, 8).thresholds
    assert round(thresholds["inside"]) == threshold
    assert thresholds["outside"] == thresholds["inside"] / 2


def test_intensities_of_one_sequence_and_five_micro_batches() -> None:
    assert round(MethodLayout("sharded", 2, 1, 1, 1, 5).intensities(X_160)["data"]) == 3413
    assert round(MethodLayout("layered", 2, 1, 1, 1, 5).intensities(X_160)["data"]) == 17067
    assert MethodLayout("3d", 2, 1, 1, 5, 1).intensities(X_160)["data"] == 5 * 3840
    modular = MethodLayout("modular", 1, 5, 16, 1, 5).intensities(X_160)
    assert modular["data"] == float("inf")
    assert modular["pipeline"] == 614_400
    assert round(modular["tensor"]) == 6827
    assert A100 / 300e9 / modular["tensor"] == pytest.approx(0.15, abs=0.005)


def test_checkpoint_bytes_of_the_modular_layout() -> None:
    assert X_160.checkpoint_bytes == pytest.approx(21.0e9, rel=2e-3)
    assert X_160.checkpoint_bytes * 2415 / 38640 == pytest.approx(1.31e9, rel=2e-3)


def test_critical_batch_is_gpt_3s_scaled_by_cube_root() -> None:
    assert critical_batch_tokens(175e9) == pytest.approx(3.2e6)
    assert critical_batch_tokens(8 * 175e9) == pytest.approx(2 * 3.2e6)
    assert critical_batch_tokens(X_160.parameters) == pytest.approx(6.2e6, rel=5e-3)
    assert critical_batch_tokens(1e9) / 1e3 == pytest.approx(572, rel=1e-3)


@pytest.mark.parametrize(
    ("method", "stages", "microbatches", "chunks", "idle"),
    [
        ("modular", 5, 5, 32, 0.025),
        ("modular", 4, 8, 4, 0.09375),
        ("modular", 4, 4, 4, 0.1875),
        ("modular", 4, 3, 4, 0.5),
        ("3d", 4, 8, 1, 0.375),
        ("3d", 8, 32, 1, 0.21875),
    ],
)
def test_bubbles_are_the_simulated_ones(method: str, stages: int, microbatches: int, chunks: int, idle: float) -> None:
    model = Transformer(stages * chunks, 64, 4, 64)
    assert bubble(model, MethodLayout(method, 1, stages, 1, 1, microbatches)) == pytest.approx(idle)
    name, options = ("modular", {"chunks": chunks}) if method == "modular" else ("1f1b", {})
    schedule = build(name, stages, microbatches, **options)  # type: ignore[arg-type]
    simulation = simulate(schedule, rank_costs(schedule.header))
    assert simulation.finish / simulation.ideal - 1 == pytest.approx(idle)


def test_one_device_trains_a_trillion_parameters_in_632_years() -> None:
    seconds = layout_seconds(X_160, INFINIBAND, MethodLayout("layered", 1, 1, 1, 1, BATCH), TOKENS)
    assert seconds / DAY / 365.25 == pytest.approx(632, rel=1e-3)


def test_layered_accumulation_hides_on_infiniband_what_usual_accumulation_cannot() -> None:
    usual, modular = (MethodLayout(method, 483, 5, 16, 1, 5) for method in ("sharded", "modular"))
    assert overheads(X_160, INFINIBAND, usual).data == pytest.approx(12480 / 3413 - 1, rel=1e-3)
    assert overheads(X_160, INFINIBAND, modular).data == overheads(X_160, INFINIBAND, modular).pipeline == 0
    assert overheads(X_160, INFINIBAND, modular).tensor == pytest.approx(0.152, abs=1e-3)


def test_modular_layout_memory_is_the_sum_of_terms() -> None:
    layout = MethodLayout("modular", 483, 5, 16, 1, 5)
    state, checkpoints, weights = 391e6, 1.31e9, 983e6
    activations = 2560 * (34 * 25600 + 5 * 160 * 2560) / 16
    assert memory_bytes(X_160, layout) == pytest.approx(state + checkpoints + 2 * 2 * weights + activations, rel=2e-3)


def test_contiguous_pipeline_memory_holds_micro_batches_in_flight() -> None:
    model = Transformer(8, 64, 4, 32)
    activations = 2 * 32 * (34 * 64 + 5 * 4 * 32) / 2
    for microbatches, in_flight in ((3, 3), (9, 4)):
        layout = MethodLayout("3d", 5, 4, 2, 2, microbatches)
        expected = 16 * 12 * 64**2 * 8 / (4 * 2) + 2 * 32 * 64 * 8 * 2 * in_flight / (4 * 2) + activations
        assert memory_bytes(model, layout) == pytest.approx(expected)


def test_slow_links_cost_by_layers_of_a_chunk() -> None:
    model = Transformer(8, 64, 4, 32)
    cluster = Cluster(1e12, 1e9, tensor_link=1e9, link=1e12 / (24 * 64 * 3), node_size=1)  # is hidden by three layers
    contiguous, modular = (
        overheads(model, cluster, MethodLayout(method, 1, 4, 1, 1, 4)) for method in ("3d", "modular")
    )
    assert contiguous.pipeline == pytest.approx(3 / 2 - 1)
    assert modular.pipeline == pytest.approx(3 - 1)
    assert modular.efficiency == pytest.approx(1 / ((1 + 3 / 8) * 3))


def test_both_methods_halve_times_without_fast_networks() -> None:
    """The paper's abstract: shortest time cut by half, InfiniBand not needed."""
    limits = {"max_micro_size": 1, "least_efficiency": 0.44}
    usual, improved = (
        shortest(X_160, INFINIBAND, method, BATCH, TOKENS, **limits)  # type: ignore[arg-type]
        for method in ("3d", "modular")
    )
    assert improved[1] / usual[1] == pytest.approx(0.5, abs=0.05)
    ethernet = Cluster(A100, 80e9, tensor_link=300e9, link=3.125e9, node_size=16)
    on_ethernet = layout_seconds(X_160, ethernet, MethodLayout("modular", 80, 32, 16, 1, 30), TOKENS)
    assert on_ethernet < 0.75 * usual[1]


SMALL = Transformer(4, 64, 4, 32)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("max_devices", [None, 6])
@pytest.mark.parametrize("memory", [1e6, 4e6])
def test_the_shortest_is_that_of_brute_force(method: str, max_devices: int | None, memory: float) -> None:
    cluster = Cluster(1e12, memory, tensor_link=2e10, link=5e9, node_size=2)
    batch, times = 7, []
    stages = (1,) if method == "layered" else (1, 2, 4)
    for data, pipeline, tensor, size, count in product(range(1, 8), stages, (1, 2), (1, 2, 3), range(1, 8)):
        layout = MethodLayout(method, data, pipeline, tensor, size, count)
        fits = layout.batch_size <= batch and memory_bytes(SMALL, layout) <= memory
        if fits and (max_devices is None or layout.devices <= max_devices):
            times.append(layout_seconds(SMALL, cluster, layout, 1e6))
    arguments = (SMALL, cluster, method, batch, 1e6)
    if times:
        layout, seconds = shortest(*arguments, max_micro_size=3, max_devices=max_devices)
        assert seconds == pytest.approx(min(times), rel=1e-12)
        assert memory_bytes(SMALL, layout) <= memory
    else:
        with pytest.raises(ValueError, match="the smallest one needs"):
            shortest(*arguments, max_micro_size=3, max_devices=max_devices)
