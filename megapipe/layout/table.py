"""The layout table of a run: mesh sizes, the layers and rank of each stage, and the strategy of each layer.

It is made from a configuration. Its YAML form is a configuration file with the choices of every layer, so that a run
can use it with --config, and any layer can be changed by hand. The lowered schedule of a run follows from it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, NamedTuple

import yaml

from megapipe.config import ConfigError
from megapipe.config.parallel import DIMENSIONS, MeshShape, layer_is_fp8, recompute_method, strategy_of, zero_stage_of
from megapipe.config.run import PretrainConfig
from megapipe.layout.batch_plan import num_microbatches
from megapipe.layout.scheduling import read_schedule, schedule_options, stage_ranks
from megapipe.layout.stages import StageLayout
from megapipe.layout.units import StateUnits
from megapipe.schedules import Schedule, build
from megapipe.schedules.build import fit_for_training
from megapipe.schedules.lowering import Spans
from megapipe.schedules.memory import NOTHING, Offload
from megapipe.schedules.schedule import Mode


class LayerChoice(NamedTuple):
    """The strategy of one layer.

    zero: its ZeRO stage. recompute: what its backward recomputes; full reruns the whole block, and `joined` means
    together with the block before it, from the input of the latter. offload: its activations move to host memory. fp8:
    the matrix products of a block, or of the blocks within a head, are in fp8.
    """

    zero: int
    recompute: Literal["none", "selective", "full"] = "none"
    joined: bool = False
    offload: bool = False
    fp8: bool = False


@dataclass(frozen=True)
class LayoutTable:
    """The layout of a run over its ranks.

    config: of the run. stages: layers of each stage. strategies: one for each layer. prefetch: compute actions between
    the start of a reload and the backward that needs it.

    Example:
        >>> from megapipe import LayoutTable, parse
        >>> table = LayoutTable.of(parse(["--parallel.pipeline", "2", "--recompute.method", "full"]))
        >>> table.ranks, table.strategies[1].recompute
        ((0, 1), 'full')
    """

    config: PretrainConfig
    stages: StageLayout
    strategies: tuple[LayerChoice, ...]
    prefetch: int = 1

    @classmethod
    def of(cls, config: PretrainConfig, stages: StageLayout | None = None) -> "LayoutTable":
        """Return the table that a configuration describes. stages: of this run, where they are known.

        Raises:
            ConfigError: recompute.method or offload.activations is auto, or no block is left to move.
            ScheduleError: the layers do not fit the stages.
        """
        stages = StageLayout.of(config) if stages is None else stages
        if problems := undecided(config):
            raise ConfigError(problems)
        strategies = [
            strategy
            for members in dict.fromkeys(stages.ranges)
            for strategy in _stage_strategies(config, stages, members)
        ]
        if config.offload.activations == "blocks" and not any(each.offload for each in strategies):
            raise ConfigError(
                "offload.activations blocks has nothing to move, because every block is "
                "recomputed or left out; recompute fewer blocks (recompute.num_blocks "
                "or parallel.layers), or set offload.activations none"
            )
        return cls(config, stages, tuple(strategies), config.offload.prefetch or 1)

    @cached_property
    def recomputed(self) -> Spans:
        """Per stage, the ranges of consecutive units that are rerun together; empty if there are none."""
        spans = [_stretches(self.strategies[members.start : members.stop]) for members in self.stages.ranges]
        return spans if any(spans) else []

    @property
    def offload(self) -> Offload:
        """Tensors that move to host memory."""
        units = tuple(
            tuple(unit for unit, layer in enumerate(members) if self.strategies[layer].offload)
            for members in self.stages.ranges
        )
        return Offload(units if any(units) else (), self.prefetch, self.config.offload.optimizer)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Pipeline rank of every stage."""
        return stage_ranks(self.config)

    def as_yaml(self) -> str:
        """Return the table as groups of a configuration file, with a comment that lists the stages."""
        config, parallel = self.config, self.config.parallel
        named = {name: _own_fields(config, kind, strategy) for name, kind, strategy in self._named_strategies()}
        groups: dict[str, dict[str, Any]] = {
            "parallel": {
                **{name: getattr(parallel, name) for name in (*DIMENSIONS, "sequence")},
                **({"vocabulary": parallel.vocabulary} if parallel.vocabulary_variant else {}),
                "layers_per_stage": [len(each) for each in self.stages.ranges if each.stop <= self._num_named],
                "layers": {name: fields for name, fields in named.items() if fields},
            },
            "batch": {"global_size": config.batch.global_size, "micro_size": config.batch.micro_size},
            "schedule": {"name": config.schedule.name} | _changed(config.schedule),
            "zero": _changed(config.zero),
            "recompute": _changed(config.recompute, num_blocks=None),
            "offload": _changed(config.offload, every=1, num_blocks=None, prefetch=config.offload.prefetch),
            "training": {"fp8": config.training.fp8},
        }
        lines = [
            f"# stage {stage}: {self.stages.layers[members.start].name} to "
            f"{self.stages.layers[members[-1]].name} on pipeline rank {rank}\n"
            for stage, (members, rank) in enumerate(zip(self.stages.ranges, self.ranks, strict=True))
        ]
        written = {name: group for name, group in groups.items() if group}
        return "".join(lines) + str(yaml.safe_dump(written, sort_keys=False))

    @property
    def _num_named(self) -> int:
        """Number of layers that `parallel` names: the shards of a vocabulary count as part of embedding and head."""
        return len(self.stages.layers) - 2 * (self.config.parallel.vocabulary_variant > 0)

    def _named_strategies(self) -> list[tuple[str, str, LayerChoice]]:
        """Return name, kind and strategy of each layer; adjacent blocks of the same strategy are combined to a
        range."""
        rows = []
        layers = self.stages.layers[: self._num_named]
        named = zip(layers, self.strategies[: self._num_named], strict=True)
        for (kind, strategy), members in groupby(named, lambda pair: (pair[0].kind, pair[1]._replace(joined=False))):
            indices = [layer.index for layer, _ in members]
            at_the_start = kind in ("embedding", "positions")
            name = f"blocks.{indices[0]}" if kind == "block" else "embedding" if at_the_start else "head"
            rows.append((name if len(indices) == 1 else f"{name}-{indices[-1]}", kind, strategy))
        return rows


