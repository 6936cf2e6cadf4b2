"""How ranks share a run: the mesh of ranks, what replicas shard (ZeRO), the pipeline schedule, and the choices of
single layers that differ from the rest of a run.

Ranks are numbered with tensor fastest, then context, pipeline and data, so that ranks that communicate most are
nearest (Narayanan et al. 2021, arXiv 2104.04473, section 3.2).

`parallel.layers` maps layers to a `LayerStrategy`. Every question about one layer is answered here, so that trainer,
layout and planner agree.
"""

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from megapipe.config.field_types import Bound, PositiveFloat, PositiveInt, bound_problems
from megapipe.config.memory import limit_problems

if TYPE_CHECKING:
    from megapipe.config.run import PretrainConfig


DIMENSIONS = ("data", "pipeline", "context", "tensor")
"""Dimension names, slowest first."""

Partition = tuple[tuple[int, ...], ...]


class MeshShape:
    """The sizes of the dimensions, and the arithmetic between global ranks and coordinates.

    Args:
        sizes: ranks along each dimension of `DIMENSIONS`; one that is left out has size 1.

    Raises:
        ValueError: an unknown dimension or a size below 1.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        if not isinstance(sizes, Mapping):
            raise ValueError(f"the mesh has sizes {sizes!r}; pass a mapping such as {{'pipeline': 2}}")
        for name, size in sizes.items():
            if name not in DIMENSIONS:
                raise ValueError(f"unknown mesh dimension {name!r}: the dimensions are {', '.join(DIMENSIONS)}")
            if not isinstance(size, Integral):
                raise ValueError(f"mesh dimension {name} has size {size!r}; it must be a whole number")
            if size < 1:
                raise ValueError(f"mesh dimension {name} has size {size}; it must be at least 1")
        self.sizes = MappingProxyType({name: sizes.get(name, 1) for name in DIMENSIONS})

    @classmethod
    def of(cls, parallel: "ParallelConfig") -> "MeshShape":
        """Return the shape that a configuration sets; parallel.data null counts as 1."""
        return cls({name: getattr(parallel, name) or 1 for name in DIMENSIONS})

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.sizes.items())

    @property
    def world_size(self) -> int:
        """Number of ranks in all."""
        return math.prod(self.sizes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a global rank, by dimension."""
        coordinates = {}
        for name in reversed(DIMENSIONS):
            rank, coordinates[name] = divmod(rank, self.sizes[name])
        return coordinates

    def rank_of(self, coordinates: Mapping[str, int]) -> int:
        """Return the global rank at coordinates, which are 0 where they are left out; the inverse of `coordinates`."""
        rank = 0
        for name in DIMENSIONS:
            rank = rank * self.sizes[name] + coordinates.get(name, 0)
        return rank

    def partition(self, *names: str) -> Partition:
        """Return the groups of ranks that differ only in the dimensions `names`."""
        fixed = [name for name in DIMENSIONS if name not in names]
        free = [name for name in DIMENSIONS if name in names]
        return tuple(tuple(self.rank_of(outer | inner) for inner in self._walk(free)) for outer in self._walk(fixed))

    def group_of(self, rank: int, *names: str) -> tuple[int, ...]:
        """Return the group of `partition` that a rank is in."""
        own, free = self.coordinates(rank), [name for name in DIMENSIONS if name in names]
        return tuple(self.rank_of(own | inner) for inner in self._walk(free))

    def stage_partition(self, stages: tuple[int, ...]) -> Partition:
        """Return, for each tensor coordinate, the ranks of all replicas at the pipeline coordinates `stages`, replica
        by replica."""
        return tuple(
            tuple(rank for rank in part if self.coordinates(rank)["pipeline"] in stages)
            for part in self.partition("data", "pipeline", "context")
        )

    def _walk(self, names: list[str]) -> list[dict[str, int]]:
        places = itertools.product(*(range(self.sizes[name]) for name in names))
        return [dict(zip(names, place, strict=True)) for place in places]


_NAME = re.compile(r"embedding|head|blocks|blocks\.(?P<first>\d+)(-(?P<last>\d+))?", re.ASCII)


