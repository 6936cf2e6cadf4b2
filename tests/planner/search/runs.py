"""Small runs, machines and samples of layouts for tests of the search."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from megapipe.config.model import ModelConfig
from megapipe.config.run import BatchConfig, DataConfig, PretrainConfig, TrainingConfig
from megapipe.layout.hardware.description import Device, Efficiency, Hardware, IntraNodeLink, Network, NodeGroup


def run(**model: Any) -> PretrainConfig:
    """A GPT of 4 blocks in bf16 on batches of 8."""
    sizes = {"vocabulary_size": 500, "num_layers": 4, "hidden_size": 256, "num_heads": 4, "max_positions": 128} | model
    return PretrainConfig(
        model=ModelConfig(**sizes),
        data=DataConfig(prefix="corpus", sequence_length=128),
        batch=BatchConfig(global_size=8),
        training=TrainingConfig(precision="bf16"),
    )


def machine(
    memory: float = 1e9, inside: float = 1e10, outside: float = 1e9, node: int = 4, nodes: int | None = None
) -> Hardware:
    """Nodes of equal devices. memory: bytes of one. inside, outside: bytes per second, of a node the latter."""
    device = Device("accelerator", {"bf16": 1e13, "fp32": 5e12}, memory, 1e12, Efficiency(0.7, 30.0, 1e-6))
    links = IntraNodeLink(1e-6, inside, inside), Network(5e-6, outside, 1)
    group = NodeGroup("all", device, node, *links, num_nodes=nodes, price_per_hour=8.0)
    return Hardware("small", (group,))


@st.composite
def runs(draw: st.DrawFn) -> PretrainConfig:
    """Runs whose sizes divide by little and by much."""
    heads, mtp_layers = draw(st.sampled_from([2, 3, 4, 8])), draw(st.sampled_from([0, 0, 0, 2]))
    base = run(
        num_layers=draw(st.integers(1, 9)),
        hidden_size=heads * 32,
        num_heads=heads,
        num_kv_heads=draw(st.sampled_from([None, 1])),
        tie_embeddings=draw(st.booleans()),
        vocabulary_size=draw(st.sampled_from([100, 2000])),
        mtp_layers=mtp_layers,
        **({"positions": "rotary"} if mtp_layers else {}),
    )
    return replace(base, batch=replace(base.batch, global_size=draw(st.sampled_from([4, 6, 8, 12, 16]))))