def moves_to_host(config: PretrainConfig) -> bool:
    """Return whether any part of a run is in host memory between its uses."""
    offload = config.offload
    return offload.activations != "none" or offload.optimizer or offload.weights


def undecided(config: PretrainConfig) -> list[str]:
    """Return one message for each strategy that is not chosen yet."""
    problems = []
    if config.recompute.method == "auto":
        problems.append(
            "recompute.method auto must be resolved before layers are placed: "
            "call planner.recompute.resolved, or set none, selective or full"
        )
    if config.offload.activations == "auto":
        problems.append(
            "offload.activations auto is decided by measurements "
            "at the start of a run; set none or blocks to plan with"
        )
    return problems


def _stage_strategies(config: PretrainConfig, stages: StageLayout, members: range) -> list[LayerChoice]:
    """Return the strategies of one stage's layers."""
    layers = [stages.layers[index] for index in members]
    own = [strategy_of(config.parallel.layers, layer.name) for layer in layers]
    blocks = [unit for unit, layer in enumerate(layers) if layer.kind == "block"]
    rerun = {
        unit
        for place, unit in enumerate(blocks)
        if recompute_method(config, layers[unit].name) == "full"
        and (own[unit].recompute is not None or place < (config.recompute.num_blocks or len(blocks)))
    }
    kept = [unit for unit in blocks if unit not in rerun]
    moved: set[int] = set()
    if config.offload.activations == "blocks":
        chosen = kept[:: config.offload.every][: config.offload.num_blocks]
        moved = {unit for unit in kept if (unit in chosen if own[unit].offload is None else own[unit].offload)}
    choices: list[LayerChoice] = []
    length = 0
    for unit, layer in enumerate(layers):
        length = length + 1 if unit in rerun else 0
        selective = unit in kept and recompute_method(config, layer.name) == "selective"
        choices.append(
            LayerChoice(
                zero_stage_of(config, layer.name),
                "full" if unit in rerun else "selective" if selective else "none",
                joined=length > 0 and (length - 1) % config.recompute.every > 0,
                offload=unit in moved,
                fp8=layer_is_fp8(config, layer.kind, layer.index),
            )
        )
    return choices