@dataclass(kw_only=True)
class LayerStrategy:
    """Choices of a layer that differ from the run; null means the same choice."""

    zero: int | None = None
    """ZeRO stage of the layer: from 1 to zero.stage."""
    recompute: Literal["none", "selective", "full"] | None = None
    """Recomputation of a block, as recompute.method. selective recomputes recompute.parts."""
    offload: bool | None = None
    """Whether a block's activations move to host memory, with offload.activations blocks."""
    fp8: bool | None = None
    """Whether a block multiplies in fp8, with training.fp8."""


NO_CHOICES = LayerStrategy()
"""Strategy of a layer that differs from the run in nothing."""


def strategy_of(layers: Mapping[str, LayerStrategy], name: str) -> LayerStrategy:
    """Return the choices of a layer that differ from the run.

    A block's own name has precedence over a range of blocks, and a range over `blocks`; each gives only the fields
    that it sets.

    Args:
        layers: `parallel.layers`.
        name: name of the layer, or of one of its parameters.
    """
    if not layers:
        return NO_CHOICES
    kind, _, rest = name.partition(".")
    block = rest.partition(".")[0]
    ranges = [key for key in layers if kind == "blocks" and "-" in key and int(block) in _range(key)]
    choices: dict[str, Any] = {}
    for key in (kind, *ranges, f"{kind}.{block}"):
        if key in layers:
            choices |= {field: value for field, value in vars(layers[key]).items() if value is not None}
    return LayerStrategy(**choices)


def _range(key: str) -> range:
    first, last = key.removeprefix("blocks.").split("-")
    return range(int(first), int(last) + 1)


def zero_stage_of(config: "PretrainConfig", name: str) -> int:
    """Return the ZeRO stage of a layer. name: name of the layer, or of one of its parameters."""
    stage = strategy_of(config.parallel.layers, name).zero
    return config.zero.stage if stage is None else stage


def is_fp8(config: "PretrainConfig", block: int) -> bool:
    """Return whether a block multiplies in fp8. block: index of the block in the model."""
    training = config.training
    if training.fp8 == "none":
        return False
    choice = strategy_of(config.parallel.layers, f"blocks.{block}").fp8
    usual = training.fp8_first_kept <= block < config.model.num_layers - training.fp8_last_kept
    return usual if choice is None else choice


def layer_is_fp8(config: "PretrainConfig", kind: str, index: int) -> bool:
    """Return whether the blocks of a layer multiply in fp8. A head's blocks of multi-token prediction do if the last
    block does. kind, index: as in LayerSpec."""
    if kind == "head":
        return config.model.mtp_layers > 0 and is_fp8(config, config.model.num_layers - 1)
    return kind == "block" and is_fp8(config, index)


def recompute_method(config: "PretrainConfig", name: str) -> str:
    """Return what a layer recomputes, before `recompute.num_blocks` leaves some out: a value of recompute.method.

    Other layers are never rerun: an embedding saves next to nothing, and the backward of a head follows its forward at
    once. What heads recompute of their blocks is `RecomputeConfig.parts_in_heads`.
    """
    if not name.startswith("blocks"):
        return "none"
    method = strategy_of(config.parallel.layers, name).recompute
    return config.recompute.method if method is None else method


def strategy_problems(config: "PretrainConfig") -> list[str]:
    """Return one message for each rule that `parallel.layers` breaks."""
    problems, taken = [], dict[int, str]()
    blocks = config.model.num_layers
    for key, strategy in config.parallel.layers.items():
        where = f"parallel.layers {key}"
        match = _NAME.fullmatch(key)
        if match is None:
            problems.append(
                f"parallel.layers names {key!r}, which is not a layer; use embedding, "
                "head, blocks, one block such as blocks.0, or a range such as blocks.0-3"
            )
            continue
        if match["first"] is not None:
            first, last = int(match["first"]), int(match["last"] or match["first"])
            if last >= blocks or first > last:
                problems.append(
                    f"parallel.layers names {key}, but model.num_layers is {blocks}: blocks "
                    f"are numbered 0 to {blocks - 1}, in a range the smaller first"
                )
            elif match["last"] is not None:
                other_key = next((taken[block] for block in range(first, last + 1) if block in taken), None)
                if other_key is not None:
                    problems.append(f"parallel.layers {other_key} and {key} overlap; give each block one range")
                taken |= dict.fromkeys(range(first, last + 1), key)
        problems += _layer_problems(config, strategy, where, is_block=key.startswith("blocks"))
    return problems


