"""How much to recompute: as little as a memory budget allows.

Candidates are nothing, parts of every block, and the first 1, 2, ... blocks of each stage as a whole. They are tried
from the fastest to the slowest; the first one fits whose every rank, along its own schedule's actions, holds no more
than the budget. So more memory never means more recomputation.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megapipe.config.errors import ConfigError
from megapipe.config.mesh_shape import DIMENSIONS, MeshShape
from megapipe.config.recompute import RecomputeConfig, RecomputedPart
from megapipe.config.run import PretrainConfig
from megapipe.planner.cost.model import estimate
from megapipe.planner.cost.roofline_times import RooflineTimes
from megapipe.planner.hardware.description import Hardware
from megapipe.planner.hardware.device_type import hardware_device_type
from megapipe.planner.runs.layout import StageLayout
from megapipe.planner.runs.prediction import predict_rank
from megapipe.planner.runs.scheduling import build_schedule, splits_backwards
from megapipe.planner.runs.validation import data_parallel_size, num_microbatches, run_problems

GIB = 2**30
PARTS: tuple[list[RecomputedPart], ...] = (["norms"], ["mlp"], ["mlp", "norms"], ["attention", "mlp", "norms"])


@dataclass(frozen=True)
class Recomputation:
    """What a budget allows.

    config: the run with its recompute group set, and parallel.data. peak_bytes: tensors on the fullest rank at its
    fullest moment. step_seconds: of the cost model, by the roofline for all candidates alike.
    """

    config: PretrainConfig
    peak_bytes: int
    step_seconds: float


def least_recomputation(
    config: PretrainConfig, hardware: Hardware, budget: float | None = None, *, world_size: int | None = None
) -> Recomputation:
    """The fastest recomputation whose every rank stays within a budget.

    config: its recompute group is not read but for `logits`. budget: bytes of a device that tensors may take, by
    default all of the smallest one's; what a framework takes besides is left to the caller. world_size: ranks, needed
    where parallel.data is open.

    Raises:
        ConfigError: the run cannot be laid out so, or not even whole recomputation fits.
    """
    if budget is None:
        budget = min(group.device.memory_bytes for group in hardware.groups)
    if budget <= 0:
        raise ConfigError(f"a memory budget of {budget:g} bytes holds nothing; give one above 0")
    config = _laid_out(config, world_size)
    device = hardware.groups[0].device
    ranked = sorted(
        ((estimate(each, hardware, times=RooflineTimes(device)).step_seconds, order, each)
         for order, each in enumerate(_candidates(config))),
        key=lambda found: found[:2],
    )  # fmt: skip
    least = None
    for seconds, _, candidate in ranked:
        peak = peak_bytes(candidate, hardware_device_type(hardware))
        if peak <= budget:
            return Recomputation(candidate, peak, seconds)
        least = peak if least is None else min(least, peak)
    assert least is not None  # nothing at all is always a candidate
    raise ConfigError(
        f"{least / GIB:.3g} GiB a rank are needed whatever is recomputed, and there are {budget / GIB:.3g}; lower "
        "batch.micro_size, raise parallel.tensor, parallel.pipeline or zero.stage, or take devices with more memory"
    )


def peak_bytes(config: PretrainConfig, device: str) -> int:
    """Tensors on the fullest rank of a run at its fullest moment, by `predict_rank`.

    config: with parallel.data filled in. device: type of the ranks' devices.
    """
    shape = MeshShape({name: getattr(config.parallel, name) or 1 for name in DIMENSIONS})
    layout = StageLayout.of(config)
    schedule = build_schedule(
        config,
        num_microbatches(config, shape.world_size),
        units_per_stage=layout.units_per_stage,
        tied_groups=layout.tied,
        data_parallel=shape.sizes["data"] * shape.sizes["context"] > 1 or config.parallel.sequence,
        recompute=layout.recomputed(config.recompute),
    )
    # Ranks of one pipeline coordinate are alike, but for Muon's shards of whole matrices.
    apart = config.optimizer.name == "muon" and config.zero.stage > 0
    ranks = [
        rank
        for rank in range(shape.world_size)
        if apart or all(shape.coordinates(rank)[name] == 0 for name in DIMENSIONS if name != "pipeline")
    ]
    return max(predict_rank(config, schedule, rank, device=device).device_bytes() for rank in ranks)


def _laid_out(config: PretrainConfig, world_size: int | None) -> PretrainConfig:
    parallel = config.parallel
    if parallel.data is None and world_size is None:
        raise ConfigError("parallel.data is null and no number of devices is given; give either")
    ranks = parallel.pipeline * parallel.context * parallel.tensor
    whole = (parallel.data or 1) * ranks if world_size is None else world_size
    problems = run_problems(config, whole)
    if config.schedule.file:
        problems.append(
            f"schedule.file {config.schedule.file} may say by itself what runs again; name a schedule to choose that"
        )
    if config.offload.activations != "none":
        problems.append(
            f"offload.activations {config.offload.activations} decides with the memory of the host in mind: with auto "
            "and offload.memory it chooses what runs again by itself; set it to none to choose here"
        )
    if problems:
        raise ConfigError(problems)
    return replace(config, parallel=replace(parallel, data=data_parallel_size(config, whole)))


def _candidates(config: PretrainConfig) -> Iterator[PretrainConfig]:
    """All that the run's other fields allow, what recomputes least first."""
    logits = config.recompute.logits and not splits_backwards(config)
    wanted = [RecomputeConfig(logits=logits)]
    wanted += [RecomputeConfig(method="selective", parts=list(parts), logits=logits) for parts in PARTS]
    layout = StageLayout.of(config)
    kinds = [layout.layers[index].kind for index in range(len(layout.layers))]
    most = max(sum(kinds[index] == "block" for index in members) for members in layout.ranges)
    wanted += [RecomputeConfig(method="full", num_blocks=count, logits=logits) for count in range(1, most + 1)]
    for recompute in wanted:
        candidate = replace(config, recompute=recompute)
        if not any("recompute" in problem for problem in candidate.problems()):
            yield candidate
