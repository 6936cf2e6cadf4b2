"""The lowered schedule of a run."""

from typing import Any

from megapipe.config.parallel import MeshShape
from megapipe.config.run import PretrainConfig
from megapipe.layout.batch_plan import num_microbatches
from megapipe.layout.scheduling import read_schedule, schedule_options
from megapipe.layout.stages import StageLayout
from megapipe.layout.table import LayoutTable
from megapipe.layout.units import StateUnits
from megapipe.schedules import Schedule, build
from megapipe.schedules.build import fit_for_training
from megapipe.schedules.lowering import Spans
from megapipe.schedules.offload import NOTHING, Offload
from megapipe.schedules.schedule import Mode


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