def _layer_problems(config: "PretrainConfig", strategy: LayerStrategy, where: str, *, is_block: bool) -> list[str]:
    problems = []
    if strategy.zero is not None and not 1 <= strategy.zero <= config.zero.stage:
        problems.append(f"{where}: zero {strategy.zero} must be from 1 to zero.stage, which is {config.zero.stage}")
    for name in ("recompute", "offload", "fp8"):
        if getattr(strategy, name) is not None and not is_block:
            problems.append(f"{where}: {name} is only for transformer blocks; leave it out")
    if strategy.recompute is not None and config.recompute.method == "auto":
        problems.append(
            f"{where}: recompute {strategy.recompute} cannot be combined with "
            "recompute.method auto, which chooses for all blocks; set recompute.method none, "
            "selective or full"
        )
    if strategy.recompute not in (None, "none") and config.offload.activations == "auto":
        problems.append(
            f"{where}: recompute {strategy.recompute} cannot be combined with "
            "offload.activations auto, which chooses by itself what to recompute; set "
            "offload.activations none or blocks"
        )
    if strategy.recompute == "selective" and (config.training.compile or config.offload.activations != "none"):
        problems.append(
            f"{where}: recompute selective cannot be combined with training.compile "
            "or offload.activations; set recompute full for these blocks"
        )
    if strategy.offload is not None and config.offload.activations != "blocks":
        problems.append(
            f"{where}: offload needs offload.activations blocks, and it is "
            f"{config.offload.activations}; set it to blocks, or leave offload out"
        )
    if strategy.fp8 is not None and config.training.fp8 == "none":
        problems.append(f"{where}: fp8 needs training.fp8 tensorwise or rowwise; set it, or leave fp8 out")
    return problems


@dataclass(kw_only=True)
class ParallelConfig:
    """Layout of the ranks: data x pipeline x context x tensor, with tensor ranks adjacent."""

    tensor: PositiveInt = 1
    """Number of ranks that split every matrix."""
    pipeline: PositiveInt = 1
    """Number of pipeline ranks, which hold successive parts of the model."""
    context: PositiveInt = 1
    """Number of ranks that split the tokens of every sample."""
    context_attention: Literal["ring", "all_to_all"] = "ring"
    """How attention works across context ranks. ring: keys and values are passed around a ring. all_to_all (Ulysses):
    ranks exchange heads for tokens; the number of heads must be divisible."""
    data: PositiveInt | None = None
    """Number of replicas, which split every batch; null means that data parallelism uses the remaining ranks."""
    sequence: bool = False
    """Split the tokens of every sample over the tensor ranks between the matrices too (sequence parallelism): less
    memory for the same communication volume."""
    sequence_chunks: PositiveInt = 1
    """With parallel.sequence: number of chunks in which tokens are gathered and scattered, so that the communication
    of one overlaps with the matrix product of another."""
    vocabulary: Literal["tensor", "pipeline", "pipeline_2"] = "tensor"
    """Ranks that share a GPT's output layer and word embeddings. tensor: the tensor ranks of the last and of the
    first stage. pipeline: the ranks of all stages, each of which computes its part of every micro-batch's logits in
    idle time (arXiv 2411.05288, its Vocab-1). pipeline_2: the same with one barrier less and activations of one
    micro-batch less (Vocab-2)."""
    layers_per_stage: list[PositiveInt] | None = None
    """Number of layers in every pipeline stage, in order, where embedding and output head count as one layer each;
    null balances the stages by FLOPs."""
    layers: dict[str, LayerStrategy] = field(default_factory=dict)
    """Choices of some layers that differ from the rest, for example {embedding: {zero: 1}, blocks.0-3: {recompute:
    full}}. Keys are embedding, head, blocks (all blocks), one block or a range of blocks; a block's own name has
    precedence, then a range. Values may set zero, recompute, offload and fp8."""
    links: Literal["auto", "gloo", "shared_memory", "nccl"] = "auto"
    """Transport between pipeline stages. auto: nccl on GPUs, shared memory on the CPUs of one host, otherwise gloo."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto uses a GPU if there is one."""
    timeout_seconds: PositiveFloat = 600.0
    """Seconds that a rank waits for another one before it reports it and ends the job."""

    @property
    def vocabulary_variant(self) -> int:
        """Variant (1 or 2) of the passes of a vocabulary that is sharded over all pipeline ranks; 0 if it is sharded
        over the ranks of one stage."""
        return ("tensor", "pipeline", "pipeline_2").index(self.vocabulary)

    @property
    def sequence_shards(self) -> int:
        """Number of ranks that split the tokens of a sample between the matrices."""
        return self.tensor if self.sequence else 1

    def sequence_problems(self, sequence_length: int) -> list[str]:
        """Return one message for each broken rule of sequence parallelism. sequence_length: tokens per sample."""
        chunks = self.sequence_chunks
        if not self.sequence:
            if chunks == 1:
                return []
            return [
                f"parallel.sequence_chunks is {chunks} but parallel.sequence is "
                "false; set it to true, or leave parallel.sequence_chunks out"
            ]
        if self.tensor < 2:
            return [
                f"parallel.sequence is true but parallel.tensor is {self.tensor}; sequence parallelism splits tokens "
                "over tensor ranks: set parallel.tensor to 2 or more, or parallel.sequence to false"
            ]
        divisor = self.context * self.tensor * chunks
        if divisor > 0 and sequence_length % divisor:
            factors = (("context", self.context), ("tensor", self.tensor), ("sequence_chunks", chunks))
            named = " x ".join(f"parallel.{name} {size}" for name, size in factors if size > 1)
            return [
                f"data.sequence_length {sequence_length} is not divisible by {named}; use a "
                f"multiple of {divisor}, or set parallel.sequence to false"
            ]
        return []


