"""Layouts as people read them."""

from megapipe.config.recompute import RecomputeConfig
from megapipe.config.run import PretrainConfig
from megapipe.config.words import bytes_told, seconds_told
from megapipe.planner.cost.estimate import Estimate


def layout_cells(config: PretrainConfig) -> dict[str, str]:
    """Column -> value of a layout, in the words of the configuration."""
    parallel = config.parallel
    return {
        "data": "open" if parallel.data is None else str(parallel.data),
        "pipeline": str(parallel.pipeline),
        "context": str(parallel.context),
        "tensor": f"{parallel.tensor}{f' + {sequence_told(config)}' if parallel.sequence else ''}",
        "micro-batch": str(config.batch.micro_size),
        "schedule": schedule_told(config),
        "ZeRO": str(config.zero.stage),
        "recompute": recompute_told(config.recompute),
    }


def sequence_told(config: PretrainConfig) -> str:
    """Return `sequence`, or `sequence x 4` if its traffic overlaps with products in four chunks."""
    chunks = config.parallel.sequence_chunks
    return f"sequence x {chunks}" if chunks > 1 else "sequence"


def schedule_told(config: PretrainConfig) -> str:
    """`interleaved_1f1b x 2`: the name, and chunks where they are more than the schedule's own."""
    schedule = config.schedule
    name = schedule.file or schedule.name
    return f"{name} x {schedule.chunks}" if schedule.chunks is not None else name


def recompute_told(recompute: RecomputeConfig) -> str:
    """`full x 2`: the method, and of a block's parts or a stage's blocks how many where that is not all of them."""
    if recompute.method == "selective" and set(recompute.parts) != set(RecomputeConfig().parts):
        return f"selective {' + '.join(recompute.parts)}"
    if recompute.method == "full" and recompute.num_blocks is not None:
        return f"full x {recompute.num_blocks}"
    return recompute.method


def layout_told(config: PretrainConfig) -> str:
    """A layout in one line; what is off is left out."""
    parallel, found = config.parallel, []
    for name in ("data", "pipeline", "context", "tensor"):
        size = getattr(parallel, name)
        if size is not None and size > 1:
            found.append(f"{name} {size}")
    found = found or ["one rank"]
    if parallel.pipeline > 1:
        found.append(schedule_told(config))
    if parallel.sequence:
        found.append(sequence_told(config))
    if config.zero.stage:
        found.append(f"ZeRO {config.zero.stage}")
    if config.recompute.method != "none":
        found.append(f"recompute {recompute_told(config.recompute)}")
    return ", ".join([*found, f"micro-batch {config.batch.micro_size}"])


def figures_cells(estimate: Estimate) -> dict[str, str]:
    """Column -> figure of an estimate."""
    found = estimate.as_json()
    return {
        "step": seconds_told(estimate.step_seconds),
        "tokens/s/device": f"{found['tokens_per_s_per_device']:,.0f}",
        "TFLOP/s/device": f"{found['model_tflops_per_device']:.1f}",
        "memory": bytes_told(estimate.peak_bytes),
        "fits": "yes" if estimate.fits else f"no, by {bytes_told(estimate.missing_bytes)}",
    }
