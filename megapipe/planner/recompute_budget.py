"""How much to recompute: as little as a memory budget allows.

Candidates are nothing, parts of every block, and the first 1, 2, ... blocks of each stage as a whole. They are tried
from the fastest to the slowest; the first one fits whose every rank, along its own schedule's actions, holds no more
than the budget. So more memory never means more recomputation.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megapipe.config.errors import ConfigError
from megapipe.config.mesh_shape import DIMENSIONS, MeshShape
from megapipe.config.offload import OffloadConfig
from megapipe.config.recompute import RecomputeConfig, RecomputedPart
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Device, Hardware
from megapipe.layout.hardware.device_type import hardware_device_type
from megapipe.layout.hardware.precision import with_named_precision
from megapipe.layout.lowered import lowered_schedule
from megapipe.layout.prediction import predict_rank
from megapipe.layout.scheduling import splits_backwards
from megapipe.layout.stages import StageLayout, layers_of
from megapipe.layout.validation import data_parallel_size, run_problems
from megapipe.planner.cost.layer_times import LayerTimes
from megapipe.planner.cost.model import estimate
from megapipe.planner.cost.roofline_times import RooflineTimes
from megapipe.planner.measured.times import MeasuredTimes

GIB = 2**30
PARTS: tuple[list[RecomputedPart], ...] = (["norms"], ["mlp"], ["mlp", "norms"], ["attention", "mlp", "norms"])


@dataclass(frozen=True)
class Recomputation:
    """What a budget allows.

    config: the run with its recompute group set, and parallel.data. peak_bytes: tensors on the fullest rank at its
    fullest moment. step_seconds: as the cost model estimates it. plain_seconds: of a step without recomputation.
    plain_bytes: what that would hold. source: where layers' times come from.
    """

    config: PretrainConfig
    peak_bytes: int
    step_seconds: float
    plain_seconds: float
    plain_bytes: int
    source: str


def least_recomputation(
    config: PretrainConfig,
    hardware: Hardware,
    budget: float | None = None,
    *,
    world_size: int | None = None,
    amx: bool = False,
) -> Recomputation:
    """The fastest recomputation whose every rank stays within a budget.

    config: its recompute group is not read but for `logits`. budget: bytes of a device that tensors may take, by
    default all of the smallest one's; what a framework takes besides is left to the caller. world_size: ranks, needed
    where parallel.data is open. amx: as in `faster_path`.

    Raises:
        ConfigError: the run cannot be laid out so, or not even whole recomputation fits.
    """
    config = _laid_out(config, world_size)
    devices = _devices(config, hardware)
    config, _ = with_named_precision(config, devices)
    if budget is None:
        budget = min(device.memory_bytes for device in devices)
    if budget <= 0:
        raise ConfigError(f"the memory budget is {budget:g} bytes; it must be above 0")
    memory = _Memory(hardware_device_type(hardware), amx)
    plain, *_ = candidates = list(_candidates(config))
    times, source = _step_seconds(candidates, hardware, devices)
    # Ties go to what recomputes least: candidates come in that order, and sorting keeps it.
    for seconds, candidate in sorted(zip(times, candidates, strict=True), key=lambda found: found[0]):
        peak, whole = memory.peak(candidate, budget)
        if whole:
            nothing = peak if candidate is plain else memory.peak(plain, math.inf)[0]
            return Recomputation(candidate, peak, seconds, times[0], nothing, source)
    least = memory.least(candidates)
    raise ConfigError(
        f"a rank needs at least {least / GIB:.3g} GiB with any recomputation, but the budget is {budget / GIB:.3g}; "
        "lower batch.micro_size, raise parallel.tensor, parallel.pipeline or zero.stage, or allow more memory"
    )


def peak_bytes(config: PretrainConfig, device: str, amx: bool = False) -> int:
    """Tensors on the fullest rank of a run at its fullest moment, by `predict_rank`.

    config: with parallel.data filled in. device: type of the ranks' devices. amx: as in `faster_path`.
    """
    return _Memory(device, amx).peak(config, math.inf)[0]


@dataclass(frozen=True)
class _Memory:
    """What ranks hold, walked through one after another: that takes a while, and one that holds too much is enough."""

    device: str
    amx: bool

    def peak(self, config: PretrainConfig, budget: float) -> tuple[int, bool]:
        """The most that any rank holds, and True; or what the first one over a budget holds, and False."""
        most = 0
        for held in self._ranks(config):
            most = max(most, held)
            if held > budget:
                return held, False
        return most, True

    def least(self, configs: Iterable[PretrainConfig]) -> int:
        """Of several runs the least that the fullest rank of any holds."""
        found: float = math.inf
        for config in configs:
            held, whole = self.peak(config, found)
            found = held if whole else found
        return int(found)

    def _ranks(self, config: PretrainConfig) -> Iterator[int]:
        shape = MeshShape({name: getattr(config.parallel, name) or 1 for name in DIMENSIONS})
        layout = StageLayout.of(config)
        schedule = lowered_schedule(config, layout)
        # Ranks of one pipeline coordinate are alike, but for Muon's shards of whole matrices.
        apart = config.optimizer.name == "muon" and config.zero.stage > 0
        for rank in range(shape.world_size):
            if apart or all(shape.coordinates(rank)[name] == 0 for name in DIMENSIONS if name != "pipeline"):
                yield predict_rank(config, schedule, rank, device=self.device, amx=self.amx).device_bytes()


def _devices(config: PretrainConfig, hardware: Hardware) -> list[Device]:
    """Of the nodes that a run with parallel.data fills."""
    shape = MeshShape({name: getattr(config.parallel, name) or 1 for name in DIMENSIONS})
    return [node.device for node in hardware.nodes(shape.world_size)]


def _step_seconds(
    candidates: Sequence[PretrainConfig], hardware: Hardware, devices: Iterable[Device]
) -> tuple[list[float], str]:
    """Of a step with each candidate, the first of which recomputes nothing, and where layers' times come from.

    Measurements of layers say nothing of parts of a block that run again: these take as much longer than nothing as by
    the roofline.
    """
    precision = candidates[0].training.precision
    slowest = min(devices, key=lambda device: device.peak(precision))
    roofline = [_seconds(each, hardware, RooflineTimes(slowest)) for each in candidates]
    measured = _measured(candidates[0], hardware)
    if measured is None:
        return roofline, f"the roofline of {slowest.name}"
    plain = _seconds(candidates[0], hardware, measured)
    seconds = [
        plain * own / roofline[0] if each.recompute.method == "selective" else _seconds(each, hardware, measured)
        for each, own in zip(candidates, roofline, strict=True)
    ]
    return seconds, f"layer times measured on {hardware.name}"


def _seconds(config: PretrainConfig, hardware: Hardware, times: LayerTimes) -> float:
    """Of a step without copies of offloaded optimizer state and weights, which are alike whatever runs again."""
    return estimate(replace(config, offload=OffloadConfig()), hardware, times=times).step_seconds


def _measured(config: PretrainConfig, hardware: Hardware) -> MeasuredTimes | None:
    """Times of layers, where the machine has them of all layers of a run in which nothing runs again."""
    if hardware.measured is None:
        return None
    times, layers = MeasuredTimes(hardware), layers_of(config)
    one_of_each = {layer.kind: layer for layer in layers}.values()
    answered = all(times.of(config, layer).source.startswith("measured") for layer in one_of_each)
    return times if answered else None


def _laid_out(config: PretrainConfig, world_size: int | None) -> PretrainConfig:
    parallel = config.parallel
    if parallel.data is None and world_size is None:
        raise ConfigError("parallel.data is null and no number of devices is given; set one of them")
    ranks = parallel.pipeline * parallel.context * parallel.tensor
    whole = (parallel.data or 1) * ranks if world_size is None else world_size
    problems = run_problems(config, whole)
    problems += replace(config, recompute=RecomputeConfig(method="auto")).budget_problems()
    if problems:
        raise ConfigError(problems)
    return replace(config, parallel=replace(parallel, data=data_parallel_size(config, whole)))


def _candidates(config: PretrainConfig) -> Iterator[PretrainConfig]:
    """All that the run's other fields allow, what recomputes least first: nothing at all is always allowed."""
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
