"""What of a run goes to host memory, as far as its configuration names it."""

from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.layout.stages import StageLayout
from megapipe.schedules.lowering import Spans
from megapipe.schedules.offload import Offload


def moves_to_host(config: PretrainConfig) -> bool:
    """Whether anything of a run lies in host memory between its uses."""
    offload = config.offload
    return offload.activations != "none" or offload.optimizer or offload.weights


def named_offload(config: PretrainConfig, layout: StageLayout, recomputed: Spans) -> Offload:
    """What offload.activations none or blocks, offload.optimizer and offload.weights move.

    recomputed: per stage, the runs of units that run again, which stay.

    Raises ConfigError where no block is left to move, and for offload.activations auto, which measures at the start of
    a run what hides.
    """
    offload = config.offload
    if offload.activations == "auto":
        raise ConfigError(
            "offload.activations auto is decided by measurements at the start of a run; set none or blocks to plan "
            "with"
        )
    units: tuple[tuple[int, ...], ...] = ()
    if offload.activations == "blocks":
        units = tuple(
            kept_blocks(layout, stage, recomputed)[:: offload.every][: offload.num_blocks]
            for stage in range(len(layout.ranges))
        )
        if not any(units):
            raise ConfigError(
                "offload.activations blocks has nothing to move, because recompute.method full recomputes every "
                "block; set recompute.num_blocks, or leave one of the two out"
            )
    return Offload(units, offload.prefetch or 1, offload.optimizer, offload.buffers)


def blocks_of(layout: StageLayout, stage: int) -> tuple[int, ...]:
    """Units of a stage that are transformer blocks."""
    return tuple(unit for unit, layer in enumerate(layout.ranges[stage]) if layout.layers[layer].kind == "block")


def kept_blocks(layout: StageLayout, stage: int, recomputed: Spans) -> tuple[int, ...]:
    """Those of them that do not run again."""
    repeated = {unit for span in (recomputed[stage] if recomputed else ()) for unit in span}
    return tuple(unit for unit in blocks_of(layout, stage) if unit not in repeated)