@dataclass(kw_only=True)
class ZeroConfig:
    """Sharding of weights, gradients and optimizer state over replicas (ZeRO, arXiv 1910.02054).

    Example:
        >>> from megapipe import ZeroConfig
        >>> ZeroConfig(stage=3).num_shards(replicas=8)
        8
    """

    stage: Literal[0, 1, 2, 3] = 0
    """State that is sharded over the replicas. 0: nothing. 1: optimizer state and master weights. 2: gradients too. 3:
    weights too."""
    weight_buffers: PositiveInt = 2
    """For stage 3: number of layers whose full weights a rank may hold at once; 2 gathers one layer while
    another is used."""
    weight_memory: PositiveFloat | None = None
    """For stage 3: GiB of full weights that a rank may hold at once, instead of a number of layers. Where layers have
    different sizes, more small layers fit; the largest layer must fit. null means weight_buffers layers."""
    gradient_buffers: PositiveInt = 2
    """For stages 2 and 3: number of layers whose full gradients a rank may hold at once; 2 reduces one layer's
    gradients while those of the next layer are computed."""
    gradient_memory: PositiveFloat | None = None
    """For stages 2 and 3: GiB of full fp32 gradients that a rank may hold at once, instead of a number of layers; the
    largest layer must fit. null means gradient_buffers layers."""
    shard_size: Annotated[int, Bound(2)] | None = None
    """Number of replicas that share one copy of the state; further groups of replicas hold copies. null means that all
    replicas share one copy."""
    expert_shard_size: PositiveInt | None = None
    """Number of replicas that share one copy of the experts' weights, gradients and optimizer state; the experts of a
    block are then gathered, reduced and updated apart from its other weights. null means that experts are sharded
    with the other weights."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which gradients are sent and summed over replicas. They are accumulated in fp32."""

    def problems(self) -> list[str]:
        """Return one message for each rule that the fields break."""
        problems = bound_problems(self, "zero")
        needed = {
            "weight_buffers": 3,
            "weight_memory": 3,
            "gradient_buffers": 2,
            "gradient_memory": 2,
            "shard_size": 1,
            "expert_shard_size": 1,
            "reduce_dtype": 1,
        }
        problems += [
            f"zero.{name} is {getattr(self, name)} but zero.stage {self.stage} does "
            f"not use it; set zero.stage to at least {least}, or leave zero.{name} out"
            for name, least in needed.items()
            if self.stage < least and getattr(self, name) != getattr(ZeroConfig, name)
        ]
        return problems + limit_problems(self, "zero", "weight") + limit_problems(self, "zero", "gradient")

    def whole_layers(self) -> tuple[tuple[int, float], tuple[int, float]]:
        """Return the minimum and maximum number of layers whose weights a rank holds whole at once at stage 3, and
        those of gradients from stage 2 on, if a stage has enough layers. A limit in GiB allows 1 to any number."""
        limits = (self.weight_memory, self.weight_buffers), (self.gradient_memory, self.gradient_buffers)
        weights, gradients = ((count, float(count)) if memory is None else (1, inf) for memory, count in limits)
        return weights, gradients

    def replica_problems(self, replicas: int) -> list[str]:
        """Return one message for each rule that the number of replicas of the weights, data x context, breaks."""
        if self.stage and replicas == 1:
            return [
                f"zero.stage is {self.stage} but there is only one replica of the weights, so nothing can be sharded: "
                "start more ranks, reduce parallel.pipeline or parallel.tensor, or set zero.stage 0"
            ]
        return [
            f"zero.{name} {size} does not divide the {replicas} replicas of the "
            f"weights; set it to a divisor of that number, or to null for {usual}"
            for name, size, usual in (
                ("shard_size", self.shard_size, "one copy over all replicas"),
                ("expert_shard_size", self.expert_shard_size, "that of the other weights"),
            )
            if size is not None and replicas % size
        ]

    def num_shards(self, replicas: int, state_unit: str = "layer") -> int:
        """Return the number of ranks that share one copy of the state; 1 if nothing is sharded.

        state_unit: that of the parameter, see `ParameterSpec`.
        """
        if self.stage == 0:
            return 1
        if state_unit == "experts" and self.expert_shard_size is not None:
            return self.expert_shard_size
        return replicas if self.shard_size is None else self.shard_size


