"""The cost model: time and memory of a step for one layout on one machine, by an estimate or by simulation.

A simulation runs the lowered schedule, whose actions also determine the memory. Copies between device and host memory
are timed by stage and unit; only the time that compute does not hide counts.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware, hardware_device_type
from megapipe.layout.prediction import RankPrediction, predict_rank
from megapipe.layout.table import lowered_schedule, moves_to_host
from megapipe.layout.units import StateBytes, layer_units
from megapipe.planner.cost.estimate import ENGINE, Assumptions, Estimate, RankMemory, Term
from megapipe.planner.cost.layer_costs import (
    LayerCost,
    StageCosts,
    each_layer,
    microbatch_cost,
    scalar_seconds,
    stage_costs,
    state_cost,
    tied_seconds,
    tied_updates,
)
from megapipe.planner.cost.layer_times import LayerTimes, slowest_roofline
from megapipe.planner.cost.memory import rank_memories
from megapipe.planner.cost.run_layout import RunLayout, lay_run
from megapipe.planner.cost.step_time import STEPS, StepTimer, hop_seconds, split_fractions, work_terms
from megapipe.planner.measured import (
    MeasuredTimes,
    at_ease,
    is_measured,
    shares_a_machine,
    simulate_measured,
    traffic_share,
)
from megapipe.schedules import Costs, Header, Link, Schedule, Simulation, simulate
from megapipe.schedules.actions import KIND, STAGE, UNIT, VERSION, Floats, Kind
from megapipe.schedules.simulation import CostPlace
from megapipe.spec.ops import ELEMENT_BYTES


@dataclass(frozen=True)
class HostCopies:
    """Seconds of copies to or from host memory (one way), by stage and unit.

    activations: activations of a micro-batch, for layers that move them. state: optimizer state that the update of
    each state unit uses. weights: weights of state units that keep them in host memory.
    """

    activations: Mapping[tuple[int, int], float]
    state: Mapping[tuple[int, int], float]
    weights: Mapping[tuple[int, int], float]


def host_copies(run: RunLayout, schedule: Schedule) -> HostCopies:
    """Return the copies of a run that moves something to host memory.

    schedule: lowered schedule of the run, which determines the state of each rank.
    """
    host, moved, costs, layers = run.host, run.table.offload, run.costs, run.stages.layers
    activations = {
        (stage, unit): host.seconds(costs.kept(layers[run.stages.ranges[stage][unit]]))
        for stage, units in enumerate(moved.units)
        for unit in units
    }
    state = {
        place: host.seconds(rank.in_host_of(place))
        for rank in (_predictions(run, schedule) if moved.optimizer else ())
        for place in rank.units
    }
    weights = dict[tuple[int, int], float]()
    if run.config.offload.weights:
        for stage, members in enumerate(run.stages.ranges):
            units = (unit for index in members for unit in layer_units(layers[index], run.tied, run.config.zero))
            for number, unit in enumerate(units):
                size = costs.of_units.elements(unit) * ELEMENT_BYTES[costs.precision]
                weights[stage, number] = host.seconds(size)
    return HostCopies(activations, state, weights)


def _predictions(run: RunLayout, schedule: Schedule) -> Iterator[RankPrediction]:
    """Yield the prediction of one rank of each pipeline coordinate. schedule: lowered. Ranks that differ only in other
    coordinates hold the same."""
    first = predict_rank(run.config, schedule, 0, device=hardware_device_type(run.hardware))
    yield from (replace(first, pipeline_rank=coordinate) for coordinate in range(run.pipeline))


def slowed(run: RunLayout, costs: StageCosts, schedule: Schedule, copies: HostCopies) -> StageCosts:
    """Return estimated costs of stages whose passes and updates wait for copies.

    Activations leave in a stage's forward and return in its backward, each during the compute of `prefetch` units;
    weights are copied in both. The estimate ignores that early reloads can also overlap with forwards of other
    micro-batches. State arrives one unit before its update and leaves right after it; nothing hides these copies.
    """
    units = np.array(run.stages.units_per_stage)
    moved = _a_microbatch(run, schedule, Kind.OFFLOAD, dict.fromkeys(copies.activations, 1.0))
    activations = _a_microbatch(run, schedule, Kind.OFFLOAD, copies.activations)
    weights = _a_microbatch(run, schedule, Kind.GATHER_WEIGHTS, copies.weights) / 2
    backward = costs.whole_again + costs.input_half + costs.weight_half(apart=0.0)
    hidden = backward * np.where(moved > 0, np.minimum(1.0, moved * run.table.offload.prefetch / units), 1.0)
    late_forward = np.maximum(0.0, np.maximum(activations, weights) - costs.whole_forward)
    late_backward = np.maximum(0.0, np.maximum(activations - hidden, activations + weights - backward))
    state = np.zeros(len(units))
    for (stage, unit), seconds in copies.state.items():
        last = unit == schedule.header.state_units(stage)[-1]
        state[stage] += 2 * seconds if last else seconds
    return replace(
        costs,
        forward=costs.forward + late_forward,
        made_again=costs.made_again + late_backward,
        update=costs.update + state,
    )


def _a_microbatch(run: RunLayout, schedule: Schedule, kind: Kind, seconds: Mapping[tuple[int, int], float]) -> Floats:
    """Return for each stage the seconds that a kind of copy takes per micro-batch. seconds: time to copy each unit."""
    rows = np.concatenate(schedule.sections.body)
    chosen = rows[(rows[:, KIND] == kind) & ((kind != Kind.OFFLOAD) | (rows[:, VERSION] < 0))]
    places = chosen[:, [STAGE, UNIT]].tolist()
    weights = [seconds.get((stage, unit), 0.0) for stage, unit in places]
    totals: Floats = np.bincount(chosen[:, STAGE], weights, minlength=len(run.stages.ranges)) / run.num_microbatches
    return totals


@dataclass(frozen=True)
class Prediction:
    """A simulated step. `estimate` has its times and the memory of every pipeline coordinate."""

    estimate: Estimate
    schedule: Schedule
    simulation: Simulation


def simulated(
    run: RunLayout, layers: Sequence[LayerCost], assumptions: Assumptions, contended: bool = False
) -> tuple[Schedule, Simulation, tuple[Term, ...]]:
    """Return a run's schedule, its simulation, and the terms of a step, which add up to its time.

    layers: costs of one layer of each of `run.kinds`. contended: `layers` has times of a rank while all others are
    idle, and the simulation applies the measured slow-down of ranks that compute at the same time.
    """
    schedule = lowered_schedule(run.config, run.stages)
    costs = stage_costs(run, layers)
    of_actions = _action_costs(run, layers, schedule.header, assumptions)
    measured, processes = run.hardware.measured if contended else None, run.world_size // run.pipeline
    share = traffic_share(run.placement.nodes[0].inside, run.costs.replicas)

    def simulated_for(of_actions: Costs, steps: int) -> Simulation:
        if measured is None:
            return simulate(schedule, of_actions, steps)
        return simulate_measured(schedule, of_actions, measured, processes=processes, traffic_share=share, steps=steps)

    def timed(of_actions: Costs) -> tuple[Simulation, float]:
        if schedule.flushes:
            simulation = simulated_for(of_actions, 1)
            return simulation, simulation.finish
        simulation, shorter = simulated_for(of_actions, STEPS), simulated_for(of_actions, STEPS // 2)
        return simulation, (simulation.finish - shorter.finish) / (STEPS - STEPS // 2)

    simulation, seconds = timed(of_actions)
    terms = [*_terms(run, costs, schedule, seconds)]
    if moves_to_host(run.config):
        simulation, slower = timed(_with_host_times(of_actions, host_copies(run, schedule)))
        terms.append(Term("offload", slower - seconds, "copies to and from host memory that compute does not hide"))
    return schedule, simulation, tuple(term for term in terms if term.seconds)


def _with_host_times(costs: Costs, copies: HostCopies) -> Costs:
    """Return the costs with copies. Weights in host memory are copied to the device, not gathered from replicas."""
    times = {
        CostPlace(kind, *place): seconds
        for kind, units in (
            (Kind.OFFLOAD, copies.activations),
            (Kind.RELOAD, copies.activations),
            (Kind.GATHER_WEIGHTS, copies.weights),
        )
        for place, seconds in units.items()
    }
    return replace(costs.with_times(times), moved_states={**costs.moved_states, **copies.state})


def _action_costs(run: RunLayout, layers: Sequence[LayerCost], header: Header, assumptions: Assumptions) -> Costs:
    """Return the costs of a run's actions, without copies to host memory. See `simulated` for `layers`."""
    size = run.pipeline
    hops = [Link(*each) for each in hop_seconds(run, assumptions)]
    links = {(rank, (rank + 1) % size): hops[rank] for rank in range(size)}
    links |= {(to, sender): link for (sender, to), link in links.items() if (to, sender) not in links}
    stages = [CostPlace(Kind.FORWARD, stage) for stage in range(len(header.stages))]
    units = [place._replace(unit=unit) for place in stages for unit in range(header.units_per_stage[place.stage])]
    times = dict(_compute_times(stage_costs(run, layers), stages))
    times |= _compute_times(each_layer(run, layers), units)
    times |= {place._replace(kind=kind): 0.0 for place in units for kind in (Kind.OFFLOAD, Kind.RELOAD)}
    times |= _state_times(run, layers, header, gathers_in_updates=not assumptions.gathers_beside_forward)
    return Costs(
        times,
        {(place.stage, place.unit): 0.0 for place in times if place.kind == Kind.UPDATE},
        reduce_tied=tied_seconds(run),
        reduce_scalars=scalar_seconds(run),
        links=links,
        blocking_sends=assumptions.waits_for_sends,
    )


