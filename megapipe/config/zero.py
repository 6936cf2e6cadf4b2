"""How data-parallel replicas shard their state instead of each holding all of it (ZeRO)."""

import re
from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True)
class ZeroConfig:
    """Sharding of weights, gradients and optimizer state over replicas (ZeRO, arXiv 1910.02054)."""

    stage: Literal[0, 1, 2, 3] = 0
    """What is sharded over the replicas. 0: nothing. 1: optimizer state and master weights. 2: gradients too. 3:
    weights too."""
    weight_buffers: int = 2
    """For stage 3: number of layers whose full weights a rank may hold at once; 2 gathers one layer ahead of its
    use."""
    gradient_buffers: int = 2
    """For stages 2 and 3: number of layers whose full gradients a rank may hold at once; 2 reduces one layer's
    gradients while those of the next layer are computed."""
    shard_size: int | None = None
    """Number of replicas that share one copy of the state; further groups of replicas hold copies. null means that all
    replicas share one copy."""
    layer_stages: dict[str, int] = field(default_factory=dict)
    """Stages of layers that shard less than zero.stage, for example {embedding: 1, blocks.0: 2}. Keys are embedding,
    head, blocks (all blocks) or the name of one block; a block's own name has precedence. Values are from 1 to
    zero.stage. A layer of stage 1 needs no gather before each use, but takes more memory."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which gradients are sent and summed over replicas. They are accumulated in fp32."""

    def problems(self) -> list[str]:
        """Return one message for each rule that the fields break."""
        found = [
            f"zero.{name} is {value}; it must be at least {least}"
            for name, value, least in (
                ("weight_buffers", self.weight_buffers, 1),
                ("gradient_buffers", self.gradient_buffers, 1),
                ("shard_size", 2 if self.shard_size is None else self.shard_size, 2),
            )
            if value < least
        ]
        plain = ZeroConfig()
        for name, least in (("weight_buffers", 3), ("gradient_buffers", 2), ("shard_size", 1), ("reduce_dtype", 1)):
            if self.stage < least and getattr(self, name) != getattr(plain, name):
                found.append(
                    f"zero.{name} is {getattr(self, name)} but zero.stage {self.stage} does not use it; set "
                    f"zero.stage to at least {least}, or leave zero.{name} out"
                )
        return found + self._layer_problems()

    def _layer_problems(self) -> list[str]:
        found = []
        for name, stage in self.layer_stages.items():
            if not re.fullmatch(r"embedding|head|blocks(\.\d+)?", name):
                found.append(
                    f"zero.layer_stages names {name!r}, which is not a layer; use embedding, head, blocks, or one "
                    "block such as blocks.0"
                )
            if not isinstance(stage, int) or not 1 <= stage <= self.stage:
                found.append(
                    f"zero.layer_stages {{{name}: {stage}}} must be from 1 to zero.stage, which is {self.stage}"
                )
        return found

    def block_problems(self, num_blocks: int) -> list[str]:
        """Return one message for each block in layer_stages that a model of so many blocks does not have."""
        return [
            f"zero.layer_stages names {name}, but model.num_layers is {num_blocks}: blocks are numbered from 0 to "
            f"{num_blocks - 1}"
            for name in self.layer_stages
            if re.fullmatch(r"blocks\.\d+", name) and int(name.removeprefix("blocks.")) >= num_blocks
        ]

    def stage_of(self, name: str) -> int:
        """Return the stage of a layer by its name, or by the name of one of its parameters."""
        if not self.layer_stages:
            return self.stage
        layer = ".".join(name.split(".")[: 2 if name.startswith("blocks.") else 1])
        return self.layer_stages.get(layer, self.layer_stages.get(layer.partition(".")[0], self.stage))

    def replica_problems(self, replicas: int) -> list[str]:
        """Return one message for each rule that the number of replicas of the weights, data x context, breaks."""
        if self.stage and replicas == 1:
            return [
                f"zero.stage is {self.stage} but there is only one replica of the weights, so nothing can be sharded: "
                "start more ranks, reduce parallel.pipeline or parallel.tensor, or set zero.stage 0"
            ]
        if self.shard_size is not None and replicas % self.shard_size:
            return [
                f"zero.shard_size {self.shard_size} does not divide the {replicas} replicas of the weights; set it to "
                "a divisor of that number, or to null for one copy over all replicas"
            ]
        return []

    def num_shards(self, replicas: int) -> int:
        """Return the number of ranks that share one copy of the state; 1 if nothing is sharded."""
        if self.stage == 0:
            return 1
        return replicas if self.shard_size is None else self.shard_size
