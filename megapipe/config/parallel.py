"""How ranks are laid out and how they talk."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class ParallelConfig:
    """How the ranks are laid out: data x pipeline x context x tensor, tensor ranks adjacent."""

    tensor: int = 1
    """Ranks that share every matrix."""
    pipeline: int = 1
    """Ranks that hold successive stages."""
    context: int = 1
    """Ranks that share every sample, each holding some of its tokens."""
    context_attention: Literal["ring", "all_to_all"] = "ring"
    """How tokens on several context ranks see each other: ring sends keys and values round, all_to_all (Ulysses)
    trades heads for tokens and needs heads that divide."""
    data: int | None = None
    """Replicas that share every batch; null takes what the world size leaves."""
    layers_per_stage: list[int] | None = None
    """Layers of every stage in order, embedding and head counted as one each; null balances them by FLOPs."""
    links: Literal["auto", "gloo", "shared_memory", "nccl"] = "auto"
    """Transport between stages; auto is nccl on GPUs, shared memory on one host's CPUs, else gloo."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; auto takes a GPU where there is one."""
    timeout_seconds: float = 600.0
    """How long a rank waits for a silent peer before it names it and ends the job."""