def _compute_times(costs: StageCosts, places: Sequence[CostPlace]) -> Iterator[tuple[CostPlace, float]]:
    """Yield the times of compute actions. places: the stage or layer of each entry of the costs."""
    for kind, seconds in (
        (Kind.FORWARD, costs.whole_forward),
        (Kind.RECOMPUTE, costs.whole_again),
        (Kind.BACKWARD, costs.input_half + costs.weight_half(apart=0.0)),
        (Kind.BACKWARD_INPUT, costs.input_half),
        (Kind.BACKWARD_WEIGHT, costs.weight_half(apart=1.0)),
    ):
        yield from ((place._replace(kind=kind), each) for place, each in zip(places, seconds.tolist(), strict=True))


def _state_times(
    run: RunLayout, layers: Sequence[LayerCost], header: Header, *, gathers_in_updates: bool
) -> dict[CostPlace, float]:
    """Return the times of gathers, reductions and updates of each state unit, including tied weights.

    gathers_in_updates: whether an update includes the gather of weights that it leaves in shards (ZeRO 1 and 2).
    """
    times = {
        CostPlace(Kind.UPDATE, stage, header.tied_unit(stage, group)): seconds
        for (stage, group), seconds in tied_updates(run, layers).items()
    }
    for stage, members in enumerate(run.stages.ranges):
        states = [state for layer in members for state in layers[run.classes[layer]].states]
        for unit, state in enumerate(states):
            after = state.gather if 0 < state.zero < 3 and gathers_in_updates else 0.0
            times[CostPlace(Kind.GATHER_WEIGHTS, stage, unit)] = state.gather
            times[CostPlace(Kind.REDUCE_GRADIENTS, stage, unit)] = state.reduction
            times[CostPlace(Kind.UPDATE, stage, unit)] = state.update + after
    return times


