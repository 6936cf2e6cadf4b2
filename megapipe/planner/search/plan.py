"""The search for the fastest layouts of a run. Other objectives search several numbers of devices, or models."""

import math
import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

from megapipe.config import ConfigError
from megapipe.config.command_line import DAY, HOUR, Report, quiet
from megapipe.config.model import ModelConfig
from megapipe.config.parallel import MeshShape
from megapipe.config.run import PretrainConfig
from megapipe.layout.batch_plan import num_microbatches
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.hardware.placement import OrderCost, Placement, best_node_order
from megapipe.layout.prediction import layout_costs
from megapipe.layout.scheduling import num_stages
from megapipe.layout.stages import layers_of, num_parameters
from megapipe.layout.validation import run_problems
from megapipe.planner.cost.estimate import ENGINE, Assumptions, Estimate
from megapipe.planner.cost.layer_times import LayerTimes, shared, slowest_roofline
from megapipe.planner.cost.model import estimate, predict
from megapipe.planner.cost.run_layout import lay_on
from megapipe.planner.search import Objective
from megapipe.planner.search.bounds import LayoutBounds
from megapipe.planner.search.evaluation import Evaluation
from megapipe.planner.search.explorer import Explorer, order
from megapipe.planner.search.findings import Findings, NothingFits, PlannedLayout, Trial, alternatives, hints
from megapipe.planner.search.space import PROMISING, Layouts, SearchSpace
from megapipe.schedules.building_blocks import balance_layers
from megapipe.spec.ops import FULL_BYTES

WIDEST = 8
"""Maximum number of layouts to refine, in multiples of `Effort.keep`, if simulation makes the first ones slower."""
MISSES = 3
"""Number of models in a row that do not fit, after which the search stops."""
STEPS = 4
"""Number of models per doubling of width and depth."""
SMALLEST, LARGEST = -2, 5
"""Smallest and largest power of 2 by which width and depth are scaled."""
HEADS, LAYERS = 8, 4
"""Heads and layers are multiples of these, or of their greatest common divisor with the model's own numbers, so that
tensor and pipeline sizes divide them."""
Speed = Callable[..., Findings]


@dataclass(frozen=True)
class Effort:
    """The work of a search in addition to finding the best layout.

    keep: number of layouts to rank. slowest: slowest step of the Pareto front, as a multiple of the best layout's
    step; 0 for no front. tolerance: relative time or memory by which the front may miss a layout. actions: as in
    `Refiner`; 0 simulates nothing. alternatives: whether to compare with alternatives. stages: whether layers may move
    between stages to balance their times. hints: whether to search similar requests for hints.
    """

    keep: int = 5
    slowest: float = 1.5
    tolerance: float = 0.02
    actions: int = 100_000
    alternatives: bool = True
    stages: bool = True
    hints: bool = True


