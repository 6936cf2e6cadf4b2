"""The search: the best layout of a run on a number of devices, and what else is worth knowing."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

from megapipe.config.errors import ConfigError
from megapipe.config.progress import Report
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.validation import run_problems
from megapipe.planner.cost.assumptions import ENGINE, Assumptions
from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.cost.layer_times import LayerTimes
from megapipe.planner.cost.roofline_times import RooflineTimes
from megapipe.planner.search.alternatives import alternatives, out_of_memory
from megapipe.planner.search.bounds import LayoutBounds
from megapipe.planner.search.evaluation import Evaluation
from megapipe.planner.search.explorer import Explorer
from megapipe.planner.search.findings import Findings, Found, NothingFits
from megapipe.planner.search.hints import hints
from megapipe.planner.search.layouts import Layouts
from megapipe.planner.search.refinement import Refiner
from megapipe.planner.search.shared_times import shared
from megapipe.planner.search.space import PROMISING, SearchSpace

WIDEST = 8
"""Times as many layouts as are ranked that are looked at where simulation finds the first ones slower."""


@dataclass(frozen=True)
class Effort:
    """How much a search does beside finding the best.

    keep: layouts that are ranked. slowest: of the Pareto front, in times of the best layout's step; 0 for no front.
    tolerance: share of time or memory by which the front may miss a layout. actions: as in `Refiner`; 0 simulates
    nothing. alternatives: whether to judge them. stages: layers may be moved between stages by their times.
    hints: whether to search similar requests too, for hints.
    """

    keep: int = 5
    slowest: float = 1.5
    tolerance: float = 0.02
    actions: int = 100_000
    alternatives: bool = True
    stages: bool = True
    hints: bool = True


QUICK = Effort(keep=1, slowest=0, actions=0, alternatives=False, stages=False, hints=False)
"""For searches whose results are only compared."""
BEST_ALONE = Effort(slowest=0.0, alternatives=False, hints=False)
"""For searches that need only the best layout, with a simulated time."""


def search_speed(
    base: PretrainConfig,
    hardware: Hardware,
    devices: int,
    pinned: frozenset[str] = frozenset(),
    *,
    space: SearchSpace | None = None,
    times: LayerTimes | None = None,
    effort: Effort | None = None,
    assumptions: Assumptions = ENGINE,
    report: Report = lambda share: None,
) -> Findings:
    """Return the layouts with the most tokens per second. report: receives the fraction of the work that is done.

    Layouts are compared by `planner.cost.model.estimate`; the best of them are then simulated, as far as `effort`
    allows, and ordered by that. No pruning leaves out a layout that would have been among the answers.

    Raises:
        ConfigError: what `Layouts` refuses, no layout that can run, or what the cost model cannot tell. NothingFits:
            layouts can run and none fits.
    """
    started = time.perf_counter()
    space, effort = space or SearchSpace(), effort or Effort()
    times = shared(slowest_times(base, hardware, devices, assumptions) if times is None else times)
    layouts = Layouts(base, devices, pinned, space)
    limit = max(node.device.memory_bytes for node in hardware.nodes(devices))
    explorer = Explorer(
        layouts,
        LayoutBounds(base, hardware, devices, times, assumptions),
        Evaluation(base, hardware, times, assumptions),
        limit,
        lambda share: report(0.3 * share),
    )
    if not explorer.layouts:
        raise ConfigError(_why_nothing_runs(base, devices, pinned))
    report(0.3)
    explorer.add(layouts.with_other_schedules(explorer.promising(PROMISING)))
    movable = effort.stages and "parallel.layers_per_stage" not in pinned
    refiner, keep = Refiner(hardware, times, effort.actions, assumptions), effort.keep
    found = explorer.fastest(keep)
    report(0.6)
    ranked = refiner.refined(found, stages=movable)
    report(0.8)
    # Where estimates err, layouts behind those that were kept may be better, or may be the only ones that fit.
    while len(found) == keep and (not ranked or (keep < WIDEST * effort.keep and _beaten(ranked[0], found[-1]))):
        keep *= 2
        more = explorer.fastest(keep)
        ranked = refiner.refined(more[len(found) :], ranked, stages=movable)
        found = more
    if not ranked:
        # There are layouts, so that one of them is nearest.
        raise _nothing_fits(cast(Estimate, explorer.nearest()), hardware, devices)
    front = explorer.front(effort.slowest * found[0].step_seconds, effort.tolerance) if effort.slowest else []
    others = alternatives(explorer, base, hardware, devices, found[0]) if effort.alternatives else ()
    report(0.9)
    near = tuple(_hints(base, hardware, devices, pinned, space, assumptions, ranked[0])) if effort.hints else ()
    report(1.0)
    price = hardware.price_per_hour(devices)
    return Findings(
        objective="speed",
        devices=devices,
        ranked=tuple(_priced(each, price) for each in ranked[: effort.keep]),
        pareto=tuple(_priced(Found(each), price) for each in front),
        alternatives=others,
        trials=(),
        hints=near,
        not_searched=tuple(space.not_searched(base, pinned)),
        examined=explorer.examined,
        pruned=explorer.pruned(),
        layouts=len(explorer.layouts),
        seconds=time.perf_counter() - started,
    )


def _hints(
    base: PretrainConfig,
    hardware: Hardware,
    devices: int,
    pinned: frozenset[str],
    space: SearchSpace,
    assumptions: Assumptions,
    best: Found,
) -> Iterator[str]:
    """Yield the hints of `planner.search.hints`, except with measured times or a pinned parallel.data."""
    if hardware.measured is not None or "parallel.data" in pinned:
        return

    def fastest(config: PretrainConfig, machine: Hardware, count: int) -> Estimate:
        found = search_speed(config, machine, count, pinned, space=space, effort=QUICK, assumptions=assumptions)
        return found.best.estimate

    yield from hints(base, hardware, devices, best.estimate, fastest)


def slowest_times(
    base: PretrainConfig, hardware: Hardware, devices: int, assumptions: Assumptions = ENGINE
) -> LayerTimes:
    """By the roofline of the device that every step waits for, as `planner.cost.model` takes it by default.

    Raises ConfigError where precision is auto, or a device has no peak for it.
    """
    if base.training.precision == "auto":
        raise ConfigError(
            "training.precision auto is decided by measurements at the start of a run; set fp32, bf16 or fp16 to plan "
            "with"
        )
    found = [node.device for node in hardware.nodes(devices)]
    slowest = min(found, key=lambda device: device.peak(base.training.precision))
    return RooflineTimes(slowest, assumptions.megatron_kernels)


def price_per_million_tokens(found: Estimate, price_per_hour: float) -> float:
    """In the currency of the hardware file."""
    return price_per_hour / 3600.0 / found.tokens_per_second * 1e6


def _beaten(best: Found, last: Estimate) -> bool:
    """Whether a layout behind the last that was kept might be faster than the best, which was simulated."""
    return best.simulated and best.estimate.step_seconds > last.step_seconds


def _priced(found: Found, price: float | None) -> Found:
    return found if price is None else replace(found, price=price_per_million_tokens(found.estimate, price))


def _nothing_fits(nearest: Estimate, hardware: Hardware, devices: int) -> NothingFits:
    layout = ", ".join(f"{name} {value}" for name, value in nearest.as_json()["layout"].items())
    return NothingFits(
        f"no layout fits {devices} devices of {hardware.name!r}; the layout that needs the least memory is "
        f"{out_of_memory(nearest)} ({layout}); use more devices or devices with more memory, a smaller model or "
        "shorter samples, or set fewer fields",
        nearest,
    )


def _why_nothing_runs(base: PretrainConfig, devices: int, pinned: frozenset[str]) -> list[str]:
    """What the configuration as it is breaks, where that says why; else that nothing divides."""
    left_open = replace(base, parallel=replace(base.parallel, data=None)) if "parallel.data" not in pinned else base
    problems = run_problems(left_open, devices)
    named = ", ".join(sorted(pinned)) or "nothing"
    return problems or [
        f"no layout of {devices} devices can run: no sizes that divide the devices also divide heads, layers and "
        f"batch.global_size {base.batch.global_size}, with {named} set; use another number of devices or another "
        "batch size, or set fewer fields"
    ]