def _terms(run: RunLayout, costs: StageCosts, schedule: Schedule, seconds: float) -> Iterator[Term]:
    """Yield terms for the work of the busiest rank, and one for the remaining time, in which it waits."""
    apart = split_fractions(schedule)
    work = costs.whole_forward + costs.whole_again + costs.input_half
    busiest = int(costs.by_rank(work + costs.weight_half(apart=apart)).argmax())
    updates = float(costs.by_rank(costs.update)[busiest]) * schedule.header.updates_per_step
    parts = [
        *work_terms(costs, busiest, run.num_microbatches, apart, "forwards again"),
        Term("update", updates, "optimizer"),
    ]
    yield from parts
    waiting = seconds - sum(part.seconds for part in parts)
    yield Term(
        "waiting",
        waiting if abs(waiting) > 1e-9 * seconds else 0.0,  # the rest is rounding
        "simulation of the schedule: bubble, messages, gradient reduction over replicas",
    )


def exact_memories(run: RunLayout, schedule: Schedule) -> tuple[RankMemory, ...]:
    """Return the memory of every pipeline coordinate, by a walk through the actions of its rank.

    schedule: lowered schedule. State in host memory is not counted.
    """
    memories = []
    for exact in _predictions(run, schedule):
        peak, lasting = exact.peak(), _on_device(exact)
        buffers, messages = sum(peak[:4]), exact.messages + peak.sent
        memories.append(RankMemory(*lasting, peak.activations, buffers, messages, exact.temporaries()))
    return tuple(memories)


