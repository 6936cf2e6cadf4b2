"""Configurations and machines for tests of the cost model."""

from dataclasses import replace
from typing import Any

from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import (
    Device,
    Efficiency,
    Hardware,
    IntraNodeLink,
    Network,
    NodeGroup,
    load_hardware,
)
from megapipe.planner.cost.estimate import Assumptions
from megapipe.planner.cost.model import estimate, predict

NOMINAL = Efficiency()
PLAIN = Assumptions(slow_down=1.0)
"""As the simulator: what runs side by side does not slow down."""
SMALL = ModelConfig(
    vocabulary_size=1024,
    num_layers=16,
    hidden_size=2048,
    num_heads=16,
    max_positions=1024,
    tie_embeddings=False,
    activation="gelu_tanh",
)


def config_of(model: ModelConfig = SMALL, **groups: Any) -> PretrainConfig:
    """A run in bf16 with fields of groups changed; parallel.data is 1 by default."""
    groups.setdefault("training", {}).setdefault("precision", "bf16")
    groups.setdefault("parallel", {}).setdefault("data", 1)
    groups.setdefault("data", {}).setdefault("sequence_length", 1024)
    config = PretrainConfig(model=model)
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in groups.items()})


def even_stages(stages: int, layers: int = SMALL.num_layers) -> list[int]:
    """The same number of blocks in each stage, and the embedding and the head."""
    sizes = [layers // stages] * stages
    sizes[0] += 1
    sizes[-1] += 1
    return sizes


def layout(name: str, pipeline: int, microbatches: int, **groups: Any) -> PretrainConfig:
    """A schedule with even stages, and the batch that has this number of micro-batches."""
    stages = pipeline * (2 if name in ("interleaved_1f1b", "modular", "zb_v") else 1)
    parallel = {"pipeline": pipeline, "layers_per_stage": even_stages(stages), **groups.pop("parallel", {})}
    batch = {"global_size": microbatches * parallel.get("data", 1)}
    clipping: dict[str, Any] = {"optimizer": {"clip_norm": None if name == "pipedream" else 1.0}}
    return config_of(parallel=parallel, schedule={"name": name}, batch=batch, **clipping, **groups)


def closed_over_simulated(config: PretrainConfig, hardware: Hardware) -> float:
    """The estimate's seconds over those of the simulation."""
    closed = estimate(config, hardware, assumptions=PLAIN).step_seconds
    return closed / predict(config, hardware, assumptions=PLAIN).estimate.step_seconds


def machine(latency: float = 0.0, bandwidth: float = 1e15, efficiency: Efficiency = NOMINAL) -> Hardware:
    """Nodes of eight GPUs; by default their links take no time to speak of."""
    device = Device("GPU", {"bf16": 300e12, "fp16": 300e12, "fp32": 20e12}, 80e9, 2e12, efficiency)
    group = NodeGroup("n", device, 8, IntraNodeLink(latency, bandwidth, bandwidth), Network(latency, bandwidth, 8))
    return Hardware("machine", (group,))


SELENE = load_hardware("a100-80")
