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
    sequence: bool = False
    """Tensor ranks share the tokens of every sample between their matrices too, so that no rank keeps what all would
    (sequence parallelism); for the same traffic and less memory."""
    sequence_chunks: int = 1
    """sequence: pieces in which tokens are gathered and scattered, each beside the matrix product of another."""
    layers_per_stage: list[int] | None = None
    """Layers of every stage in order, embedding and head counted as one each; null balances them by FLOPs."""
    links: Literal["auto", "gloo", "shared_memory", "nccl"] = "auto"
    """Transport between stages; auto is nccl on GPUs, shared memory on one host's CPUs, else gloo."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; auto takes a GPU where there is one."""
    timeout_seconds: float = 600.0
    """How long a rank waits for a silent peer before it names it and ends the job."""

    @property
    def sequence_shards(self) -> int:
        """Ranks that share the tokens of a sample between their matrices."""
        return self.tensor if self.sequence else 1

    def sequence_problems(self, sequence_length: int) -> list[str]:
        """Every rule of sequence parallelism that is broken, one message each. sequence_length: tokens of a sample."""
        chunks = self.sequence_chunks
        if chunks < 1:
            return [f"parallel.sequence_chunks is {chunks}; it must be at least 1"]
        if not self.sequence:
            if chunks == 1:
                return []
            return [
                f"parallel.sequence_chunks is {chunks} but parallel.sequence is false; set it to true, or leave "
                "parallel.sequence_chunks out"
            ]
        if self.tensor < 2:
            return [
                f"parallel.sequence is true but parallel.tensor is {self.tensor}: there is nobody to share tokens "
                "with; set parallel.tensor to 2 or more, or parallel.sequence to false"
            ]
        parts = self.context * self.tensor * chunks
        if sequence_length % parts:
            factors = (("context", self.context), ("tensor", self.tensor), ("sequence_chunks", chunks))
            named = " x ".join(f"parallel.{name} {size}" for name, size in factors if size > 1)
            return [
                f"data.sequence_length {sequence_length} is not divisible by {named}, which parallel.sequence needs; "
                f"take a multiple of {parts}, or set parallel.sequence to false"
            ]
        return []