def _on_device(rank: RankPrediction) -> StateBytes:
    """Return the part of the state between steps that is not in host memory."""
    state, offload = rank.state(), rank.costs.config.offload
    if not offload.optimizer:
        return state
    away = sum(rank.state_of(place).weights for place in rank.units if rank.weights_in_host(place))
    return StateBytes(state.weights - away, 0, state.gradients, 0)


def estimate(
    config: PretrainConfig,
    hardware: Hardware,
    *,
    world_size: int | None = None,
    times: LayerTimes | None = None,
    node_order: Sequence[int] | None = None,
    assumptions: Assumptions = ENGINE,
) -> Estimate:
    """Return a fast estimate of a step's time and memory, for searches.

    world_size: number of ranks; required if parallel.data is null. times: times of layers; by default those measured
    on the machine, or else the roofline of its slowest device. node_order: as in `Placement`.

    Raises:
        ConfigError: the configuration cannot run on this number of ranks, or the cost model cannot time it.
    """
    run = lay_run(config, hardware, world_size, node_order)
    if run.config.schedule.file or run.shares_vocabulary:
        return _predicted(run, times, assumptions).estimate
    assumptions = assumptions.on(hardware)
    layers = layer_costs(run, times, assumptions)
    if moves_to_host(run.config):
        return _with_copies(run, stage_costs(run, layers), assumptions)
    return estimate_of(run, StepTimer(run, stage_costs(run, layers), assumptions).terms(), rank_memories(run))


def layer_costs(run: RunLayout, times: LayerTimes | None, assumptions: Assumptions) -> tuple[LayerCost, ...]:
    """Return the costs of one layer of each of `run.kinds`. See `estimate` for `times`. assumptions: with the
    machine's slow-down filled in."""
    given = _default_times(run, assumptions) if times is None else times, assumptions
    layers = zip(run.layers, run.flops, strict=True)
    return tuple(
        LayerCost(microbatch_cost(run, layer, flops, *given), *state_cost(run, layer, *given))
        for layer, flops in layers
    )


def predict(
    config: PretrainConfig,
    hardware: Hardware,
    *,
    world_size: int | None = None,
    times: LayerTimes | None = None,
    node_order: Sequence[int] | None = None,
    assumptions: Assumptions = ENGINE,
) -> Prediction:
    """Simulate a step of the lowered schedule, and compute the memory by a walk through its actions.

    The result includes the slow-down of compute that overlaps with traffic of replicas. See `estimate` for the
    arguments and errors.
    """
    run = lay_run(config, hardware, world_size, node_order)
    if times is None and shares_a_machine(run.placement) and not moves_to_host(config):
        run = lay_run(config, at_ease(hardware), world_size, node_order)
        return _predicted(run, MeasuredTimes(hardware, contended=False), assumptions, contended=True)
    return _predicted(run, times, assumptions)


