"""The optimizer that a configuration names."""

from megapipe.config.optimizer import OptimizerConfig
from megapipe.kernels.ops import OPS
from megapipe.kernels.registry import Registry
from megapipe.optim.muon import FlatMuon
from megapipe.optim.optimizer import FlatAdamW, FlatOptimizer, FlatSGD
from megapipe.parallel.groups import Group


def make_optimizer(
    config: OptimizerConfig,
    kernels: Registry = OPS,
    seed: int = 0,
    tensor_group: Group | None = None,
    shard_group: Group | None = None,
) -> FlatOptimizer:
    """The optimizer that `optimizer.name` names. kernels, seed: see FlatOptimizer. The groups: see FlatMuon."""
    if config.name == "muon":
        return FlatMuon(config, kernels, seed, tensor_group, shard_group)
    return {"adamw": FlatAdamW, "sgd": FlatSGD}[config.name](config, kernels, seed)
