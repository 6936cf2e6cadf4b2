"""The rows of docs/gpu_without_gpu.md: training steps on a fake GPU.

A row's peak is compared with the prediction that a run checks before it starts (`layout.prediction`).
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.data.shard_writer import ShardWriter
from megapipe.layout.prediction import predict_rank
from megapipe.layout.stages import StageLayout
from megapipe.layout.table import lowered_schedule
from tests.fake_cuda.server import run_fake


def gpt(layers: int, hidden: int, heads: int, vocabulary: int = 50304, length: int = 1024) -> ModelConfig:
    """A GPT-2 shape."""
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "max_positions": length}
    return ModelConfig(vocabulary_size=vocabulary, activation="gelu_tanh", tie_embeddings=True, **sizes)  # type: ignore[arg-type]


MODELS = {"33M": gpt(4, 512, 8, 8192, 256), "125M": gpt(12, 768, 12), "1.3B": gpt(24, 2048, 16)}
Changes = Mapping[str, Mapping[str, Any]]
ROWS: tuple[tuple[str, str, Changes], ...] = (
    ("125M", "bf16", {}),
    ("33M", "bf16", {}),
    ("125M", "fp32", {"training": {"precision": "fp32"}}),
    ("125M", "fp8 tensorwise", {"training": {"fp8": "tensorwise"}}),
    ("125M", "full recomputation", {"recompute": {"method": "full"}}),
    ("125M", "offloaded activations", {"offload": {"activations": "blocks"}}),
    ("125M", "offloaded optimizer", {"offload": {"optimizer": True}}),
    ("125M", "2 stages, 1f1b", {"parallel": {"pipeline": 2}}),
    ("125M", "2 stages, zb_h1", {"parallel": {"pipeline": 2}, "schedule": {"name": "zb_h1"}}),
    ("125M", "2 tensor ranks, sequence", {"parallel": {"tensor": 2, "sequence": True}}),
    ("125M", "2 replicas, ZeRO 1", {"parallel": {"data": 2}, "zero": {"stage": 1}}),
    ("125M", "2 replicas, ZeRO 3", {"parallel": {"data": 2}, "zero": {"stage": 3}}),
    ("125M", "2 context ranks, ring", {"parallel": {"context": 2}}),
    ("1.3B", "bf16", {}),
    ("1.3B", "2 x 2 x 2 (tensor, pipeline, data)", {"parallel": {"tensor": 2, "pipeline": 2, "data": 2}}),
)
SPARE = 2**21
"""Bytes that a step may have in addition to its rehearsal's: samples of the steps before and after it."""


def config_of(prefix: str, model: str, changes: Changes) -> PretrainConfig:
    """A row's configuration: micro-batches of four samples, four a step."""
    shape = MODELS[model]
    config = PretrainConfig(model=shape)
    length = shape.max_positions
    config.data = replace(config.data, prefix=prefix, sequence_length=length, mask_end_of_document=False)
    config.training = replace(config.training, precision="bf16")
    for group, values in changes.items():
        setattr(config, group, replace(getattr(config, group), **values))
    replicas = config.parallel.data or 1
    config.batch = replace(config.batch, micro_size=4, global_size=16 * replicas)
    return config


def run_row(prefix: str, model: str, changes: Changes, **how: Any) -> tuple[PretrainConfig, list[Any], list[int]]:
    """Run a row. Return its configuration, the ranks' reports, and the peak bytes that are predicted for each."""
    from tests.fake_cuda import runs

    config = config_of(prefix, model, changes)
    config.parallel = replace(config.parallel, data=config.parallel.data or 1)
    ranks = prod(getattr(config.parallel, name) for name in ("data", "pipeline", "tensor", "context"))
    reports = run_fake(runs.train, config, ranks=ranks, timeout=300.0, **how)
    problems = [fault for report in reports for fault in report.faults]
    assert not problems, f"{model}, {changes}: {problems}"
    schedule = lowered_schedule(config, StageLayout.of(config))
    predicted = [predict_rank(config, schedule, rank, device="cuda").device_bytes() for rank in range(ranks)]
    return config, reports, predicted


def write_corpus(folder: Path) -> str:
    """A shard of tokens: nothing looks at them."""
    prefix = folder / "corpus"
    generator = np.random.default_rng(0)
    with ShardWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(64):
            writer.add_document([generator.integers(0, 8000, size=2048).astype(np.uint16)])
        writer.commit()
    return str(prefix)
