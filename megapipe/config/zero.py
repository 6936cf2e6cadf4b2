"""What data-parallel replicas share out among themselves instead of keeping it whole (ZeRO)."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class ZeroConfig:
    """State that replicas hold in shards (Rajbhandari et al. 2020, arXiv 1910.02054)."""

    stage: Literal[0, 1, 2, 3] = 0
    """What is sharded: 0 nothing, 1 master weights and optimizer state, 2 gradients too, 3 weights too."""
    weight_buffers: int = 2
    """stage 3: layers whose weights a rank may hold whole at once; 2 gathers one layer ahead of its use."""
    gradient_buffers: int = 2
    """stage 2 and 3: layers whose gradients a rank may hold whole at once; 2 reduces one layer's while the next
    layer's are computed."""
    shard_size: int | None = None
    """Replicas that share one copy of the state, neighbours in data x context; further ones hold copies of it
    (null: all replicas share one)."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which gradients travel and are summed over the replicas of one copy; they are accumulated in
    fp32."""

    def problems(self) -> list[str]:
        """Rules that single fields break, one message each."""
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
                    f"zero.{name} is {getattr(self, name)} with zero.stage {self.stage}, which has no use for it; set "
                    f"zero.stage {least} or above, or leave it out"
                )
        return found

    def replica_problems(self, replicas: int) -> list[str]:
        """Rules that the number of replicas of the weights, data x context, breaks, one message each."""
        if self.stage and replicas == 1:
            return [
                f"zero.stage is {self.stage} with one replica of the weights; nobody is there to share its state: "
                "start more ranks, make parallel.pipeline or parallel.tensor smaller, or set zero.stage 0"
            ]
        if self.shard_size is not None and replicas % self.shard_size:
            return [
                f"zero.shard_size {self.shard_size} does not divide the {replicas} replicas of the weights; set it to "
                "a divisor of them, or null for one copy over all"
            ]
        return []

    def num_shards(self, replicas: int) -> int:
        """Ranks that share one copy of the state; 1 where nothing is sharded."""
        if self.stage == 0:
            return 1
        return replicas if self.shard_size is None else self.shard_size
