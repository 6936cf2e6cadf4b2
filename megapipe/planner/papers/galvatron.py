"""Galvatron's search: pipeline degree, micro-batches and a strategy for every layer.

Miao et al. (2022), "Galvatron: Efficient Transformer Training over Multiple GPUs Using Automatic Parallelism", arXiv
2211.13878. A decision tree contains the strategies that a layer may use. For every pipeline degree, the optimization
algorithm cuts layers into stages and chooses the strategies of each by dynamic programming over layers and memory. The
batch size is that of the run, whereas the paper's algorithm also tries growing batches until none fits.

The costs of a layer under a strategy come from its ops in the configuration with this strategy (`OpCosts`): kernels
from the times of layers, collectives from its exchanges on the links of the strategy's groups, and bytes from the ops'
saved activations and the state of its unit. The trainer can run plans whose layers have the same tensor size and the
same number of replicas; their sharding and recomputation may differ (`parallel.layers`). The speed of other plans
shows whether supporting them would be worthwhile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, permutations, product
from math import inf, prod
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.config import ConfigError
from megapipe.config.command_line import Report, quiet
from megapipe.config.parallel import ScheduleConfig, ZeroConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.costs import LayoutCosts
from megapipe.layout.hardware.description import Hardware, hardware_device_type
from megapipe.layout.hardware.placement import Placement
from megapipe.layout.prediction import layout_costs
from megapipe.layout.stages import cached_method
from megapipe.layout.units import Unit
from megapipe.planner.cost.estimate import ENGINE
from megapipe.planner.cost.layer_costs import exchanges_seconds, overlapped
from megapipe.planner.cost.layer_times import LayerSeconds, LayerTimes, shared, slowest_roofline
from megapipe.planner.cost.run_layout import lay_on
from megapipe.planner.cost.step_time import ROUNDING, step_seconds
from megapipe.planner.papers.pipedream import uniform_run
from megapipe.schedules.actions import Floats, Ints
from megapipe.schedules.building_blocks import balance_layers
from megapipe.schedules.simulation.order_times import OrderCosts
from megapipe.spec.layers import tensor_problems
from megapipe.spec.ops import ELEMENT_BYTES, FULL_BYTES, Exchange

Method = Literal["data", "sharded", "tensor"]
"""Replicas with a whole state, replicas that shard one (ZeRO stage 3), or devices that share the layer's compute."""
METHODS: tuple[Method, ...] = ("data", "sharded", "tensor")


@dataclass(frozen=True)
class Strategy:
    """A leaf of a tree: how the devices of one pipeline stage work on a layer.

    pipeline: stages of the whole machine. levels: (method, degree) from the outermost, whose groups span the most
    devices, to the innermost, whose groups are neighbours. recompute: whether the backward recomputes the forward.
    """

    pipeline: int
    levels: tuple[tuple[Method, int], ...]
    recompute: bool = False

    def degree(self, method: Method) -> int:
        """Return the degree of a method; 1 if the strategy does not use it."""
        return dict(self.levels).get(method, 1)

    @property
    def replicas(self) -> int:
        """Return the number of parts of a micro-batch: the product of the degrees of "data" and "sharded"."""
        return self.degree("data") * self.degree("sharded")

    def block(self, device: int) -> int:
        """Return the index, from 0, of a device's part of a micro-batch, among the `replicas` parts."""
        index, scale = 0, 1
        for name, degree in reversed(self.levels):
            device, place = divmod(device, degree)
            if name != "tensor":
                index += place * scale
                scale *= degree
        return index


def stage_strategies(
    devices: int, pipeline: int, pruned: bool = True, recompute: bool = False
) -> tuple[Strategy, ...]:
    """Return all strategies of one pipeline degree, which divides the devices; both are powers of 2.

    pruned: leave out strategies that mix data with sharded data parallelism, because sharding alone needs less memory
    and traffic (the paper's takeaways). recompute: return each strategy with and without recomputation.
    """
    size = devices // pipeline
    return tuple(
        Strategy(pipeline, tuple(zip(methods, degrees, strict=True)), again)
        for count in range(len(METHODS) + 1)
        for methods in permutations(METHODS, count)
        if not (pruned and {"data", "sharded"} <= set(methods))
        for degrees in product([2**each for each in range(1, size.bit_length())], repeat=count)
        if prod(degrees) == size
        for again in ((False, True) if recompute else (False,))
    )


