"""Choice of the least recomputation within a memory budget, which resolves `recompute.method auto`.

Candidates are no recomputation, parts of every block, and the first 1, 2, ... whole blocks of each stage. They are
tried from the fastest to the slowest, until no rank exceeds the budget after any action of its schedule. So more
memory never results in a slower step.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from megapipe.config import ConfigError
from megapipe.config.memory import OffloadConfig, RecomputeConfig, RecomputedPart
from megapipe.config.parallel import MeshShape
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Device, Hardware, hardware_device_type, with_named_precision
from megapipe.layout.prediction import predict_rank
from megapipe.layout.scheduling import splits_backwards
from megapipe.layout.stages import StageLayout, layers_of
from megapipe.layout.table import lowered_schedule
from megapipe.layout.units import GIB
from megapipe.layout.validation import run_problems
from megapipe.planner.cost.layer_times import LayerTimes, slowest_roofline
from megapipe.planner.cost.model import estimate
from megapipe.planner.cost.run_layout import with_data
from megapipe.planner.measured import MeasuredTimes
from megapipe.spec.layers import one_of_each

PARTS: tuple[list[RecomputedPart], ...] = (["norms"], ["mlp"], ["mlp", "norms"], ["attention", "mlp", "norms"])
RESERVE = 0.1
"""Fraction of a device's memory that is reserved for the framework and for errors of the prediction."""


@dataclass(frozen=True)
class Recomputation:
    """The fastest recomputation within a budget.

    config: the run with its recompute group and parallel.data filled in. peak_bytes: peak bytes of tensors on the
    fullest rank. step_seconds: estimate of the cost model. plain_seconds, plain_bytes: the same two figures without
    recomputation. source: where the times of layers come from.
    """

    config: PretrainConfig
    peak_bytes: int
    step_seconds: float
    plain_seconds: float
    plain_bytes: int
    source: str


def resolved(
    config: PretrainConfig,
    hardware: Hardware,
    world_size: int,
    *,
    device_bytes: float | None = None,
    amx: bool = False,
) -> tuple[PretrainConfig, str | None]:
    """Return the run with recompute.method auto replaced by the method that it selects, and a remark with the choice
    and its reason; without auto, the run itself and None.

    hardware: gives the times of layers and, without `device_bytes`, the memory of its smallest device. amx: as in
    `faster_path`. Raises ConfigError if nothing fits, or the run cannot be laid out on this number of ranks.
    """
    if config.recompute.method != "auto":
        return config, None
    if device_bytes is None:
        device_bytes = min(node.device.memory_bytes for node in hardware.nodes(world_size))
    budget, memory = allowed_bytes(config, device_bytes), config.recompute.memory
    device_share = f"{1 - RESERVE:.0%} of a device's {device_bytes / GIB:.3g} GiB"
    where = device_share if memory is None else f"recompute.memory {memory:g} GiB"
    try:
        chosen = least_recomputation(config, hardware, budget, world_size=world_size, amx=amx)
    except ConfigError as error:
        raise ConfigError([f"recompute.method auto: {problem} ({where})" for problem in error.problems]) from None
    return replace(config, recompute=chosen.config.recompute), _summary(chosen, where)


def limited(config: PretrainConfig, hardware: Hardware) -> tuple[PretrainConfig, Hardware]:
    """Return, for a search over layouts, the run without auto, and the hardware with the memory that auto may use."""
    plain, memory = RecomputeConfig(logits=config.recompute.logits), config.recompute.memory
    share = f"{1 - RESERVE:.0%} of its memory" if memory is None else f"recompute.memory {memory:g} GiB"
    within = hardware.with_devices(lambda each: replace(each, memory_bytes=allowed_bytes(config, each.memory_bytes)))
    return replace(config, recompute=plain), replace(within, name=f"{hardware.name}, {share}")


def allowed_bytes(config: PretrainConfig, device_bytes: float) -> float:
    """Return the bytes of a device that tensors may use."""
    memory = config.recompute.memory
    return (1 - RESERVE) * device_bytes if memory is None else memory * GIB


def _summary(chosen: Recomputation, where: str) -> str:
    recompute, slower = chosen.config.recompute, chosen.step_seconds / chosen.plain_seconds - 1
    method, cost = "none", "no recomputation is needed"
    if recompute.method == "selective":
        method = f"selective ({', '.join(recompute.parts)})"
    elif recompute.method == "full":
        blocks = "block" if recompute.num_blocks == 1 else f"{recompute.num_blocks} blocks"
        method = f"full for the first {blocks} of each stage"
    if recompute.method != "none":
        cost = (
            f"a step takes {slower:.1%} longer (by {chosen.source}) than without "
            f"recomputation, which would need {chosen.plain_bytes / GIB:.3g} GiB"
        )
    peak = f"at most {chosen.peak_bytes / GIB:.3g} GiB of tensors per rank"
    return f"recompute auto: {method}: {peak}, {where}; {cost}"


