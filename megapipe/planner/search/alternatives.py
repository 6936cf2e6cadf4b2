"""Layouts that someone would try first, and the best layout with a part left out: why each loses."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter

from megapipe.config.run import PretrainConfig
from megapipe.config.schedule import ScheduleConfig
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.validation import run_problems
from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.search.differences import exposed_seconds, faster_or_slower, gigabytes, seconds, term_differences
from megapipe.planner.search.explorer import Explorer
from megapipe.planner.search.findings import Alternative
from megapipe.planner.search.layouts import Layout, divisors
from megapipe.planner.search.space import ZeroStage


@dataclass(frozen=True)
class LayoutKind:
    """A kind of layout. holds: whether a layout is of it. example: one of it, for the rule that forbids them all."""

    name: str
    holds: Callable[[Layout], bool]
    example: Callable[[PretrainConfig], PretrainConfig]


def alternatives(
    explorer: Explorer, base: PretrainConfig, hardware: Hardware, devices: int, best: Estimate
) -> tuple[Alternative, ...]:
    """All kinds beside the best layout. best: an estimate, as the others are."""
    found = [_judged(explorer, kind, base, devices, best) for kind in _kinds(base, devices)]
    return (*found[:5], _rule_of_megatron(explorer, base, hardware, devices, best), *found[5:])


def _kinds(base: PretrainConfig, devices: int) -> Iterator[LayoutKind]:
    def only(dimension: str, zero: ZeroStage = 0) -> LayoutKind:
        others = attrgetter(*(name for name in ("data", "tensor", "pipeline", "context") if name != dimension))
        named = f" with ZeRO {zero}" if zero else ""
        return LayoutKind(
            f"{dimension} parallelism alone{named}",
            lambda layout: others(layout.shape) == (1, 1, 1) and layout.zero == zero,
            lambda config: _spread(config, dimension, devices, zero),
        )

    yield only("data")
    yield only("data", 1)
    yield only("data", 3)
    yield only("tensor")
    yield only("pipeline")
    yield LayoutKind("without tensor parallelism", lambda layout: layout.shape.tensor == 1, _as_it_is)
    yield LayoutKind("without pipeline parallelism", lambda layout: layout.shape.pipeline == 1, _as_it_is)
    yield LayoutKind("without ZeRO", lambda layout: layout.zero == 0, _as_it_is)
    yield LayoutKind("without recomputation", lambda layout: layout.recompute == "none", _as_it_is)
    yield LayoutKind("without sequence parallelism", lambda layout: not layout.sequence, _as_it_is)
    plain = ScheduleConfig.name
    yield LayoutKind(f"with plain {plain}", lambda layout: layout.shape.schedule == plain, _as_it_is)


def _spread(config: PretrainConfig, dimension: str, devices: int, zero: ZeroStage) -> PretrainConfig:
    sizes = dict.fromkeys(("data", "tensor", "pipeline", "context"), 1) | {dimension: devices}
    return replace(
        config,
        parallel=replace(
            config.parallel,
            data=sizes["data"],
            tensor=sizes["tensor"],
            pipeline=sizes["pipeline"],
            context=sizes["context"],
            sequence=False,
        ),
        batch=replace(config.batch, micro_size=1),
        zero=replace(config.zero, stage=zero),
        schedule=replace(config.schedule, name=ScheduleConfig.name, chunks=None),
    )


def _as_it_is(config: PretrainConfig) -> PretrainConfig:
    return config


def _rule_of_megatron(
    explorer: Explorer, base: PretrainConfig, hardware: Hardware, devices: int, best: Estimate
) -> Alternative:
    """Takeaways 1 and 2 of Narayanan et al. (2021, arXiv 2104.04473, section 3): tensor ranks up to a node's devices,
    then just enough pipeline ranks to fit, replicas with the rest; all as it was then: everything recomputed, nothing
    sharded."""
    node = min(group.devices_per_node for group in hardware.nodes(devices))
    tensors = {layout.shape.tensor for layout in explorer.layouts}
    tensor = max((size for size in tensors if size <= node), default=1)
    name = f"tensor {tensor}, then as little pipeline as fits, the remaining ranks data (arXiv 2104.04473, section 3)"

    def holds(layout: Layout, pipeline: int | None) -> bool:
        plain = layout.zero == 0 and layout.recompute == "full" and not layout.sequence
        shape = layout.shape
        return plain and shape.tensor == tensor and shape.context == 1 and pipeline in (None, shape.pipeline)

    for pipeline in divisors(devices // tensor):
        found = explorer.fastest(1, lambda layout, size=pipeline: holds(layout, size))  # type: ignore[misc]
        if found:
            return Alternative(name, found[0], _why_slower(found[0], best))
    kind = LayoutKind(name, lambda layout: holds(layout, None), _as_it_is)
    return _judged(explorer, kind, base, devices, best)


def _judged(explorer: Explorer, kind: LayoutKind, base: PretrainConfig, devices: int, best: Estimate) -> Alternative:
    fitting = explorer.fastest(1, kind.holds)
    if fitting:
        return Alternative(kind.name, fitting[0], _why_slower(fitting[0], best))
    nearest = explorer.nearest(kind.holds)
    if nearest is not None:
        return Alternative(kind.name, nearest, out_of_memory(nearest))
    problems = run_problems(kind.example(base), devices)
    why = f"cannot run: {problems[0]}" if problems else "ruled out by pinned fields or by the values to try"
    return Alternative(kind.name, None, why)


def out_of_memory(nearest: Estimate) -> str:
    """By how much the layout of a kind that needs least exceeds its devices."""
    return (
        f"out of memory by {gigabytes(nearest.missing_bytes)}: the fullest rank needs "
        f"{gigabytes(nearest.tightest_bytes)} of {gigabytes(nearest.memory_limit)}"
    )


def _why_slower(estimate: Estimate, best: Estimate) -> str:
    if estimate.config == best.config:
        return "is the best layout"
    bubble, exposed = estimate.seconds_of("bubble"), exposed_seconds(estimate)
    terms = ", ".join(term_differences(estimate, best))
    return (
        f"{faster_or_slower(estimate, best)}: {terms + '; ' if terms else ''}bubble "
        f"{bubble / estimate.step_seconds:.1%} of the step, {seconds(exposed)} of exposed communication"
    )
