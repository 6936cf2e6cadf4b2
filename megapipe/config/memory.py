"""How a run saves memory: activations that are recomputed, and tensors that are kept in host memory between uses."""

from dataclasses import dataclass, field
from typing import Any, Literal

from megapipe.config.field_types import PositiveFloat, PositiveInt, bound_problems

RecomputedPart = Literal["attention", "mlp", "norms"]
Part = RecomputedPart | Literal["block"]
"""A part of a block that the backward of a layer recomputes itself. `block` is a whole block of multi-token
prediction, which the backward of the head reruns; other blocks are rerun by actions of the schedule."""


@dataclass(kw_only=True)
class RecomputeConfig:
    """Activations that are recomputed in the backward pass instead of saved, to save memory."""

    method: Literal["none", "selective", "full", "auto"] = "none"
    """none: save everything. selective: recompute the activations in `parts` within each block. full: save only the
    inputs of blocks, and rerun the blocks right before their backward. auto: use the method that the planner predicts
    to be fastest among those that fit into `memory` on every rank (docs/memory.md)."""
    parts: list[RecomputedPart] = field(default_factory=lambda: ["attention", "mlp", "norms"])
    """For selective: what to recompute. attention: the attention weights of unfused attention (fused attention never
    saves them). mlp: the activation between the two matrices of the MLP. norms: the outputs of the normalizations."""
    every: PositiveInt = 1
    """For full: number of neighboring blocks that are rerun together, from the input of the first. More blocks mean
    fewer saved inputs, and more activations at once."""
    num_blocks: PositiveInt | None = None
    """For full: number of blocks at the start of each stage to rerun; the others save everything. null means every
    block."""
    memory: PositiveFloat | None = None
    """For auto: GiB that all tensors of a rank may take, including weights and optimizer state; null means the
    device's memory less a tenth."""
    hardware: str | None = None
    """For auto: hardware file or preset that predicts times; null means the hardware of --plan, or else the
    preset of this machine's devices."""
    logits: bool = False
    """Recompute the logits in the backward pass, a chunk of tokens at a time, with any method. The loss then saves 4
    bytes per token instead of a [tokens, vocabulary] gradient, for one more matrix product in the output head. Not
    available for schedules that split the backward."""

    @property
    def parts_in_heads(self) -> frozenset[Part]:
        """Parts of a head's blocks of multi-token prediction that the head's backward recomputes."""
        if self.method == "full":
            return frozenset({"block"})
        return frozenset(self.parts if self.method == "selective" else ())

    def problems(self) -> list[str]:
        """Return one message for each rule that the fields break."""
        problems = bound_problems(self, "recompute")
        if self.method != "full" and (self.every != 1 or self.num_blocks is not None):
            names = "recompute.every and recompute.num_blocks"
            problems.append(_needs(names, "recompute.method", "full", self.method))
        if self.method != "auto" and (self.memory is not None or self.hardware is not None):
            problems.append(_needs("recompute.memory and recompute.hardware", "recompute.method", "auto", self.method))
        if self.method == "auto" and self.parts != RecomputeConfig().parts:
            problems.append(
                "recompute.parts is set but recompute.method is auto, which chooses the "
                "parts itself; set recompute.method selective, or leave recompute.parts out"
            )
        if self.method == "selective" and not self.parts:
            problems.append("recompute.parts is empty; name attention, mlp or norms, or set recompute.method none")
        return problems


def _needs(names: str, field: str, value: str, actual: str) -> str:
    """Return the message for fields that have an effect with one value of another field only."""
    return f"{names} need {field} {value}, and it is {actual}; set it to {value}, or leave them out"


def limit_problems(section: Any, place: str, kind: str) -> list[str]:
    """Return a message if a section limits a kind of tensors on a rank both in GiB and in layers. place: its name."""
    memory, buffers = getattr(section, f"{kind}_memory"), getattr(section, f"{kind}_buffers")
    if memory is None or buffers == getattr(type(section), f"{kind}_buffers"):
        return []
    return [
        f"{place}.{kind}_memory {memory} and {place}.{kind}_buffers "
        f"{buffers} both limit the same; leave one of the two out"
    ]


@dataclass(kw_only=True)
class OffloadConfig:
    """Activations, optimizer state and weights that are kept in host memory between uses.

    Example:
        >>> from megapipe import OffloadConfig
        >>> OffloadConfig(activations="blocks", optimizer=True).problems()
        []
    """

    activations: Literal["none", "blocks", "auto"] = "none"
    """Which activations are moved to host memory. blocks: those of the blocks that `every` and `num_blocks` select.
    auto: keep, move or recompute the activations of each block, so that they fit into `memory` and copies overlap with
    compute (docs/offload.md)."""
    every: PositiveInt = 1
    """For blocks: move the activations of one in this many blocks of a stage, starting with the first."""
    num_blocks: PositiveInt | None = None
    """For blocks: maximum number of blocks of a stage to move; null means no maximum."""
    prefetch: PositiveInt | None = None
    """Number of compute actions between the start of a reload and the backward that needs it; at most as many reloaded
    blocks wait on the device. null means 1, or for auto the value up to 4 that needs the least recomputation."""
    memory: PositiveFloat | None = None
    """For auto: GiB of activations that a rank may keep on its device; null is only valid for the other modes."""
    bandwidth: PositiveFloat | None = None
    """For auto: GB/s of a copy between device and host in one direction; null means measured at the start."""
    compute: PositiveFloat | None = None
    """For auto: TFLOP/s at which the blocks run; null means the speed of a large matrix product, measured at the
    start."""
    optimizer: bool = False
    """Keep optimizer moments, and the fp32 master weights of bf16 runs, in host memory except during their update."""
    weights: bool = False
    """Keep weights in host memory too, except those of the layers that are computing."""
    weight_buffers: PositiveInt = 2
    """With offload.weights: number of layers whose weights a rank may hold on its device at once; 2 copies one layer
    while another is used."""
    weight_memory: PositiveFloat | None = None
    """With offload.weights: GiB of weights that a rank may hold on its device at once, instead of a number of layers;
    the largest layer must fit. null means weight_buffers layers."""

    def problems(self) -> list[str]:
        """Return one message for each rule that the fields break."""
        problems = bound_problems(self, "offload")
        if self.activations != "blocks" and (self.every != 1 or self.num_blocks is not None):
            names = "offload.every and offload.num_blocks"
            problems.append(_needs(names, "offload.activations", "blocks", self.activations))
        if self.activations == "auto" and self.memory is None:
            problems.append("offload.activations auto needs offload.memory, the GiB that a rank may hold; set it")
        if self.activations != "auto" and (self.memory, self.bandwidth, self.compute) != (None, None, None):
            names = "offload.memory, offload.bandwidth and offload.compute"
            problems.append(_needs(names, "offload.activations", "auto", self.activations))
        if self.activations == "none" and self.prefetch is not None:
            problems.append("offload.prefetch needs offload.activations blocks or auto; set one, or leave it out")
        if self.weights and not self.optimizer:
            problems.append(
                "offload.weights needs offload.optimizer, because weights are updated where "
                "the optimizer state is; set offload.optimizer true, or leave offload.weights out"
            )
        if self.weights:
            return problems + limit_problems(self, "offload", "weight")
        return problems + [
            f"offload.{name} needs offload.weights; set offload.weights true, or leave offload.{name} out"
            for name in ("weight_buffers", "weight_memory")
            if getattr(self, name) != getattr(OffloadConfig, name)
        ]
