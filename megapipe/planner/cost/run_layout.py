"""A run laid out on a machine: its stages, ranks and links, ready for the formulas."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import cast

from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.layout.costs import LayoutCosts
from megapipe.layout.hardware.description import Hardware, HostLink
from megapipe.layout.hardware.device_type import hardware_device_type
from megapipe.layout.hardware.placement import Placement
from megapipe.layout.hardware.precision import with_named_precision
from megapipe.layout.moves import moves_to_host, named_offload
from megapipe.layout.scheduling import num_stages, schedule_options
from megapipe.layout.stages import VOCABULARY_ALIGNMENT, Keyed, StageLayout, predictions_of
from megapipe.layout.validation import data_parallel_size, run_problems
from megapipe.schedules.generators.registry import find_generator
from megapipe.schedules.load_file import read_file
from megapipe.schedules.offload import Offload
from megapipe.spec.attention_path import attention_path
from megapipe.spec.dtypes import Precision
from megapipe.spec.layers import layer_flops
from megapipe.spec.ops import Flops
from megapipe.spec.parameters import tied_names


@dataclass(frozen=True)
class RunLayout:
    """A configuration with parallel.data filled in, on a machine.

    placement: its ranks on nodes. costs: sizes of its layers. stages: its layers in stages. ranks: the pipeline rank
    of every stage. classes: of every layer, the number of its kind; those of one kind are alike. kinds: one of each.
    tied: names of weights that several layers use.
    """

    config: PretrainConfig
    hardware: Hardware
    placement: Placement
    costs: LayoutCosts
    stages: StageLayout
    ranks: tuple[int, ...]
    classes: tuple[int, ...]
    kinds: tuple[int, ...]
    tied: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.placement.num_ranks

    @property
    def pipeline(self) -> int:
        """Pipeline ranks."""
        return self.config.parallel.pipeline

    @cached_property
    def chunks(self) -> int:
        """Stages on each rank."""
        return len(self.ranks) // self.pipeline

    @property
    def num_microbatches(self) -> int:
        """Of one replica in a step."""
        return self.config.batch.global_size // (self.config.batch.micro_size * self.costs.data)

    @cached_property
    def recomputed(self) -> list[list[range]]:
        """Per stage the runs of units that run again as a whole; empty where none do."""
        return self.stages.recomputed(self.config.recompute)

    @cached_property
    def moved(self) -> Offload:
        """What goes to host memory. Raises ConfigError where no block is left to."""
        return named_offload(self.config, self.stages, self.recomputed)

    @cached_property
    def host(self) -> HostLink:
        """Of the device with the slowest copies to host memory, where anything moves there."""
        links = [node.host for node in self.placement.nodes if node.host is not None]
        return min(links, key=lambda link: link.bandwidth)

    @property
    def synchronises_gradients(self) -> bool:
        """Whether a step sums gradients over ranks that hold the same weights."""
        return self.costs.replicas > 1 or self.config.parallel.sequence

    @property
    def gathers_after_update(self) -> bool:
        """Whether updates leave the weights in shards that are gathered at once (ZeRO 1 and 2)."""
        return self.costs.of_units.shards > 1 and self.config.zero.stage < 3

    @cached_property
    def flops(self) -> tuple[Flops, ...]:
        """Of a micro-batch through one layer of each kind."""
        config = self.config
        return tuple(
            layer_flops(
                config.model,
                self.stages.layers[index],
                config.batch.micro_size,
                config.data.sequence_length,
                predictions_of(config),
                config.recompute.logits,
            )
            for index in self.kinds
        )


def lay_run(
    config: PretrainConfig,
    hardware: Hardware,
    world_size: int | None = None,
    node_order: Sequence[int] | None = None,
) -> RunLayout:
    """Lay a run on a machine. training.precision auto becomes what the devices' peaks say.

    Raises:
        ConfigError: the configuration cannot run on so many ranks, parallel.data and world_size are both left open,
            more ranks than devices, or something that the cost model cannot tell the time of.
    """
    config = _resolved(config, world_size)
    parallel = config.parallel
    sizes = {name: getattr(parallel, name) for name in ("data", "pipeline", "context", "tensor")}
    placement = Placement(hardware, sizes, node_order)
    config, _ = with_named_precision(config, (node.device for node in placement.nodes))
    problems = run_problems(config, placement.num_ranks)
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
    """Lay a run on nodes, once it is known that it can run there.

    config: with parallel.data filled in. like: one of the same model, schedule and pipeline, to take its stages from.
    """
    if like is not None:
        costs = replace(like.costs, config=config, data=placement.sizes["data"])
        return replace(like, config=config, hardware=placement.hardware, placement=placement, costs=costs)
    hardware, shape = placement.hardware, _shape_of(config)
    precision = cast(Precision, config.training.precision)
    device = hardware_device_type(hardware)
    path = attention_path(config.model, precision, device, config.data.sequence_length)
    costs = LayoutCosts(
        config, shape.stages.layers, placement.sizes["data"], path, VOCABULARY_ALIGNMENT, device=device
    )
    return RunLayout(config, hardware, placement, costs, ranks=_ranks_of(config), **vars(shape))


def _resolved(config: PretrainConfig, world_size: int | None) -> PretrainConfig:
    """The configuration with parallel.data filled in, once nothing in it is beyond the cost model."""
    problems = []
    if config.recompute.method == "auto":
        problems.append(
            "recompute.method auto must be resolved before costs are computed: call planner.recompute_auto.resolved, "
            "or set none, selective or full"
        )
    if config.offload.activations == "auto":
        problems.append(
            "offload.activations auto is decided by measurements at the start of a run; set none or blocks to plan "
            "with"
        )
    if config.parallel.data is None and world_size is None:
        problems.append("parallel.data is null and no number of devices is given; set one of them")
    if problems:
        raise ConfigError(problems)
    if config.parallel.data is not None:
        return config
    data = data_parallel_size(config, cast(int, world_size))
    return replace(config, parallel=replace(config.parallel, data=data))


@dataclass(frozen=True)
class _Shape:
    """What `RunLayout` takes over of a model in stages, whatever the machine and the batch."""

    stages: StageLayout
    classes: tuple[int, ...]
    kinds: tuple[int, ...]
    tied: tuple[str, ...]


def _shape_of(config: PretrainConfig) -> _Shape:
    by_hand = config.parallel.layers_per_stage
    key = (
        repr(config.model),
        type(config),
        num_stages(config),
        config.data.sequence_length,
        None if by_hand is None else tuple(by_hand),
        predictions_of(config),
        config.recompute.logits,
        (config.training.fp8, config.training.fp8_first_kept, config.training.fp8_last_kept),
        (config.zero.stage, *sorted(config.zero.layer_stages.items())) if config.zero.layer_stages else (),
    )
    return _cached_shape(Keyed(key, config))


@lru_cache(maxsize=1024)
def _cached_shape(keyed: Keyed) -> _Shape:
    config: PretrainConfig = keyed.value
    stages = StageLayout.of(config)
    training = config.training
    chosen = range(training.fp8_first_kept, config.model.num_layers - training.fp8_last_kept)
    numbers: dict[tuple[str, bool, int], int] = {}
    classes, kinds = [], []
    for index, layer in enumerate(stages.layers):
        in_fp8 = layer.kind == "block" and training.fp8 != "none" and layer.index in chosen
        kind = layer.kind, in_fp8, config.zero.stage_of(layer.name)
        if kind not in numbers:
            numbers[kind] = len(numbers)
            kinds.append(index)
        classes.append(numbers[kind])
    return _Shape(stages, tuple(classes), tuple(kinds), tied_names(stages.layers))


def _ranks_of(config: PretrainConfig) -> tuple[int, ...]:
    """The pipeline rank of every stage."""
    if config.schedule.file:
        return tuple(place.rank for place in read_file(Path(config.schedule.file)).header.stages)
    generator = find_generator(config.schedule.name)
    chunks = generator.number_of_chunks(schedule_options(config))
    return _placed(config.schedule.name, config.parallel.pipeline, chunks)


@lru_cache(maxsize=1024)
def _placed(name: str, pipeline: int, chunks: int) -> tuple[int, ...]:
    return tuple(place.rank for place in find_generator(name).placement(pipeline, chunks).stages)
