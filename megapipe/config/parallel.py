"""How ranks are laid out and how they communicate."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class ParallelConfig:
    """Layout of the ranks: data x pipeline x context x tensor, with tensor ranks adjacent."""

    tensor: int = 1
    """Number of ranks that split every matrix."""
    pipeline: int = 1
    """Number of pipeline ranks, which hold successive parts of the model."""
    context: int = 1
    """Number of ranks that split the tokens of every sample."""
    context_attention: Literal["ring", "all_to_all"] = "ring"
    """How attention works across context ranks. ring: keys and values are passed around a ring. all_to_all (Ulysses):
    ranks exchange heads for tokens; the number of heads must be divisible."""
    data: int | None = None
    """Number of replicas, which split every batch; null means that data parallelism uses the remaining ranks."""
    sequence: bool = False
    """Split the tokens of every sample over the tensor ranks between the matrices too (sequence parallelism): less
    memory for the same communication volume."""
    sequence_chunks: int = 1
    """With parallel.sequence: number of chunks in which tokens are gathered and scattered, so that the communication
    of one overlaps with the matrix product of another."""
    layers_per_stage: list[int] | None = None
    """Number of layers in every pipeline stage, in order, where embedding and output head count as one layer each;
    null balances the stages by FLOPs."""
    links: Literal["auto", "gloo", "shared_memory", "nccl"] = "auto"
    """Transport between pipeline stages. auto: nccl on GPUs, shared memory on the CPUs of one host, otherwise gloo."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto uses a GPU if there is one."""
    timeout_seconds: float = 600.0
    """Seconds that a rank waits for another one before it reports it and ends the job."""

    @property
    def sequence_shards(self) -> int:
        """Number of ranks that split the tokens of a sample between the matrices."""
        return self.tensor if self.sequence else 1

    def sequence_problems(self, sequence_length: int) -> list[str]:
        """Return one message for each broken rule of sequence parallelism. sequence_length: tokens per sample."""
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
                f"parallel.sequence is true but parallel.tensor is {self.tensor}; sequence parallelism splits tokens "
                "over tensor ranks: set parallel.tensor to 2 or more, or parallel.sequence to false"
            ]
        parts = self.context * self.tensor * chunks
        if sequence_length % parts:
            factors = (("context", self.context), ("tensor", self.tensor), ("sequence_chunks", chunks))
            named = " x ".join(f"parallel.{name} {size}" for name, size in factors if size > 1)
            return [
                f"data.sequence_length {sequence_length} is not divisible by {named}, as parallel.sequence requires; "
                f"use a multiple of {parts}, or set parallel.sequence to false"
            ]
        return []