QUICK = Effort(keep=1, slowest=0, actions=0, alternatives=False, stages=False, hints=False)
"""Effort of a search whose result is only compared with others."""
BEST_ALONE = Effort(slowest=0.0, alternatives=False, hints=False)
"""Effort of a search that needs only the best layouts, with simulated times."""


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
    report: Report = quiet,
) -> Findings:
    """Return the layouts with the most tokens per second. report: receives the fraction of the work that is done.

    The search compares layouts by `planner.cost.model.estimate`; it then simulates the best ones, as far as `effort`
    allows, and ranks them by the result. Pruning never removes a layout that belongs in the result.

    Raises:
        ConfigError: `Layouts` rejects the request, no layout can run, or the cost model cannot time the run.
        NothingFits: layouts can run, but none fits.

    Example:
        >>> from megapipe import load_hardware, parse, search_speed
        >>> config = parse(["--model.num_layers", "12", "--batch.global_size", "64"])
        >>> search_speed(config, load_hardware("h100"), devices=8).best.estimate.world_size
        8
    """
    started = time.perf_counter()
    space, effort = space or SearchSpace(), effort or Effort()
    times = shared(times or slowest_times(base, hardware, devices, assumptions))
    layouts = Layouts(base, devices, pinned, space)
    limit = max(node.device.memory_bytes for node in hardware.nodes(devices))
    costs = Evaluation(base, hardware, times, assumptions)
    explorer = Explorer(layouts, LayoutBounds(costs, devices), costs, limit)
    if not explorer.count:
        raise ConfigError(_why_nothing_runs(base, devices, pinned))
    report(0.1)
    explorer.add_other_schedules(PROMISING)
    report(0.3)
    movable = effort.stages and "parallel.layers_per_stage" not in pinned
    refiner, keep = Refiner(hardware, times, effort.actions, assumptions), effort.keep
    fastest = explorer.fastest(keep)
    report(0.6)
    ranked = refiner.refined(fastest, stages=movable)
    report(0.8)
    # Estimates have errors, so layouts after the kept ones may be better, or may be the only ones that fit.
    while len(fastest) == keep:
        beaten = ranked and ranked[0].simulated and ranked[0].estimate.step_seconds > fastest[-1].step_seconds
        if ranked and not (beaten and keep < WIDEST * effort.keep):
            break
        keep *= 2
        more = explorer.fastest(keep)
        ranked = refiner.refined(more[len(fastest) :], ranked, stages=movable)
        fastest = more
    if not ranked:
        # At least one layout exists, so `nearest` returns one.
        raise NothingFits(cast(Estimate, explorer.nearest()), hardware, devices)
    slowest = effort.slowest * fastest[0].step_seconds
    front = explorer.front(slowest, effort.tolerance, fastest[:1]) if effort.slowest else []
    others = alternatives(explorer, hardware, fastest[0]) if effort.alternatives else ()
    report(0.9)

    def quickly(config: PretrainConfig, machine: Hardware, count: int) -> Estimate:
        findings = search_speed(config, machine, count, pinned, space=space, effort=QUICK, assumptions=assumptions)
        return findings.best.estimate

    hinted = effort.hints and hardware.measured is None and "parallel.data" not in pinned
    near = tuple(hints(base, hardware, devices, ranked[0].estimate, quickly)) if hinted else ()
    report(1.0)
    price = hardware.price_per_hour(devices)
    return Findings(
        objective="speed",
        devices=devices,
        ranked=tuple(_priced(each, price) for each in ranked[: effort.keep]),
        pareto=tuple(_priced(PlannedLayout(each), price) for each in front),
        alternatives=others,
        trials=(),
        hints=near,
        not_searched=tuple(space.not_searched(base, pinned)),
        examined=explorer.examined,
        pruned=explorer.pruned(),
        layouts=explorer.count,
        seconds=time.perf_counter() - started,
    )


def slowest_times(
    base: PretrainConfig, hardware: Hardware, devices: int, assumptions: Assumptions = ENGINE
) -> LayerTimes:
    """Return the default times of a search. Raises ConfigError as `slowest_roofline`."""
    used = (node.device for node in hardware.nodes(devices))
    return slowest_roofline(used, base.training.precision, assumptions.megatron_kernels)


def _priced(plan: PlannedLayout, per_hour: float | None) -> PlannedLayout:
    """Fill in the price of a million tokens, in the currency of the hardware file."""
    speed = plan.estimate.tokens_per_second
    price = None if per_hour is None else per_hour / HOUR / speed * 1e6
    return replace(plan, price=price)


def _why_nothing_runs(base: PretrainConfig, devices: int, pinned: frozenset[str]) -> list[str]:
    """Return the rules that the given configuration breaks; if none, a message that no sizes divide the devices."""
    left_open = replace(base, parallel=replace(base.parallel, data=None)) if "parallel.data" not in pinned else base
    problems = run_problems(left_open, devices)
    named = ", ".join(sorted(pinned)) or "nothing"
    return problems or [
        f"no layout of {devices} devices can run: no sizes that divide the devices also "
        f"divide heads, layers and batch.global_size {base.batch.global_size}, with {named} "
        "set; use another number of devices or another batch size, or set fewer fields"
    ]