class StrategyCost(NamedTuple):
    """Costs of a layer under a strategy on one device.

    forward, backward: seconds of a micro-batch, including waits. reduction: seconds that gradient sums add to an
    iteration. state: bytes for the whole iteration. activations: bytes of each micro-batch in flight. working: bytes
    while the layer runs.
    """

    forward: float
    backward: float
    reduction: float
    state: float
    activations: float
    working: float


@dataclass(frozen=True)
class StagePlan:
    """A stage: layers first to last - 1, a strategy for each, and bytes of a device."""

    first: int
    last: int
    strategies: tuple[Strategy, ...]
    memory_bytes: float


@dataclass(frozen=True)
class Plan:
    """An iteration over `batch_size` sequences in `microbatches` micro-batches, its stages, and its seconds."""

    batch_size: int
    microbatches: int
    stages: tuple[StagePlan, ...]
    seconds: float

    @property
    def sequences_per_second(self) -> float:
        """Return the throughput."""
        return self.batch_size / self.seconds


def search(costs: "OpCosts", batch_size: int, *, units: int = 512, report: Report = quiet) -> Plan:
    """Return the fastest plan over all pipeline degrees and numbers of micro-batches; on a tie the first plan. Shapes
    whose lower bound is too slow are skipped.

    units: number of parts into which the dynamic programming divides the memory. report: receives the fraction of the
    work that is done. The numbers of micro-batches are powers of 2. Raises ValueError if the number of devices is not
    a power of 2, or no plan fits.
    """
    less = 1 << costs.devices.bit_length() - 1
    if less != costs.devices:
        raise ValueError(f"devices must be a power of 2, got {costs.devices}; use {less} or {2 * less}")
    shapes = [
        _Shape(costs, options, depth, microbatches, batch_size // microbatches)
        for depth in (2**power for power in range(costs.devices.bit_length()))
        if depth <= len(costs.kinds)
        for microbatches in (2**power for power in range(batch_size.bit_length()))
        if batch_size % microbatches == 0
        if (options := _options(costs, depth, batch_size // microbatches))
    ]
    best, seconds, place = None, inf, len(shapes)
    bounds = sorted((shape.least_seconds(), at) for at, shape in enumerate(shapes))
    for number, (bound, at) in enumerate(bounds):
        if bound > seconds:
            break
        report(number / len(shapes))
        plan = shapes[at].plan(units, seconds)
        if plan is not None and (plan.seconds, at) < (seconds, place):
            best, seconds, place = plan, plan.seconds, at
    if best is None:
        raise ValueError(
            f"no strategy of {costs.devices} devices fits {costs.memory_bytes:.4g} "
            f"bytes per device at a batch of {batch_size}; use more memory "
            "or devices, or smaller batch sizes with more factors of 2"
        )
    return best


def iteration_seconds(
    forward: npt.ArrayLike, backward: npt.ArrayLike, reduction: npt.ArrayLike, microbatches: int
) -> float:
    """Return the seconds of an iteration by a walk through the default schedule, which has a flush.

    forward, backward: seconds of a micro-batch by stage. reduction: seconds after the last backward of each stage.
    """
    first, second = (np.array([each], dtype=np.float64) for each in (forward, backward))
    none, links = np.zeros_like(first), np.zeros((1, first.size, first.size))
    costs = OrderCosts(none, first, none, second, none, none, links, links)
    after = np.asarray(reduction, dtype=np.float64)
    return float(step_seconds(ScheduleConfig.name, {}, costs, microbatches, [after])[0, 0])


def _options(costs: "OpCosts", depth: int, micro_size: int) -> tuple[Strategy, ...]:
    """Return the strategies that can divide both the model and a micro-batch."""
    every = stage_strategies(costs.devices, depth, recompute=True)
    return tuple(each for each in filter(costs.valid, every) if not micro_size % each.replicas)


@dataclass(frozen=True)
class _Shape:
    """One pipeline degree and number of micro-batches, with its strategies, of which there is at least one."""

    costs: "OpCosts"
    options: tuple[Strategy, ...]
    depth: int
    microbatches: int
    micro_size: int

    def least_seconds(self) -> float:
        """Return a lower bound of the seconds of all plans, from the first stage without its memory and transitions.

        An iteration takes at least as long as all micro-batches in the first stage and the reduction that follows.
        """
        seconds = self._tables(0).seconds
        return self.microbatches * float(seconds.min(axis=1).sum()) * (1.0 - ROUNDING)

    def plan(self, units: int, most: float) -> Plan | None:
        """Return the plan, with each stage chosen by dynamic programming; None if a stage does not fit, or would need
        more than `most` seconds for the iteration."""
        limit = most / self.microbatches * (1.0 + ROUNDING)
        stages, times = [], []
        known: dict[tuple[object, ...], LayerStrategies | None] = {}
        for index, (first, last) in enumerate(self._cuts):
            key = self.costs.kinds[first:last], self._in_flight(index), index == self.depth - 1
            if key not in known:
                known[key] = choose(self._tables(index), self.costs.memory_bytes, units, limit)
            choice = known[key]
            if choice is None:
                return None
            picked = self._by_kind[self.costs.kinds[first:last], choice.strategies]
            forward, reduction = picked[:, :3:2].sum(axis=0)
            backward = choice.seconds - reduction / self.microbatches - forward
            times.append((forward, backward, reduction))
            strategies = tuple(self.options[number] for number in choice.strategies)
            stages.append(StagePlan(first, last, strategies, choice.memory_bytes))
        forwards, backwards, reductions = np.array(times).T
        seconds = iteration_seconds(forwards, backwards, reductions, self.microbatches)
        batch_size = self.microbatches * self.micro_size
        return Plan(batch_size, self.microbatches, tuple(stages), seconds)

    @cached_property
    def _cuts(self) -> tuple[tuple[int, int], ...]:
        return balance_layers(self.costs.weights, self.depth)

    def _in_flight(self, stage: int) -> int:
        return min(self.depth - stage, self.microbatches)

    @cached_property
    def _by_kind(self) -> Floats:
        """Return the fields of `StrategyCost`, shape [kinds, strategies, fields]."""
        kinds = range(max(self.costs.kinds) + 1)
        return np.array([[self.costs.of(kind, each, self.micro_size) for each in self.options] for kind in kinds])

    @cached_property
    def _transitions(self) -> Floats:
        return self.costs.transitions(self.options, self.micro_size)

    def _tables(self, stage: int) -> "Tables":
        """Return the costs from which the dynamic programming chooses. All stages except the last one also send."""
        fields = self._by_kind[self.costs.kinds[slice(*self._cuts[stage])], :]
        forward, backward, reduction, state, activations, working = np.moveaxis(fields, 2, 0)
        seconds = forward + backward + reduction / self.microbatches
        if stage < self.depth - 1:
            seconds[-1] += [self.costs.send(each, self.micro_size) for each in self.options]
        kept = state + self._in_flight(stage) * activations
        return Tables(seconds, kept, working, self._transitions)


@dataclass(frozen=True)
class LayerStrategies:
    """The index of each layer's strategy, their total seconds with transitions, and their bytes."""

    strategies: tuple[int, ...]
    seconds: float
    memory_bytes: float


@dataclass(frozen=True)
class Tables:
    """Costs of every layer under every strategy; infinite seconds rule a strategy out.

    seconds: c, [layers, strategies]. kept: O, bytes that a layer keeps, [layers, strategies]. working: bytes that a
    layer needs while it runs, [layers, strategies]; a stage needs their maximum. transitions: R, seconds to change
    from one strategy to another between layers, [strategies, strategies].
    """

    seconds: Floats
    kept: Floats
    working: Floats
    transitions: Floats


def choose(tables: Tables, budget_bytes: float, units: int = 512, most: float = inf) -> LayerStrategies | None:
    """Return the fastest strategies within the budget; None if no strategies fit and take at most `most` seconds.

    C(L, E) = min over S_j of [ min over S_i of ( C(L - 1, E - O(L, S_j)) + R(L, S_i, S_j) ) + c(L, S_j) ]. In addition
    to the paper's memory O, which every layer keeps, the running layer needs working memory, which the next layer
    reuses. If the fastest strategies do not fit, the budget without working memory is divided into `units` parts,
    and kept bytes are rounded up to whole parts. The result never exceeds the budget, is exact if kept bytes are whole
    parts, and leaves at most the fraction layers / units of it unused.
    """
    best, limit = None, np.nextafter(most, inf)  # seconds of a better choice are below it
    nothing, layers = np.zeros(tables.kept.shape, dtype=np.int64), np.arange(len(tables.kept))
    alike = _classes(tables.transitions)
    for working in np.unique(tables.working[np.isfinite(tables.seconds)]):
        left = budget_bytes - working
        if left < 0:
            break
        seconds = np.where(tables.working <= working, tables.seconds, np.inf)
        if np.where(np.isfinite(seconds), tables.kept, np.inf).min(axis=1).sum() > left * (1 + ROUNDING):
            continue  # even the strategies that keep the fewest bytes exceed the budget
        least = seconds.min(axis=1).sum()
        if least * (1 - ROUNDING) > most or (best is not None and least >= best.seconds):
            continue  # too slow even if transitions took no time
        # First without the bound on memory, which the fastest strategies often keep.
        picked, total = _within(seconds, nothing, alike, units=1)
        if total < limit and tables.kept[layers, picked].sum() > left:
            picked, total = _within(seconds, _in_units(tables.kept, left, units), alike, units)
        if total < limit:
            memory = tables.kept[layers, picked].sum() + tables.working[layers, picked].max()
            best, limit = LayerStrategies(tuple(picked), total, float(memory)), total
    return best


def _in_units(kept: Floats, left: float, units: int) -> Ints:
    """Return kept bytes in whole units, rounded up; more than `units` for bytes that cannot fit."""
    if left == 0:
        return np.where(kept > 0, units + 1, 0).astype(np.int64)
    # Use slightly less than the quotient, so that rounding errors do not add one to a whole number of units.
    return np.minimum(np.ceil(kept / (left / units) * (1 - 1e-12)), units + 1).astype(np.int64)


def _within(seconds: Floats, kept: Ints, alike: tuple[Ints, Floats], units: int) -> tuple[list[int], float]:
    """Return the fastest strategies within `units`, and their seconds, infinite if none fit. alike: see `_classes`."""
    classes, between = alike
    num_layers, num_strategies = seconds.shape
    order = np.argsort(classes, kind="stable")
    first_of_class = np.searchsorted(classes[order], np.arange(len(between)))
    before = np.zeros((num_strategies, units + 1))
    # fastest[l][j, e]: seconds of the layers up to l, where l uses strategy j, in at most e units.
    fastest: list[Floats] = []
    for layer in range(num_layers):
        if layer > 0:
            grouped = np.minimum.reduceat(fastest[-1][order], first_of_class, axis=0)
            before = (grouped[:, None] + between[:, :, None]).min(axis=0)[classes]
        left = np.arange(units + 1) - kept[layer, :, None]
        spent = np.take_along_axis(before, left.clip(0), axis=1) + seconds[layer, :, None]
        fastest.append(np.where(left >= 0, spent, np.inf))
    strategy, left_units = int(fastest[-1][:, units].argmin()), units
    total = float(fastest[-1][strategy, units])
    if total == inf:
        return [], inf
    picked = [strategy]
    for layer in range(num_layers - 1, 0, -1):
        left_units -= int(kept[layer, strategy])
        transitions = between[classes, classes[strategy]]
        strategy = int((fastest[layer - 1][:, left_units] + transitions).argmin())
        picked.append(strategy)
    return picked[::-1], total


def _classes(transitions: Floats) -> tuple[Ints, Floats]:
    """Merge strategies with equal transition times: return the class of each, and the seconds between classes."""
    both = np.concatenate([transitions, transitions.T], axis=1)
    _, first, classes = np.unique(both, axis=0, return_index=True, return_inverse=True)
    return classes.reshape(-1), transitions[np.ix_(first, first)]


INSIDE = ("tensor", "context")
"""Dimensions of a mesh inside the pipeline dimension. They represent a strategy's methods, the innermost first."""
ADVICE = (
    "this is a paper's method; megapipe can train it only if all layers have the same tensor "
    "size and number of replicas (parallel.layers sets their sharding and recomputation)"
)


def per_layer(config: PretrainConfig, hardware: Hardware, devices: int, report: Report = quiet) -> dict[str, Any]:
    """Return the plan of Galvatron's search (`papers.galvatron.search`) for batches of batch.global_size, for JSON.

    report: as in `search`. Times of layers are the roofline of the first group's device. Raises ConfigError if the
    number of devices is not a power of 2, the precision is auto, the device has no peak for it, or nothing fits.
    """
    times = shared(slowest_roofline([hardware.groups[0].device], config.training.precision))
    costs = OpCosts(config, hardware, devices, times)
    try:
        plan = search(costs, config.batch.global_size, units=128, report=report)
    except ValueError as error:
        raise ConfigError(f"per-layer plan: {error}") from error
    return _as_json(plan, [each.name for each in costs.layers], config)


_Exchanges = Mapping[str, Sequence[Exchange]]
"""Exchanges by the dimension of their groups."""


class OpCosts:
    """Costs of layers under strategies. All devices count as equal, with the memory of the smallest one.

    devices, memory_bytes: number of devices, and bytes of one. kinds: number of each layer's kind; layers of one kind
    cost the same. weights: forward times of the layers, which determine the cut into stages.
    """

    def __init__(self, config: PretrainConfig, hardware: Hardware, devices: int, times: LayerTimes) -> None:
        self.whole, self.hardware, self.devices, self.times = uniform_run(config, 1), hardware, devices, times
        self.memory_bytes = min(node.device.memory_bytes for node in hardware.nodes(devices))
        self.slow_down = ENGINE.on(hardware).slow_down
        run = lay_on(self.whole, Placement(hardware, {}))
        self.layers, self.kinds, self._one_of = run.stages.layers, run.classes, run.layers
        forward = [times.of(self.whole, layer).forward for layer in self._one_of]
        self.weights = tuple(forward[kind] for kind in self.kinds)

    def valid(self, strategy: Strategy) -> bool:
        """Return whether tensor ranks can divide the model."""
        return not tensor_problems(self.whole.model, strategy.degree("tensor"))

    def transitions(self, options: Sequence[Strategy], micro_size: int) -> Floats:
        """Return the seconds to move activations, and later their gradients back, between two splits of a micro-batch
        over the devices of a stage: the most bytes that a device receives and sends, over the slowest link."""
        extent = self.devices // options[0].pipeline
        sizes = {"pipeline": options[0].pipeline, "tensor": extent}
        groups = Placement(self.hardware, sizes).groups("tensor")
        links = [each.crossing / max(each.members) if each.crosses else each.inside.bandwidth for each in groups]
        num_bytes = micro_size * self._laid(Strategy(1, ()), 1).stream
        return missing_shares(options, extent) * num_bytes / min(links)

    def send(self, strategy: Strategy, micro_size: int) -> float:
        """Return the seconds of a message and its gradient between the stages in the middle of the machine."""
        stream = self._laid(strategy, micro_size // strategy.replicas).stream
        return 2 * self._placed(strategy).send(stream, strategy.pipeline // 2 - 1).seconds

    def of(self, kind: int, strategy: Strategy, micro_size: int) -> StrategyCost:
        """Return the costs of a layer for a micro-batch of `micro_size` sequences on all replicas together."""
        per_replica, tensor = micro_size // strategy.replicas, strategy.degree("tensor")
        again = strategy.recompute and self._one_of[kind].kind == "block"
        kernels, exchanges, kept, stream, temporaries = self._sizes(kind, tensor, per_replica, strategy.recompute)
        computed = kernels.backward_input + kernels.backward_weight + (kernels.recompute if again else 0.0)
        once, twice = (self._seconds(strategy, "tensor", each) for each in exchanges)
        method: Method = "sharded" if strategy.degree("sharded") > 1 else "data"
        gathers, sums, state, gathered = self._state(kind, tensor, method, strategy.replicas)
        # Sharded weights are gathered before the forward and before the backward.
        gather, reduction = (self._seconds(strategy, method, each) for each in (gathers, sums))
        return StrategyCost(
            kernels.forward + twice - once + gather,
            computed + (once if again else 2 * once - twice) + gather,
            overlapped(computed, reduction, self.slow_down) - computed,
            state,
            stream if again else kept,
            stream + temporaries + (kept if again else 0) + gathered,
        )

    @cached_method
    def _sizes(
        self, kind: int, tensor: int, sequences: int, recompute: bool
    ) -> tuple[LayerSeconds, list[_Exchanges], int, int, int]:
        """Return the kernels' seconds in a layer, its exchanges of a backward with one forward and with two, and the
        bytes of its saved activations, its input, and temporaries. They do not depend on the replicas."""
        layer = self._one_of[kind]
        costs = self._laid(Strategy(1, (("tensor", tensor),), recompute), sequences)
        exchanges: list[_Exchanges] = [costs.within_layer(layer, forwards=count, halves=False) for count in (1, 2)]
        kernels, temporaries = self.times.of(costs.config, layer), costs.temporaries(layer, "backward")
        return kernels, exchanges, costs.kept(layer), costs.stream, temporaries

    @cached_method
    def _state(self, kind: int, tensor: int, method: Method, replicas: int) -> tuple[_Exchanges, _Exchanges, int, int]:
        """Return the gathers of a layer's weights, the sums of its gradients, its bytes between steps, and the bytes
        of its gathered weights and gradients. They do not depend on the micro-batch."""
        costs = self._laid(Strategy(1, (("tensor", tensor), (method, replicas))), 1)
        unit, units, zero = Unit(tuple(self._one_of[kind].parameters.values())), costs.of_units, costs.config.zero
        whole = zero.weight_buffers * ELEMENT_BYTES[costs.precision] + zero.gradient_buffers * FULL_BYTES
        gathered = units.elements(unit) * whole if method == "sharded" else 0
        return units.gather(unit), units.reduction(unit), units.state(unit).total, gathered

    @cached_method
    def _laid(self, strategy: Strategy, sequences: int) -> LayoutCosts:
        """Return the sizes of a model with one strategy. sequences: those of a micro-batch on one device."""
        sizes = {"data": strategy.replicas, "tensor": strategy.degree("tensor")}
        run = uniform_run(self.whole, sequences, **sizes, recompute=strategy.recompute)
        run = replace(run, zero=ZeroConfig(stage=3 if strategy.degree("sharded") > 1 else 0))
        return layout_costs(run, device=hardware_device_type(self.hardware))

    @cached_method
    def _placed(self, strategy: Strategy) -> Placement:
        """Return a placement of the pipeline with the strategy's groups; devices of a stage are next to each other."""
        degrees = [strategy.pipeline, *(degree for _, degree in reversed(strategy.levels))]
        return Placement(self.hardware, dict(zip(("pipeline", *INSIDE), degrees, strict=False)))

    def _seconds(self, strategy: Strategy, method: Method, exchanges: _Exchanges) -> float:
        """Return the seconds of exchanges within the groups of a method; 0 if the strategy does not use it."""
        methods = [name for name, _ in reversed(strategy.levels)]
        if method not in methods:
            return 0.0
        every = chain.from_iterable(exchanges.values())
        return exchanges_seconds(self._placed(strategy), every, INSIDE[methods.index(method)])


def missing_shares(options: Sequence[Strategy], extent: int) -> Floats:
    """Return the largest fraction of a micro-batch that any of the `extent` devices of a stage receives and sends when
    the strategy changes; shape [strategies, strategies]. options: strategies of one pipeline degree."""
    replicas = np.array([each.replicas for each in options], dtype=np.float64)
    start = np.array([[each.block(device) for device in range(extent)] for each in options]) / replicas[:, None]
    stop = start + 1 / replicas[:, None]
    common = np.minimum(stop[:, None], stop[None]) - np.maximum(start[:, None], start[None])
    both = 1 / replicas[:, None] + 1 / replicas[None]
    missing = np.maximum(0.0, both[..., None] - 2 * np.maximum(0.0, common)).max(axis=2)
    # A device with the whole micro-batch before and after has nothing to move; rounding errors may hide that.
    return np.where((replicas[:, None] == 1) & (replicas[None] == 1), 0.0, missing)


def _as_json(plan: Plan, names: list[str], config: PretrainConfig) -> dict[str, Any]:
    """Return a plan for JSON. placement: methods from the widest groups to groups of neighbors."""
    strategies = [strategy for stage in plan.stages for strategy in stage.strategies]
    layers = [
        {
            "name": name,
            "data": strategy.degree("data"),
            "sharded_data": strategy.degree("sharded"),
            "tensor": strategy.degree("tensor"),
            "placement": [method for method, _ in strategy.levels],
            "recompute": strategy.recompute,
        }
        for name, strategy in zip(names, strategies, strict=True)
    ]
    return {
        "note": ADVICE,
        "source": "Galvatron's search, arXiv 2211.13878",
        "step_time_s": plan.seconds,
        "tokens_per_s": plan.sequences_per_second * config.data.sequence_length,
        "pipeline": len(plan.stages),
        "microbatches": plan.microbatches,
        "one_strategy": len(set(strategies)) == 1,
        "stages": [
            {"memory_bytes": stage.memory_bytes, "layers": layers[stage.first : stage.last]} for stage in plan.stages
        ],
    }