def least_recomputation(
    config: PretrainConfig,
    hardware: Hardware,
    budget: float,
    *,
    world_size: int | None = None,
    amx: bool = False,
) -> Recomputation:
    """Return the fastest recomputation with which every rank stays within a budget.

    config: the run; of its recompute group, only `logits` is read. budget: bytes of a device that tensors may use.
    world_size: number of ranks, required if parallel.data is null. amx: as in `faster_path`. Raises ConfigError if the
    run cannot be laid out, or not even full recomputation fits.
    """
    filled = with_data(config, world_size)
    ranks = MeshShape.of(filled.parallel).world_size
    problems = run_problems(config, world_size or ranks)
    problems += replace(config, recompute=RecomputeConfig(method="auto")).budget_problems()
    if problems:
        raise ConfigError(problems)
    devices = [node.device for node in hardware.nodes(ranks)]
    named, _ = with_named_precision(filled, devices)
    if budget <= 0:
        raise ConfigError(f"the memory budget is {budget:g} bytes; it must be above 0")
    device = hardware_device_type(hardware)
    plain, *_ = candidates = list(_candidates(named))
    times, source = _step_seconds(candidates, hardware, devices)
    # On a tie, the candidate that recomputes least wins: candidates are in that order, and sorting is stable.
    for seconds, candidate in sorted(zip(times, candidates, strict=True), key=itemgetter(0)):
        peak = peak_bytes(candidate, device, amx, budget)
        if peak <= budget:
            nothing = peak if candidate is plain else peak_bytes(plain, device, amx)
            return Recomputation(candidate, peak, seconds, times[0], nothing, source)
    least = math.inf
    for candidate in candidates:
        least = min(least, peak_bytes(candidate, device, amx, least))
    raise ConfigError(
        f"a rank needs at least {least / GIB:.3g} GiB with any recomputation, "
        f"but the budget is {budget / GIB:.3g}; lower batch.micro_size, raise "
        "parallel.tensor, parallel.pipeline or zero.stage, or allow more memory"
    )


def peak_bytes(config: PretrainConfig, device: str, amx: bool = False, budget: float = math.inf) -> int:
    """Return the peak bytes of tensors on the fullest rank of a run, by `predict_rank`.

    Stop at the first rank that exceeds the budget and return its bytes, because each rank takes time to predict.
    config: with parallel.data filled in. device: type of the ranks' devices. amx: as in `faster_path`.
    """
    shape, layout, most = MeshShape.of(config.parallel), StageLayout.of(config), 0
    schedule = lowered_schedule(config, layout)
    # Ranks with the same pipeline coordinate need the same bytes, except when Muon's whole matrices are sharded.
    apart = config.optimizer.name == "muon" and config.zero.stage > 0
    stages = (shape.rank_of({"pipeline": coordinate}) for coordinate in range(shape.sizes["pipeline"]))
    for rank in range(shape.world_size) if apart else stages:
        most = max(most, predict_rank(config, schedule, rank, device=device, amx=amx).device_bytes())
        if most > budget:
            break
    return most


def _step_seconds(
    candidates: Sequence[PretrainConfig], hardware: Hardware, devices: Iterable[Device]
) -> tuple[list[float], str]:
    """Return the step time of each candidate, and the source of these times. The first candidate recomputes nothing.

    No measurements exist for blocks with recomputed parts, so their time is scaled in proportion to the roofline.
    """
    plain, times = candidates[0], MeasuredTimes(hardware)
    slowest = slowest_roofline(devices, plain.training.precision)
    roofline = [_seconds(each, hardware, slowest) for each in candidates]
    if hardware.measured is None or not all(
        times.of(plain, layer).source.startswith("measured") for layer in one_of_each(layers_of(plain))
    ):
        return roofline, f"the roofline of {slowest.device.name}"
    plain_seconds = _seconds(plain, hardware, times)
    measured = [
        plain_seconds * estimated / roofline[0]
        if each.recompute.method == "selective"
        else _seconds(each, hardware, times)
        for each, estimated in zip(candidates, roofline, strict=True)
    ]
    return measured, f"layer times measured on {hardware.name}"


def _seconds(config: PretrainConfig, hardware: Hardware, times: LayerTimes) -> float:
    """Return the step time without copies to host memory, because recomputation does not change these."""
    return estimate(replace(config, offload=OffloadConfig()), hardware, times=times).step_seconds


def _candidates(config: PretrainConfig) -> Iterator[PretrainConfig]:
    """Yield the candidates that the run's other fields allow, the least recomputation first. The candidate without
    recomputation is always allowed."""
    logits = config.recompute.logits and not splits_backwards(config)
    layout = StageLayout.of(config)
    most = max(len(layout.blocks(stage)) for stage in range(len(layout.ranges)))
    groups = [RecomputeConfig(logits=logits)]
    groups += [RecomputeConfig(method="selective", parts=list(parts), logits=logits) for parts in PARTS]
    groups += [RecomputeConfig(method="full", num_blocks=count, logits=logits) for count in range(1, most + 1)]
    for recompute in groups:
        candidate = replace(config, recompute=recompute)
        if not any("recompute" in problem for problem in candidate.problems()):
            yield candidate
