"""Results of a search: the best layouts, why the layouts that people try first are slower, and which similar requests
are much faster."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from megapipe.config import ConfigError
from megapipe.config.command_line import bytes_text
from megapipe.config.parallel import DIMENSIONS, ScheduleConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.validation import run_problems
from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.search import Objective
from megapipe.planner.search.explorer import Explorer, LayoutFilter
from megapipe.planner.search.space import Layout, Shape, ZeroStage, divisors

EXPOSED = ("tensor", "context", "pipeline", "data", "tied", "scalars", "waiting")
"""Terms of a step for communication and waiting, without the bubble."""
WORTH_NAMING = 0.005
"""Minimum difference of a term, as a fraction of the step time, that a reason mentions."""
Fastest = Callable[[PretrainConfig, Hardware, int], Estimate]
"""Function that returns the best layout of a run on a number of devices. It raises ConfigError if none can run."""
MUCH = 1.1
"""Minimum ratio of tokens per second for a hint about the number of devices or the batch size."""
NEIGHBOURS = 2
"""Maximum number of other device counts, and of other batch sizes, to try."""
BATCH_CHANGE = 0.1
"""Maximum relative change of the batch size."""


@dataclass(frozen=True)
class PlannedLayout:
    """A layout with its cost; `estimate.config` is the whole configuration, including parallel.data.

    simulated: whether its numbers come from a simulation of its lowered schedule instead of an estimate. node_order:
    faster order of the machine's nodes by measured links; None keeps the given order. price: price of a million tokens
    in the currency of the hardware file; None if a node has no price.
    """

    estimate: Estimate
    simulated: bool = False
    node_order: tuple[int, ...] | None = None
    price: float | None = None

    @property
    def config(self) -> PretrainConfig:
        """Return the configuration, ready to run."""
        return self.estimate.config

    def as_json(self) -> dict[str, Any]:
        """Return the keys of the estimate, and those of this class."""
        source = {"simulated": self.simulated, "node_order": self.node_order}
        return self.estimate.as_json() | source | {"price_per_million_tokens": self.price}


@dataclass(frozen=True)
class Alternative:
    """A kind of layout that people try first, or that lacks a part of the best layout, and why it is slower.

    estimate: estimate of the best layout of this kind; if none fits, of the layout that needs the least memory; None
    if none can run. reason: a sentence that says how much memory is missing, how much slower the layout is and in
    which terms, which rule forbids it, or that it is the best layout.
    """

    name: str
    estimate: Estimate | None
    reason: str

    def as_json(self) -> dict[str, Any]:
        """Return name, reason and estimate; the estimate is null if none can run."""
        estimate = None if self.estimate is None else self.estimate.as_json()
        return {"name": self.name, "reason": self.reason, "estimate": estimate}


@dataclass(frozen=True)
class Trial:
    """One number of devices, or one model, if the objective compares several. layout: the best one; None if nothing
    fits. value: price of a million tokens, days, or number of parameters."""

    name: str
    layout: PlannedLayout | None
    value: float | None


@dataclass(frozen=True)
class Findings:
    """Results of one search.

    ranked: layouts that fit, the best first. pareto: Pareto front of speed and memory, the fastest first: no other
    layout that fits is as fast with less memory. trials: the compared numbers of devices or models, if the objective
    compares any. hints: similar requests that are much faster, as sentences. not_searched: layouts that the search
    leaves out, as phrases. examined: number of estimated layouts. pruned: for each rule, the number of layouts that it
    ruled out without an estimate. layouts: number of valid layouts in the space. seconds: duration of the search.
    """

    objective: Objective
    devices: int
    ranked: tuple[PlannedLayout, ...]
    pareto: tuple[PlannedLayout, ...]
    alternatives: tuple[Alternative, ...]
    trials: tuple[Trial, ...]
    hints: tuple[str, ...]
    not_searched: tuple[str, ...]
    examined: int
    pruned: dict[str, int]
    layouts: int
    seconds: float

    @property
    def best(self) -> PlannedLayout:
        """Return the first layout."""
        return self.ranked[0]

    def as_json(self) -> dict[str, Any]:
        """Return the results as `megapipe plan search --json` prints them."""
        values, names = vars(self), ("ranked", "pareto", "alternatives")
        lists = {name: [each.as_json() for each in values[name]] for name in names}
        trials = [{"name": each.name, "value": each.value} for each in self.trials]
        return values | lists | {"best": self.best.as_json(), "trials": trials}


class NothingFits(ConfigError):
    """No layout fits the devices. nearest: the layout that needs the least memory."""

    def __init__(self, nearest: Estimate, hardware: Hardware, devices: int) -> None:
        layout = ", ".join(f"{name} {value}" for name, value in nearest.as_json()["layout"].items())
        super().__init__(
            f"no layout fits {devices} devices of {hardware.name!r}; the layout that needs "
            f"the least memory is {out_of_memory(nearest)} ({layout}); use more devices or "
            "devices with more memory, a smaller model or shorter samples, or set fewer fields"
        )
        self.nearest = nearest


def faster_or_slower(candidate: Estimate, reference: Estimate) -> str:
    """Return the ratio of the speeds of two layouts in words."""
    change = candidate.tokens_per_second / reference.tokens_per_second - 1.0
    if abs(change) < 0.0005:
        return "as fast"
    return f"{abs(change):.1%} {'faster' if change > 0 else 'slower'} in tokens per second"


def term_differences(candidate: Estimate, reference: Estimate) -> list[str]:
    """Return a phrase for each term of a step that differs much, the largest difference first."""
    names = dict.fromkeys(term.name for term in candidate.terms + reference.terms)
    changes = {name: candidate.seconds_of(name) - reference.seconds_of(name) for name in names}
    least = WORTH_NAMING * max(candidate.step_seconds, reference.step_seconds)
    large = sorted((name for name in changes if abs(changes[name]) >= least), key=lambda name: -abs(changes[name]))
    return [f"{name} {seconds(abs(changes[name]))} {'more' if changes[name] > 0 else 'less'}" for name in large]


def seconds(value: float) -> str:
    """Return a time with three digits, in s, ms or us."""
    if value >= 1.0:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


class LayoutKind(NamedTuple):
    """A kind of layout. members: filter of its layouts. example: builds one, to report the rule that forbids all."""

    name: str
    members: LayoutFilter
    example: Callable[[PretrainConfig], PretrainConfig] = lambda config: config


def alternatives(explorer: Explorer, hardware: Hardware, best: Estimate) -> tuple[Alternative, ...]:
    """Compare every kind of layout with the best layout. best: an estimate, because the others are estimates too."""
    judged = [_judged(explorer, kind, best) for kind in _kinds(explorer.layouts.devices)]
    return (*judged[:5], _rule_of_megatron(explorer, hardware, best), *judged[5:])


def _kinds(devices: int) -> Iterator[LayoutKind]:
    plain = ScheduleConfig.name

    def only(dimension: str, zero: ZeroStage = 0) -> LayoutKind:
        sizes = dict.fromkeys(DIMENSIONS, 1) | {dimension: devices}
        shape = Shape(**sizes, micro_size=1, schedule=plain, chunks=None)
        return LayoutKind(
            f"{dimension} parallelism alone{f' with ZeRO {zero}' if zero else ''}",
            LayoutFilter(lambda each: each.zero == zero, lambda mesh: mesh[:4] == shape[:4]),
            lambda base: Layout(shape, 0, zero, base.recompute.method).applied(base),  # type: ignore[arg-type]
        )

    yield from (only("data"), only("data", 1), only("data", 3), only("tensor"), only("pipeline"))
    yield LayoutKind("without tensor parallelism", LayoutFilter(branch=lambda branch: branch.tensor == 1))
    yield LayoutKind("without pipeline parallelism", LayoutFilter(branch=lambda branch: branch.pipeline == 1))
    yield LayoutKind("without ZeRO", LayoutFilter(lambda layout: layout.zero == 0))
    yield LayoutKind("without recomputation", LayoutFilter(lambda layout: layout.recompute == "none"))
    yield LayoutKind("without sequence parallelism", LayoutFilter(lambda layout: not layout.sequence))
    yield LayoutKind(f"with plain {plain}", LayoutFilter(lambda layout: layout.shape.schedule == plain))


def _rule_of_megatron(explorer: Explorer, hardware: Hardware, best: Estimate) -> Alternative:
    """Compare with takeaways 1 and 2 of Narayanan et al. (2021, arXiv 2104.04473, section 3): tensor ranks up to a
    node's devices, then just enough pipeline ranks to fit, and the remaining ranks for data parallelism; as in the
    paper, everything is recomputed and nothing is sharded."""
    devices = explorer.layouts.devices
    node = min(group.devices_per_node for group in hardware.nodes(devices))
    tensor = max((mesh.tensor for mesh in explorer.meshes if mesh.tensor <= node), default=1)
    name = f"tensor {tensor}, then as little pipeline as fits, the remaining ranks data (arXiv 2104.04473, section 3)"

    def members(pipeline: int | None) -> LayoutFilter:
        return LayoutFilter(
            lambda each: (each.sequence, each.zero, each.recompute) == (0, 0, "full"),
            lambda each: (each.tensor, each.context) == (tensor, 1) and pipeline in (None, each.pipeline),
        )

    for pipeline in divisors(devices // tensor):
        if fitting := explorer.fastest(1, members(pipeline)):
            return Alternative(name, fitting[0], _why_slower(fitting[0], best))
    return _judged(explorer, LayoutKind(name, members(None)), best)


def _judged(explorer: Explorer, kind: LayoutKind, best: Estimate) -> Alternative:
    if fitting := explorer.fastest(1, kind.members):
        return Alternative(kind.name, fitting[0], _why_slower(fitting[0], best))
    if (nearest := explorer.nearest(kind.members)) is not None:
        return Alternative(kind.name, nearest, out_of_memory(nearest))
    problems = run_problems(kind.example(explorer.layouts.base), explorer.layouts.devices)
    why = f"cannot run: {problems[0]}" if problems else "ruled out by pinned fields or by the values to try"
    return Alternative(kind.name, None, why)


def out_of_memory(nearest: Estimate) -> str:
    """Return in words how much memory a layout lacks. nearest: the layout that needs the least memory."""
    return (
        f"out of memory by {bytes_text(nearest.missing_bytes)}: the fullest rank needs "
        f"{bytes_text(nearest.tightest_bytes)} of {bytes_text(nearest.memory_limit)}"
    )


def _why_slower(estimate: Estimate, best: Estimate) -> str:
    if estimate.config == best.config:
        return "is the best layout"
    bubble, exposed = estimate.seconds_of("bubble"), sum(map(estimate.seconds_of, EXPOSED))
    terms = ", ".join(term_differences(estimate, best))
    return (
        f"{faster_or_slower(estimate, best)}: {terms + '; ' if terms else ''}bubble "
        f"{bubble / estimate.step_seconds:.1%} of the step, {seconds(exposed)} of exposed communication"
    )


def hints(base: PretrainConfig, hardware: Hardware, devices: int, best: Estimate, fastest: Fastest) -> Iterator[str]:
    """Yield one sentence for each similar request that is much faster than the best layout of this one."""
    batch_size = base.batch.global_size

    def gain(count: int, size: int, machine: Hardware = hardware) -> float:
        config = replace(base, batch=replace(base.batch, global_size=size))
        try:
            return fastest(config, machine, count).tokens_per_second / best.tokens_per_second
        except ConfigError:
            return 0.0

    def batches(count: int) -> list[int]:
        return neighbour_batches(batch_size, count) if base.batch.ramp_start is None else []

    others = neighbour_devices(hardware, devices)
    counts = {(count, size): gain(count, size) for count in others for size in (batch_size, *batches(count))}
    count, size = max(counts, key=lambda each: counts[each], default=(devices, batch_size))
    if (ratio := counts.get((count, size), 0.0)) >= MUCH:
        batch = "" if size == batch_size else f" with --batch.global_size {size}"
        yield f"{count:,} devices{batch} are {ratio:.1f} times as fast as {devices:,}, which has few divisors"
    sizes = {size: gain(devices, size) for size in batches(devices)}
    size = max(sizes, key=lambda each: sizes[each], default=0)
    if sizes.get(size, 0.0) >= MUCH:
        yield (
            f"--batch.global_size {size} trains {sizes[size]:.1f} times as "
            f"many tokens per second as {batch_size:,}, which has few divisors"
        )
    for machine, count in single_groups(hardware, devices):
        alone, name = gain(count, batch_size, machine), machine.groups[0].device.name
        if alone > 1.0:
            yield (
                f"the {count:,} {name} alone are {alone:.2f} times as fast as "
                f"all {devices:,} devices: each step waits for the slowest device"
            )


def neighbour_devices(hardware: Hardware, devices: int) -> list[int]:
    """Return smaller numbers of devices with more divisors; none if the devices fill whole nodes."""
    node = hardware.nodes(1)[0].devices_per_node
    step = node if devices > node else max(1, node // 2)
    if devices % step == 0:
        return []
    counts = (devices // each * each for each in (step, max(1, step // 2)))
    return [each for each in dict.fromkeys(counts) if 0 < each < devices][:NEIGHBOURS]


def neighbour_batches(samples: int, devices: int) -> list[int]:
    """Return similar batch sizes with more divisors; none if batch size or number of devices divides the other."""
    if samples % devices == 0 or devices % samples == 0:
        return []
    powers = [2**power for power in range(samples.bit_length() - 1, 0, -1)]
    tried = [round(samples / devices) * devices, *(max(1, round(samples / each)) * each for each in powers)]
    near = [size for size in tried if 0 < abs(size - samples) <= BATCH_CHANGE * samples]
    return list(dict.fromkeys(near))[:NEIGHBOURS]


def single_groups(hardware: Hardware, devices: int) -> Iterator[tuple[Hardware, int]]:
    """Yield each kind of device alone, with its number of devices in the run; nothing if there is only one kind."""
    nodes = hardware.nodes(devices)
    if len({node.device.name for node in nodes}) == 1:
        return
    left = devices
    for _, members in groupby(nodes, key=lambda node: node.name):
        group = list(members)
        count = min(left, sum(node.devices_per_node for node in group))
        left -= count
        yield Hardware(hardware.name, (replace(group[0], num_nodes=len(group)),)), count
