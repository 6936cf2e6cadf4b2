"""The estimate compared with simulation over random layouts: schedules, ZeRO stages, recomputation, links."""

import random
from dataclasses import replace
from statistics import mean, quantiles
from typing import Any

import pytest

from megapipe.config import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import load_hardware
from tests.planner.cost.runs import SMALL, closed_over_simulated, config_of, even_stages, machine

LINKS = ((0.0, 1e15), (5e-6, 3e11), (5e-6, 5e10), (2e-5, 1e10), (2e-5, 3e9))
"""Latency and bandwidth of machines that no preset describes."""
MACHINES = [load_hardware(name) for name in ("a100-80", "h100", "h100-25gbe")]
MACHINES += [machine(latency, bandwidth) for latency, bandwidth in LINKS]
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "modular", "zb_h1", "zb_h2", "zb_v", "2bw", "pipedream")


def drawn(numbers: random.Random, name: str) -> PretrainConfig:
    """A random layout; some have stages that are as even as possible."""
    looped = name in ("interleaved_1f1b", "modular")
    chunks = numbers.choice([2, 3, 4]) if looped else 1
    own = 2 if name == "zb_v" else chunks
    pipeline = numbers.choice([2, 3, 4, 8] if own > 1 else [1, 2, 3, 4, 8])
    # A few more or fewer micro-batches than ranks, and many.
    count = numbers.choice([1, 2, pipeline, 2 * pipeline, 2 * pipeline + 1, 4 * pipeline])
    count = max(count, pipeline) if name in ("2bw", "pipedream") else count
    data, layers = numbers.choice([1, 2, 4, 8]), numbers.choice([8, 16, 24])
    parallel: dict[str, Any] = {"pipeline": pipeline, "data": data, "tensor": numbers.choice([1, 1, 2, 4])}
    if pipeline > 1 and layers % (pipeline * own) == 0 and numbers.random() < 0.5:
        parallel["layers_per_stage"] = even_stages(pipeline * own, layers)
    return config_of(
        replace(SMALL, num_layers=layers, tie_embeddings=name != "pipedream" and numbers.random() < 0.2),
        parallel=parallel,
        schedule={"name": name} | ({"chunks": chunks} if looped else {}),
        batch={"global_size": count * data},
        zero={"stage": numbers.choice([0, 1, 2, 3]) if data > 1 else 0},
        recompute={"method": numbers.choice(["none", "selective", "full"])},
        optimizer={"clip_norm": None if name == "pipedream" else 1.0},
    )


@pytest.mark.slow
def test_layouts_at_random_come_out_as_simulated() -> None:
    """Fifteen of each schedule. Much too long is the worse error: a search drops such layouts."""
    numbers, ratios = random.Random(5), list[float]()
    for name in SCHEDULES:
        own = list[float]()
        while len(own) < 15:
            config, hardware = drawn(numbers, name), numbers.choice(MACHINES)
            try:
                own.append(closed_over_simulated(config, hardware) - 1)
            except ConfigError:  # fewer layers than stages
                continue
        assert mean(abs(each) for each in own) < 0.09, name
        ratios += own
    sizes = [abs(each) for each in ratios]
    assert mean(sizes) < 0.03
    assert quantiles(sizes, n=20)[17] < 0.10  # nine of ten
    assert -0.3 < min(ratios) < max(ratios) < 0.3
