"""A run laid out on a machine: its stages, ranks and links, as the cost formulas need them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, cast

import numpy as np

from megapipe.config import ConfigError
from megapipe.config.parallel import MeshShape, layer_is_fp8, strategy_of
from megapipe.config.run import PretrainConfig
from megapipe.layout.batch_plan import data_parallel_size
from megapipe.layout.costs import LayoutCosts
from megapipe.layout.hardware.description import Hardware, HostLink, hardware_device_type, with_named_precision
from megapipe.layout.hardware.placement import Placement
from megapipe.layout.prediction import layout_costs
from megapipe.layout.scheduling import num_stages, schedule_options, splits_backwards, stage_ranks
from megapipe.layout.stages import Keyed, StageLayout, unplanned
from megapipe.layout.table import LayoutTable, moves_to_host, undecided
from megapipe.layout.validation import run_problems
from megapipe.schedules.actions import Ints
from megapipe.schedules.building_blocks import Policy
from megapipe.schedules.lowering import Spans
from megapipe.schedules.registry import find_generator
from megapipe.spec.layers import layer_flops
from megapipe.spec.ops import Flops
from megapipe.spec.parameters import LayerSpec, TiedNames, tied_names


@dataclass(frozen=True)
class RunLayout:
    """A configuration with parallel.data filled in, on a machine.

    placement: its ranks on nodes. costs: sizes of its layers. ranks: the pipeline rank of every stage. stages: its
    layers in stages. classes: for every layer, the number of its kind; layers of one kind are identical. kinds: index
    of one layer of each kind. tied: names of weights that several layers use.
    """

    config: PretrainConfig
    hardware: Hardware
    placement: Placement
    costs: LayoutCosts
    ranks: tuple[int, ...]
    stages: StageLayout
    classes: tuple[int, ...]
    kinds: tuple[int, ...]
    tied: tuple[TiedNames, ...]

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.placement.num_ranks

    @property
    def pipeline(self) -> int:
        """Return the number of pipeline ranks."""
        return self.config.parallel.pipeline

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Return one layer of each kind."""
        return tuple(self.stages.layers[index] for index in self.kinds)

    @cached_property
    def chunks(self) -> int:
        """Return the number of stages on each rank."""
        return len(self.ranks) // self.pipeline - 2 * self.shares_vocabulary

    @cached_property
    def by_chunk(self) -> Ints:
        """Return the stages of each rank in their order, shape [ranks, chunks]."""
        return np.argsort(self.ranks, kind="stable").reshape(self.pipeline, self.chunks)

    @cached_property
    def splits(self) -> bool:
        """Return whether backwards are split into an input half and a weight half."""
        return splits_backwards(self.config)

    @cached_property
    def policy(self) -> Policy:
        """Return when the schedule writes weights."""
        policy_of = find_generator(self.config.schedule.name).policy_of
        return policy_of(self.pipeline, self.num_microbatches, schedule_options(self.config))

    @property
    def shares_vocabulary(self) -> bool:
        """Return whether all pipeline ranks share output layer and word embeddings; each has its shards as stages of
        their own."""
        return self.config.parallel.vocabulary_variant > 0

    @cached_property
    def num_microbatches(self) -> int:
        """Return the micro-batches of one replica in a step."""
        return self.config.batch.global_size // (self.config.batch.micro_size * self.costs.data)

    @cached_property
    def table(self) -> LayoutTable:
        """Return the strategy of every layer. Raises ConfigError if no block is left to move to host memory."""
        return LayoutTable.of(self.config, self.stages)

    @property
    def recomputed(self) -> Spans:
        """Return for each stage the spans of units that are recomputed together; empty without recomputation."""
        if self.config.recompute.method in ("none", "selective") and not self.config.parallel.layers:
            return []
        return self.table.recomputed

    @cached_property
    def host(self) -> HostLink:
        """Return the link of the device with the slowest copies to host memory."""
        links = [node.host for node in self.placement.nodes if node.host is not None]
        return min(links, key=lambda link: link.bandwidth)

    @cached_property
    def flops(self) -> tuple[Flops, ...]:
        """Return the FLOPs of a micro-batch in one layer of each kind."""
        config = self.config
        sizes = config.batch.micro_size, config.data.sequence_length, config.predictions, config.recompute.logits
        # The cached value keeps the layers alive, so that no other object gets the same id.
        return _flops(Keyed((tuple(map(id, self.layers)), sizes), (config.model, self.layers)))


