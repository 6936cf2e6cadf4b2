"""What the cost model answers."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megapipe.config.run import PretrainConfig


@dataclass(frozen=True)
class Term:
    """A part of a step's time, as `explain` prints it.

    name: such as `compute`, `bubble`, `tensor`, `pipeline`, `data`, `update`. seconds: that it adds to the step; the
    terms of a step add up to its time. source: the formula, paper and section, or measurement that it comes from.
    """

    name: str
    seconds: float
    source: str


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the device of a rank at one pipeline coordinate.

    weights to moments: what lives between steps. activations: the most that any moment of a step holds.
    buffers: whole weights and gradients of sharded units, and what their sums need, at the most. messages: what other
    ranks' stages send arrives in, and stays in until its backward, and what is sent until it has left. temporaries:
    peak bytes of tensors that exist only within a backward (`spec.temporaries`).
    """

    weights: int
    master: int
    gradients: int
    moments: int
    activations: int
    buffers: int
    messages: int = 0
    temporaries: int = 0

    @property
    def total(self) -> int:
        """All of it: a bound, as its parts need not peak together."""
        state = self.weights + self.master + self.gradients + self.moments
        return state + self.activations + self.buffers + self.messages + self.temporaries


@dataclass(frozen=True)
class Estimate:
    """A step of one layout on one machine.

    config: with parallel.data filled in. world_size: ranks. step_seconds: of one optimizer step. terms: see there.
    memory: by pipeline coordinate. memory_limits: bytes of the smallest device among all replicas and shards of each
    coordinate. model_flops: of a step, nothing recomputed. executed_flops: with what is recomputed, as Narayanan et
    al. (2021, arXiv 2104.04473, equation 3) count where all of it is.
    """

    config: PretrainConfig
    world_size: int
    step_seconds: float
    terms: tuple[Term, ...]
    memory: tuple[RankMemory, ...]
    memory_limits: tuple[float, ...]
    model_flops: float
    executed_flops: float

    @property
    def tokens_per_second(self) -> float:
        """Of the whole machine."""
        return self.config.batch.global_size * self.config.data.sequence_length / self.step_seconds

    @cached_property
    def peak_bytes(self) -> int:
        """Of the fullest rank."""
        return max(memory.total for memory in self.memory)

    @cached_property
    def tightest(self) -> int:
        """The coordinate that exceeds its device by most, or leaves the least of it; on equal devices the fullest."""
        spare = [limit - each.total for each, limit in zip(self.memory, self.memory_limits, strict=True)]
        return spare.index(min(spare))

    @property
    def tightest_bytes(self) -> int:
        """Of a rank at the tightest coordinate."""
        return self.memory[self.tightest].total

    @property
    def memory_limit(self) -> float:
        """Bytes of the smallest device at the tightest coordinate."""
        return self.memory_limits[self.tightest]

    @property
    def fits(self) -> bool:
        """Whether every rank fits its device."""
        return self.tightest_bytes <= self.memory_limit

    @property
    def missing_bytes(self) -> float:
        """By how much the tightest rank exceeds its device; 0 where it fits."""
        return max(0.0, self.tightest_bytes - self.memory_limit)

    def seconds_of(self, name: str) -> float:
        """Of all terms of a name; 0 without any."""
        return sum(term.seconds for term in self.terms if term.name == name)

    def as_json(self) -> dict[str, Any]:
        """The keys that `megapipe plan --json` promises."""
        parallel = self.config.parallel
        layout = {name: getattr(parallel, name) for name in ("data", "tensor", "pipeline", "context", "sequence")}
        layout |= {"micro_size": self.config.batch.micro_size, "schedule": self.config.schedule.name}
        layout |= {"chunks": self.config.schedule.chunks, "zero": self.config.zero.stage}
        layout |= {"recompute": self.config.recompute.method}
        model = {name: getattr(self.config.model, name) for name in ("num_layers", "hidden_size", "vocabulary_size")}
        return {
            "model": model,
            "step_time_s": self.step_seconds,
            "tokens_per_s_per_device": self.tokens_per_second / self.world_size,
            "model_tflops_per_device": self.model_flops / self.step_seconds / self.world_size / 1e12,
            "executed_tflops_per_device": self.executed_flops / self.step_seconds / self.world_size / 1e12,
            "memory_bytes": [memory.total for memory in self.memory],
            "memory_limit_bytes": self.memory_limit,
            "memory_limits_bytes": list(self.memory_limits),
            "fits": self.fits,
            "layout": layout,
            "terms": [vars(term) for term in self.terms],
        }
