"""A machine with made-up measurements, and the run that they are of."""

from dataclasses import replace
from typing import Any

from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import (
    Contention,
    Device,
    Hardware,
    IntraNodeLink,
    MeasuredCollective,
    MeasuredLayer,
    Measurements,
    Network,
    NodeGroup,
)
from megapipe.planner.measured import shape_of

MODEL = ModelConfig(vocabulary_size=512, num_layers=4, hidden_size=64, num_heads=4, max_positions=64)
DEVICE = Device("core", {"fp32": 50e9}, 8e9, 10e9)


def run(**groups: dict[str, Any]) -> PretrainConfig:
    config = PretrainConfig(model=MODEL)
    config.data = replace(config.data, sequence_length=64)
    config.batch = replace(config.batch, global_size=16, micro_size=2)
    config.parallel = replace(config.parallel, data=1)
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in groups.items()})


def row(kind: Any, tensor: int, micro_size: int, seconds: float) -> MeasuredLayer:
    """Times in fixed ratios; the halves together take 5/4 of the whole backward."""
    return MeasuredLayer(kind, tensor, 1, micro_size, seconds, 2 * seconds, 1.5 * seconds, seconds, 0.9 * seconds)


ROWS = tuple(
    row(kind, tensor, micro, weight * (1 + micro) / tensor * 1e-3)
    for kind, weight in (("embedding", 0.1), ("block", 1.0), ("head", 2.0))
    for tensor in (1, 2)
    for micro in (1, 4)
)
COLLECTIVES = (
    MeasuredCollective("all_reduce", 2, "gloo", 1e-3, 1e9, 0.5),
    MeasuredCollective("all_reduce", 4, "gloo", 4e-3, 0.5e9, 0.5),
    MeasuredCollective("send", 2, "shared_memory", 1e-5, 4e9, 1.0),
    MeasuredCollective("send", 2, "gloo", 1e-4, 2e9, 0.7),
)


def machine(**fields: Any) -> Hardware:
    measured = Measurements(
        date="2026-01-31",
        torch="2.0",
        shape=shape_of(run()),
        update_seconds=2e-9,
        action_seconds=5e-5,
        layers=ROWS,
        contention=(Contention(1, 1.0), Contention(2, 1.1), Contention(4, 2.3)),
    )
    inside = IntraNodeLink(1e-4, 1e9, 1e9, COLLECTIVES)
    group = NodeGroup("here", DEVICE, 4, inside, Network(1e-4, 1e9, 1), num_nodes=1)
    return Hardware("made up", (group,), measured=replace(measured, **fields))
