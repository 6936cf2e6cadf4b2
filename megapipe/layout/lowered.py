"""The schedule of a run, lowered as its ranks will run it."""

from megapipe.config.mesh_shape import DIMENSIONS, MeshShape
from megapipe.config.run import PretrainConfig
from megapipe.layout.moves import named_offload
from megapipe.layout.scheduling import build_schedule
from megapipe.layout.stages import StageLayout
from megapipe.layout.validation import num_microbatches
from megapipe.schedules import Schedule


def lowered_schedule(config: PretrainConfig, layout: StageLayout) -> Schedule:
    """With what runs again and what goes to host memory, as the configuration names it.

    config: with parallel.data filled in. Raises ConfigError for what only a start of the run decides, ScheduleError.
    """
    shape = MeshShape({name: getattr(config.parallel, name) or 1 for name in DIMENSIONS})
    recomputed = layout.recomputed(config.recompute)
    return build_schedule(
        config,
        num_microbatches(config, shape.world_size),
        units_per_stage=layout.units_per_stage,
        tied_groups=layout.tied,
        data_parallel=shape.sizes["data"] * shape.sizes["context"] > 1 or config.parallel.sequence,
        recompute=recomputed,
        offload=named_offload(config, layout, recomputed),
    )