@dataclass
class Refiner:
    """Improves the best layouts: balances stages by time, orders nodes, and simulates the schedule.

    hardware, times, assumptions: those of the estimates. actions: forwards and backwards of a step, over all pipeline
    ranks, that all simulations together may still run; each takes tens of microseconds.
    """

    hardware: Hardware
    times: LayerTimes
    actions: int
    assumptions: Assumptions = ENGINE

    def refined(
        self, estimates: Sequence[Estimate], known: Sequence[PlannedLayout] = (), *, stages: bool
    ) -> tuple[PlannedLayout, ...]:
        """Return the improved layouts together with the `known` ones, the fastest first.

        The first layout without a simulation is simulated and sorted in again, until all are simulated or the next one
        needs more than the remaining `actions`. So a layout stays first only if no other estimate is faster. Layouts
        whose simulation does not fit are removed. stages: whether layers may move between stages.
        """

        def by_estimate(each: PlannedLayout) -> tuple[float, int]:
            return order(each.estimate)

        new = (self._ordered(self._by_time(each) if stages else each) for each in estimates)
        ranked = sorted([*known, *new], key=by_estimate)
        while (at := next((at for at, each in enumerate(ranked) if not each.simulated), None)) is not None:
            config, nodes = ranked[at].config, ranked[at].node_order
            needed = 2 * num_microbatches(config, ranked[at].estimate.world_size) * num_stages(config)
            if needed > self.actions:
                break
            self.actions -= needed
            candidate = ranked.pop(at)
            exact = predict(config, self.hardware, times=self.times, node_order=nodes, assumptions=self.assumptions)
            if exact.estimate.fits:
                insort(ranked, replace(candidate, estimate=exact.estimate, simulated=True), key=by_estimate)
        return tuple(ranked)

    def _by_time(self, before: Estimate) -> Estimate:
        """Balance stages by the times of layers instead of their FLOPs, if that is faster and fits."""
        config = before.config
        if config.parallel.pipeline == 1 or config.parallel.layers_per_stage is not None or config.schedule.file:
            return before
        # Kinds of layers depend on no mesh. The seconds are those of all phases.
        run = lay_on(config, Placement(self.hardware, {}))
        seconds = [sum(self.times.of(config, layer)[:4]) for layer in run.layers]
        bounds = balance_layers([seconds[kind] for kind in run.classes], num_stages(config))
        sizes = [stop - first for first, stop in bounds]
        if sizes == list(run.stages.units_per_stage):
            return before
        moved = replace(config, parallel=replace(config.parallel, layers_per_stage=sizes))
        after = estimate(moved, self.hardware, times=self.times, assumptions=self.assumptions)
        return after if after.fits and after.step_seconds < before.step_seconds else before

    def _ordered(self, before: Estimate) -> PlannedLayout:
        """Put the nodes in the best order, if their links were measured and that is faster."""
        if self.hardware.link_matrix is None:
            return PlannedLayout(before)
        config, parallel = before.config, before.config.parallel
        sizes, message = MeshShape.of(parallel).sizes, layout_costs(config).stream
        elements = sum(spec.num_elements for layer in layers_of(config) for spec in layer.parameters.values())
        gradients = FULL_BYTES * elements / (parallel.tensor * parallel.pipeline)
        try:
            order = best_node_order(OrderCost(self.hardware, sizes, message, gradients))
        except ConfigError:  # a mesh that does not cut the nodes evenly has no other order
            return PlannedLayout(before)
        after = estimate(config, self.hardware, times=self.times, node_order=order, assumptions=self.assumptions)
        faster = after.step_seconds < before.step_seconds
        return PlannedLayout(after, node_order=order) if faster else PlannedLayout(before)


class Member(NamedTuple):
    """A model of a family. parameters: number of parameters; tied ones count once."""

    name: str
    model: ModelConfig
    parameters: int


def search(
    base: PretrainConfig,
    hardware: Hardware,
    devices: int,
    pinned: frozenset[str] = frozenset(),
    *,
    objective: Objective = "speed",
    space: SearchSpace | None = None,
    tokens: float | None = None,
    models: Sequence[tuple[str, ModelConfig]] = (),
    times: LayerTimes | None = None,
    effort: Effort | None = None,
    assumptions: Assumptions = ENGINE,
    report: Report = quiet,
) -> Findings:
    """Return the best layouts of a run by an objective.

    base: configuration of all fields that layouts do not set. pinned: paths of fields that no layout may change, such
    as `parallel.tensor`. tokens: number of tokens to train on, for the objective time. models: models to choose from
    for the objective size, by default `family`. times: times of layers, by default the slowest device's roofline.
    assumptions: as in `estimate`, for all searches. effort: effort of the final search; the searches that compare
    device counts or models only find the best layout.

    The objectives cost and time compare numbers of devices up to `devices` (`device_counts`), and size compares
    models. The result is that of the best one; `trials` has all of them.

    Raises:
        ConfigError: invalid fields, missing prices or tokens if the objective needs them, or no layout that can run.
        NothingFits: layouts can run, but none fits.
    """
    if objective not in ("speed", "cost", "time", "size"):
        raise ConfigError(f"unknown objective {objective!r}; it must be one of speed, cost, time, size")
    if objective == "time" and (tokens is None or tokens <= 0):
        raise ConfigError("objective time needs the number of tokens to train on; set it, as in --tokens 300e9")
    if objective == "cost" and hardware.price_per_hour(devices) is None:
        raise ConfigError(
            f"objective cost needs prices, but hardware {hardware.name!r} has groups "
            "without price_per_hour; add it to the hardware file, or pass --price_per_hour"
        )
    started = time.perf_counter()
    speed = partial(search_speed, hardware=hardware, pinned=pinned, space=space, times=times, assumptions=assumptions)
    if objective == "speed":
        return speed(base, devices=devices, effort=effort, report=report)
    if objective == "size":
        members = sorted_members(base, models) if models else family(base)
        base, trials = _largest(base, members, partial(speed, devices=devices, effort=QUICK))
    else:
        wanted, counts = tokens if objective == "time" else None, device_counts(devices, hardware)
        devices, trials = _best_count(counts, wanted, partial(speed, base, effort=QUICK))
    findings = speed(base, devices=devices, effort=effort, report=report)
    return replace(findings, objective=objective, trials=tuple(trials), seconds=time.perf_counter() - started)