def _stretches(strategies: Sequence[LayerChoice]) -> list[range]:
    """Return the units that are rerun together."""
    stretches: list[range] = []
    for unit, strategy in enumerate(strategies):
        if strategy.recompute == "full":
            first = stretches.pop().start if strategy.joined else unit
            stretches.append(range(first, unit + 1))
    return stretches


def _own_fields(config: PretrainConfig, kind: str, strategy: LayerChoice) -> dict[str, Any]:
    """Return the fields of a layer in `parallel.layers`, for a file that does not itself set which blocks are
    recomputed, moved or kept out of fp8."""
    fields: dict[str, Any] = {}
    if strategy.zero != config.zero.stage:
        fields["zero"] = strategy.zero
    if kind == "block" and strategy.recompute != config.recompute.method:
        fields["recompute"] = strategy.recompute
    if kind == "block" and config.offload.activations == "blocks" and strategy.recompute != "full":
        fields |= {} if strategy.offload else {"offload": False}
    if kind == "block" and config.training.fp8 != "none" and not strategy.fp8:
        fields["fp8"] = False
    return fields


def _changed(group: Any, **fixed: Any) -> dict[str, Any]:
    """Return the fields of a group that differ from its defaults, with some set to a value."""
    plain = asdict(type(group)())
    return {name: value for name, value in (asdict(group) | fixed).items() if value != plain[name]}


def build_schedule(
    config: PretrainConfig,
    num_microbatches: int,
    layout: StageLayout,
    *,
    replicas: int,
    recompute: Spans = (),
    offload: Offload = NOTHING,
    mode: Mode = "train",
) -> Schedule:
    """Return the lowered schedule that the configuration names, for the micro-batches of one replica in one step.

    layout: how the model is cut into stages. replicas: ranks that hold the same weights, over data and context.
    recompute: layers that the backward recomputes, by stage. offload: tensors that move to host memory. Raises
    ScheduleError.
    """
    run: dict[str, Any] = {
        "mode": mode,
        "units_per_stage": layout.units_per_stage,
        "tied_groups": layout.tied,
        "data_parallel": replicas > 1 or config.parallel.sequence,
        "states": StateUnits(config, layout, replicas).table(),
        "receive_ahead": config.schedule.receive_ahead,
        "recompute": recompute,
        "offload": offload,
    }
    if config.schedule.file:
        file = read_schedule(config, num_microbatches)
        return fit_for_training(file, config.parallel.pipeline, num_microbatches, **run)
    options = schedule_options(config)
    run["vocabulary"] = config.parallel.vocabulary_variant
    return build(config.schedule.name, config.parallel.pipeline, num_microbatches, **run, **options)


def lowered_schedule(config: PretrainConfig, layout: StageLayout) -> Schedule:
    """Return the lowered schedule of a run, with the recomputation and offloading of its configuration.

    config: with parallel.data filled in. Raises ConfigError for choices that are made when the run starts, and
    ScheduleError.
    """
    shape = MeshShape.of(config.parallel)
    table = LayoutTable.of(config, layout)
    return build_schedule(
        config,
        num_microbatches(config, shape.world_size),
        layout,
        replicas=shape.sizes["data"] * shape.sizes["context"],
        recompute=table.recomputed,
        offload=table.offload,
    )