@dataclass(kw_only=True)
class ScheduleConfig:
    """Pipeline schedule: the order of forward and backward passes in a step."""

    name: str = "1f1b"
    """Name of a pipeline schedule, or the path of a schedule file (docs/schedules.md), such as ./mine.txt; `megapipe
    schedule list` prints all names."""
    chunks: PositiveInt | None = None
    """Stages per rank, for schedules with several; null means the schedule's default."""
    slices: PositiveInt | None = None
    """Parts of each sequence, for schedules that pass them one by one; null means the schedule's default."""
    slice_split: Literal["uniform", "flops"] = "uniform"
    """Where sequences are cut into slices. uniform: into equal numbers of tokens. flops: into equal work; attention of
    later tokens costs more."""
    group_size: PositiveInt | None = None
    """For interleaved_1f1b and gis: consecutive micro-batches that pass through a chunk; null means the number of
    pipeline ranks, or for interleaved_1f1b the larger group that is fastest if the ranks do not divide the
    micro-batches."""
    two_bp: bool = False
    """Split every backward of a schedule that has whole ones, and fill idle time with the weight halves (2BP)."""
    max_pending: PositiveInt | None = None
    """With two_bp: maximum number of weight halves that a rank may postpone; null means no limit."""
    receive_ahead: PositiveInt = 1
    """Number of compute actions by which a receive is posted before the action that uses its message."""
    update: Literal["eager", "lazy"] | None = None
    """For 2bw: when the optimizer steps. eager: right after the last backward of a batch. lazy: right before the new
    weights are needed, which hides the gradient norm but needs a second gradient buffer. null means lazy."""
    file: str = ""
    """Path of a schedule file. A path in schedule.name is moved here."""

    def __post_init__(self) -> None:
        if is_schedule_file(self.name) and not self.file:
            self.name, self.file = type(self).name, self.name

    def problems(self) -> list[str]:
        """Return one message for each option that cannot be combined with a schedule file."""
        problems = bound_problems(self, "schedule")
        if not self.file:
            return problems
        allowed_with_file = ("file", "receive_ahead", "chunks", "group_size", "max_pending", "slice_split")
        options = (each for each in fields(self) if each.name not in allowed_with_file)
        return problems + [
            f"schedule.{each.name} is {getattr(self, each.name)!r}, but the file {self.file} "
            f"defines the schedule: leave schedule.{each.name} out, or name a schedule"
            for each in options
            if getattr(self, each.name) != each.default
        ]


def is_schedule_file(name: str) -> bool:
    """Return whether the name of a schedule is the path of a text file: it has a suffix or a folder."""
    return Path(name).suffix != "" or len(Path(name).parts) > 1