@lru_cache(maxsize=1024)
def _flops(keyed: Keyed) -> tuple[Flops, ...]:
    (_, sizes), (model, layers) = cast(Any, keyed.key), keyed.value
    return tuple(layer_flops(model, layer, *sizes) for layer in layers)


def lay_run(
    config: PretrainConfig,
    hardware: Hardware,
    world_size: int | None = None,
    node_order: Sequence[int] | None = None,
) -> RunLayout:
    """Lay out a run on a machine. The devices' peaks decide what training.precision auto becomes.

    Raises:
        ConfigError: the configuration cannot run on this number of ranks, parallel.data and world_size are both unset,
            there are more ranks than devices, or the cost model cannot time the run.
    """
    if problems := undecided(config):
        raise ConfigError(problems)
    config = with_data(config, world_size)
    placement = Placement(hardware, MeshShape.of(config.parallel).sizes, node_order)
    config, _ = with_named_precision(config, (node.device for node in placement.nodes))
    problems = run_problems(config, placement.num_ranks) or unplanned(config)
    if moves_to_host(config):
        problems += [
            f"offload: hardware {hardware.name!r} does not describe the link between {node.device.name} and host "
            f"memory; add host: {{bandwidth: ...}} to the group {node.name!r}, or leave offload out"
            for node in {id(node): node for node in placement.nodes}.values()
            if node.host is None
        ]
    if problems:
        raise ConfigError(problems)
    return lay_on(config, placement)


def lay_on(config: PretrainConfig, placement: Placement, like: RunLayout | None = None) -> RunLayout:
    """Lay out a run on nodes on which it is known to be valid.

    config: with parallel.data filled in. like: a layout with the same model, schedule and pipeline, to reuse its
    stages.
    """
    if like is not None:
        costs = replace(like.costs, config=config, data=placement.sizes["data"])
        return replace(like, config=config, hardware=placement.hardware, placement=placement, costs=costs)
    hardware, shape = placement.hardware, _shape_of(config)
    costs = layout_costs(config, device=hardware_device_type(hardware), layers=shape.stages.layers)
    return RunLayout(config, hardware, placement, costs, stage_ranks(config), *shape)


def with_data(config: PretrainConfig, world_size: int | None) -> PretrainConfig:
    """Return the configuration with parallel.data filled in. Raises ConfigError if nothing determines it."""
    if config.parallel.data is None and world_size is None:
        raise ConfigError("parallel.data is null and no number of devices is given; set one of them")
    data = data_parallel_size(config, world_size or 0)
    return replace(config, parallel=replace(config.parallel, data=data))


class _Shape(NamedTuple):
    """Fields of `RunLayout` from `stages` on, which depend neither on the machine nor on the batch."""

    stages: StageLayout
    classes: tuple[int, ...]
    kinds: tuple[int, ...]
    tied: tuple[TiedNames, ...]


def _shape_of(config: PretrainConfig) -> _Shape:
    by_hand = config.parallel.layers_per_stage
    key = (
        repr(config.model),
        type(config),
        num_stages(config),
        config.data.sequence_length,
        None if by_hand is None else tuple(by_hand),
        (config.parallel.vocabulary, config.parallel.pipeline),
        config.predictions,
        config.recompute.logits,
        (config.training.fp8, config.training.fp8_first_kept, config.training.fp8_last_kept),
        repr(config.parallel.layers),
    )
    return _cached_shape(Keyed(key, config))


@lru_cache(maxsize=1024)
def _cached_shape(keyed: Keyed) -> _Shape:
    config: PretrainConfig = keyed.value
    stages = StageLayout.of(config)
    numbers: dict[tuple[object, ...], int] = {}
    classes = []
    for layer in stages.layers:
        in_fp8 = layer_is_fp8(config, layer.kind, layer.index)
        # What a layer sets itself, because a search reuses the kinds with other values of the run's own fields.
        own = strategy_of(config.parallel.layers, layer.name)
        kind = layer.kind, layer.variant, in_fp8, own.zero, own.recompute
        classes.append(numbers.setdefault(kind, len(numbers)))
    kinds = tuple(map(classes.index, range(len(numbers))))
    return _Shape(stages, tuple(classes), kinds, tied_names(stages.layers))