def device_counts(devices: int, hardware: Hardware) -> tuple[int, ...]:
    """Return the numbers of devices to try: `devices`, and powers of 2 and three times these up to it; above one node
    only whole nodes."""
    node = hardware.nodes(1)[0].devices_per_node
    tried = {factor * 2**power for factor in (1, 3) for power in range(devices.bit_length())}
    return tuple(sorted({each for each in tried if each <= devices and (each <= node or not each % node)} | {devices}))


def _best_of(speed: Speed, **request: Any) -> tuple[PlannedLayout | None, ConfigError | None]:
    """Return the best layout of a request, or the reason why there is none."""
    try:
        return speed(**request).best, None
    except ConfigError as error:
        return None, error


def _best_count(counts: Iterable[int], tokens: float | None, speed: Speed) -> tuple[int, list[Trial]]:
    """Return the number of devices with the lowest price, or that trains on `tokens` in the fewest days, on a tie the
    smallest, and all trials."""
    trials, values = [], dict[int, float]()
    for count in counts:
        best, reason = _best_of(speed, devices=count)
        if best is not None:
            days = None if tokens is None else tokens / best.estimate.tokens_per_second / DAY
            values[count] = (best.price or 0.0) if days is None else days
        trials.append(Trial(f"{count} devices", best, values.get(count)))
    if not values:  # more devices may fit where fewer do not: report the last reason
        raise cast(ConfigError, reason)
    return min(values, key=lambda count: (values[count], count)), trials


def _largest(base: PretrainConfig, members: Iterable[Member], speed: Speed) -> tuple[PretrainConfig, list[Trial]]:
    """Return the run with the largest model that fits, and all trials. A model with few divisors may not fit although
    a larger one does, so the search stops only after `MISSES` models in a row that do not fit."""
    trials: list[Trial] = []
    chosen: PretrainConfig | None = None
    first_reason: ConfigError | None = None
    missed = 0
    for member in members:
        config = replace(base, model=member.model)
        best, reason = _best_of(speed, base=config)
        trials.append(Trial(member.name, best, float(member.parameters)))
        if best is not None:
            missed, chosen = 0, config
        first_reason = first_reason or reason
        missed += isinstance(reason, NothingFits)
        if missed == MISSES:
            break
    if chosen is None:
        raise cast(ConfigError, first_reason)
    return chosen, trials


def family(base: PretrainConfig) -> tuple[Member, ...]:
    """Return smaller and larger versions of `base.model`, width and depth scaled by one factor, in ascending order.

    The head size, the number of queries per group, and the ratio of a given MLP width to the hidden size stay the
    same. Models that are equal after rounding appear once. Raises ConfigError for a model with kinds of layers.
    """
    if base.model.layer_pattern:
        raise ConfigError(
            f"model.layer_pattern is {', '.join(base.model.layer_pattern)}; only a model whose blocks are alike can "
            "be scaled: leave it and model.layer_kinds out, or name the models to compare"
        )
    models = [_scaled(base.model, 2.0 ** (step / STEPS)) for step in range(SMALLEST * STEPS, LARGEST * STEPS + 1)]
    different = {(each.num_heads, each.num_layers): each for each in models}.values()
    return sorted_members(base, [(f"{each.num_layers} layers of {each.hidden_size}", each) for each in different])


def sorted_members(base: PretrainConfig, models: Iterable[tuple[str, ModelConfig]]) -> tuple[Member, ...]:
    """Return named models as a family, in ascending order of parameters."""
    members = [Member(name, model, num_parameters(replace(base, model=model))) for name, model in models]
    return tuple(sorted(members, key=lambda each: each.parameters))


def _scaled(model: ModelConfig, factor: float) -> ModelConfig:
    group = model.num_heads // model.kv_heads
    multiple = math.lcm(math.gcd(HEADS, model.num_heads), group)
    heads = max(1, round(model.num_heads * factor / multiple)) * multiple
    even = math.gcd(LAYERS, model.num_layers)
    layers = max(1, round(model.num_layers * factor / even)) * even
    hidden, ffn = round(model.hidden_size / model.num_heads * heads), model.ffn_hidden_size
    return replace(
        model,
        num_heads=heads,
        num_layers=layers,
        hidden_size=hidden,
        num_kv_heads=None if model.num_kv_heads is None else heads // group,
        ffn_hidden_size=None if ffn is None else round(ffn / model.hidden_size * hidden / 64) * 64,
    )