def explain_stages(
    config: PretrainConfig, hardware: Hardware, world_size: int | None = None, *, assumptions: Assumptions = ENGINE
) -> list[dict[str, Any]]:
    """Return the costs of each stage, as `explain` prints them: its number, rank and layers, and seconds.

    forward to recompute: kernels of a micro-batch. tensor, context: waits for other ranks in a whole micro-batch,
    including recomputation. update, reduction, gather: one of each, for all layers of the stage. See `estimate` for
    the arguments and errors.
    """
    run = lay_run(config, hardware, world_size)
    costs = stage_costs(run, layer_costs(run, None, assumptions.on(hardware)))
    seconds = {
        "forward": costs.forward,
        "backward_input": costs.backward_input + costs.made_again,
        "backward_weight": costs.backward_weight,
        "recompute": costs.recompute,
        "tensor": costs.tensor.microbatch(apart=0.0),
        "context": costs.context.microbatch(apart=0.0),
        "update": costs.update,
        "reduction": costs.reduction,
        "gather": costs.gather,
    }
    names = [tuple(run.stages.layers[index].name for index in members) for members in run.stages.ranges]
    return [
        {"stage": stage, "rank": rank, "layers": layers} | {name: float(each[stage]) for name, each in seconds.items()}
        for stage, (rank, layers) in enumerate(zip(run.ranks, names, strict=True))
    ]


def _with_copies(run: RunLayout, costs: StageCosts, assumptions: Assumptions) -> Estimate:
    """Estimate the time of a run that moves tensors to host memory. Its memory is exact, from the lowered schedule."""
    schedule = lowered_schedule(run.config, run.stages)
    step = StepTimer(run, costs, assumptions)
    slower = StepTimer(run, slowed(run, costs, schedule, host_copies(run, schedule)), assumptions)
    why = "copies to and from host memory, as far as they take longer than the compute that overlaps with them"
    return estimate_of(run, step.terms() + _added("offload", why, slower, step), exact_memories(run, schedule))


def _predicted(
    run: RunLayout, times: LayerTimes | None, assumptions: Assumptions, contended: bool = False
) -> Prediction:
    assumptions = assumptions.on(run.hardware)
    layers = layer_costs(run, times, assumptions)
    schedule, simulation, terms = simulated(run, layers, assumptions, contended)
    if not contended and not run.config.schedule.file and not run.shares_vocabulary:
        # The simulator ignores this slow-down, so it is that of the estimate.
        costs, alone = stage_costs(run, layers), replace(assumptions, slow_down=1.0)
        both = (StepTimer(run, costs, each) for each in (assumptions, alone))
        why = "traffic of replicas that overlaps with compute (Galvatron, arXiv 2211.13878)"
        terms += _added("slow-down", why, *both)
    return Prediction(estimate_of(run, terms, exact_memories(run, schedule)), schedule, simulation)


def _added(name: str, source: str, slower: StepTimer, step: StepTimer) -> tuple[Term, ...]:
    """Return a term for the seconds by which one step takes longer than another; none if it does not."""
    late, plain = (sum(term.seconds for term in each.terms()) for each in (slower, step))
    return (Term(name, late - plain, source),) if late > plain else ()


def _default_times(run: RunLayout, assumptions: Assumptions) -> LayerTimes:
    """Return measured times, or the roofline of the slowest device."""
    if is_measured(run.hardware, run.world_size):
        return MeasuredTimes(run.hardware)
    used = {id(node.device): node.device for node in run.placement.nodes}.values()
    return slowest_roofline(used, run.config.training.precision, assumptions.megatron_kernels)


def estimate_of(run: RunLayout, terms: tuple[Term, ...], memory: tuple[RankMemory, ...]) -> Estimate:
    """Return the estimate of a run with these terms of a step and the memory of each pipeline coordinate."""
    counts = Counter(run.classes)
    model_flops = sum(run.flops[kind].total * count for kind, count in counts.items())
    executed = sum(run.flops[kind].executed * count for kind, count in counts.items()) + _recomputed_flops(run)
    step = run.num_microbatches * run.costs.data
    return Estimate(
        config=run.config,
        world_size=run.world_size,
        step_seconds=float(sum(term.seconds for term in terms)),
        terms=terms,
        memory=memory,
        memory_limits=run.placement.memory_limits,
        model_flops=float(model_flops * step),
        executed_flops=float(executed * step),
    )


def _recomputed_flops(run: RunLayout) -> int:
    """Return the FLOPs of a micro-batch in layers that are recomputed as a whole."""
    # There are no spans at all without recomputation.
    stages = zip(run.stages.ranges, run.recomputed, strict=False)
    again = Counter(run.classes[members[unit]] for members, spans in stages for span in spans for unit in span)
    return sum(run.flops[kind].forward * count for kind, count in again.items())
