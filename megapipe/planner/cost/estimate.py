"""Results of the cost model, and its assumptions."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware, hardware_device_type
from megapipe.layout.scheduling import schedule_name


@dataclass(frozen=True)
class Term:
    """A part of a step's time, as `explain` prints it.

    name: for example `compute`, `bubble`, `tensor`, `pipeline`, `data`, `update`. seconds: time that it adds to the
    step; all terms add up to the step's time. source: the formula, paper and section, or measurement behind it.
    """

    name: str
    seconds: float
    source: str


class RankMemory(NamedTuple):
    """Bytes on the device of a rank at one pipeline coordinate.

    weights to moments: state between steps. activations: peak during a step. buffers: peak of whole weights and
    gradients of sharded units, and of buffers to sum them. messages: slots of received tensors, which are kept until
    their backward, and tensors that are being sent. temporaries: peak bytes of tensors that exist only within a
    backward (`spec.peaks`).
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
        """Return the sum of all parts. It is an upper bound, because the parts may peak at different times."""
        return sum(self)


@dataclass(frozen=True)
class Estimate:
    """Estimated time and memory of a step of one layout on one machine.

    config: with parallel.data filled in. world_size: number of ranks. step_seconds: seconds of one optimizer step.
    terms: parts of this time. memory: by pipeline coordinate. memory_limits: bytes of the smallest device among all
    replicas and shards of each coordinate. model_flops: FLOPs of a step without recomputation. executed_flops: FLOPs
    with recomputation; if everything is recomputed, as in Narayanan et al. (2021, arXiv 2104.04473, equation 3).
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
        """Return the tokens per second of all ranks together."""
        return self.config.batch.global_size * self.config.data.sequence_length / self.step_seconds

    @cached_property
    def peak_bytes(self) -> int:
        """Return the bytes of the fullest rank."""
        return max(memory.total for memory in self.memory)

    @cached_property
    def tightest(self) -> int:
        """Return the pipeline coordinate with the least free memory, which is negative if it does not fit."""
        spare = [limit - each.total for each, limit in zip(self.memory, self.memory_limits, strict=True)]
        return spare.index(min(spare))

    @property
    def tightest_bytes(self) -> int:
        """Return the bytes of a rank at the tightest coordinate."""
        return self.memory[self.tightest].total

    @property
    def memory_limit(self) -> float:
        """Return the bytes of the smallest device at the tightest coordinate."""
        return self.memory_limits[self.tightest]

    @property
    def fits(self) -> bool:
        """Return whether every rank fits its device."""
        return self.tightest_bytes <= self.memory_limit

    @property
    def missing_bytes(self) -> float:
        """Return by how many bytes the tightest rank exceeds its device; 0 if it fits."""
        return max(0.0, self.tightest_bytes - self.memory_limit)

    def seconds_of(self, name: str) -> float:
        """Return the total seconds of all terms with a name; 0 if there are none."""
        return sum(term.seconds for term in self.terms if term.name == name)

    def as_json(self) -> dict[str, Any]:
        """Return the estimate as `megapipe plan --json` prints it."""
        config, parallel = self.config, self.config.parallel
        layout = {name: getattr(parallel, name) for name in ("data", "tensor", "pipeline", "context", "sequence")}
        layout |= {"micro_size": config.batch.micro_size, "schedule": schedule_name(config)}
        layout |= {"chunks": config.schedule.chunks, "zero": config.zero.stage}
        layout |= {"recompute": config.recompute.method}
        model = {name: getattr(config.model, name) for name in ("num_layers", "hidden_size", "vocabulary_size")}
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


SLOW_DOWNS = {"cpu": 2.0, "cuda": 1.1}
"""Slow-down by device type. A CPU's cores both compute and communicate, so they alternate. On a GPU, copy engines
and network adapters do most of it: Galvatron's authors measure 1.1 to 1.3, of which this is the lower end."""


@dataclass(frozen=True)
class Assumptions:
    """Properties of an implementation that no configuration sets. The defaults describe this project's engine.

    slow_down: factor by which compute and communication slow down while they overlap, at least 1 (Galvatron, arXiv
    2211.13878, cost estimator); 0 selects the factor of the device type. scattered_sends: each of t tensor ranks sends
    1/t of a message between stages, and the receiving ranks gather it (Narayanan et al. 2021, arXiv 2104.04473,
    section 4.1). waits_for_sends: no message between stages overlaps with compute. gathers_beside_forward: gathers of
    weights that an update leaves in shards (ZeRO 1 and 2) overlap with the first forwards of the next step.
    megatron_kernels: as in Megatron-LM, the loss runs one kernel for each of its operations, in fp32, and dropout
    stores its mask, one byte per element. tensor_by_tensor: with ZeRO 3, each weight has its own gather and each
    gradient its own sum; see `tensor_by_tensor_seconds`.
    """

    slow_down: float = 0.0
    scattered_sends: bool = False
    waits_for_sends: bool = False
    gathers_beside_forward: bool = False
    megatron_kernels: bool = False
    tensor_by_tensor: bool = False

    def on(self, hardware: Hardware) -> "Assumptions":
        """Return these assumptions with the machine's slow-down filled in."""
        return self if self.slow_down else replace(self, slow_down=SLOW_DOWNS[hardware_device_type(hardware)])


ENGINE = Assumptions()
"""Assumptions of this project's engine."""
