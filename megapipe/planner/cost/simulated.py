"""The terms of a step by simulation of its lowered schedule, and what its ranks hold action by action."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from megapipe.config.mesh_shape import MeshShape
from megapipe.layout.hardware.device_type import hardware_device_type
from megapipe.layout.moves import moves_to_host
from megapipe.layout.prediction import predict_rank
from megapipe.layout.rank import RankPrediction
from megapipe.layout.scheduling import build_schedule
from megapipe.layout.units import StateBytes
from megapipe.planner.cost.assumptions import Assumptions
from megapipe.planner.cost.estimate import Estimate, RankMemory, Term
from megapipe.planner.cost.host_copies import HostCopies, host_copies
from megapipe.planner.cost.replicas import scalar_seconds, tied_seconds
from megapipe.planner.cost.run_layout import RunLayout
from megapipe.planner.cost.stages import Floats, StageCosts
from megapipe.planner.cost.step_time import hop_seconds
from megapipe.planner.measured.contended import simulate_measured, traffic_share
from megapipe.schedules import Costs, Link, Schedule, Simulation, simulate
from megapipe.schedules.actions import KIND, Kind

STEPS = 4
"""Steps that a schedule without a flush is simulated for, half of which fill the pipeline."""


@dataclass(frozen=True)
class Prediction:
    """A step by simulation: `estimate` holds its times and the memory of every pipeline coordinate."""

    estimate: Estimate
    schedule: Schedule
    simulation: Simulation


def schedule_of(run: RunLayout) -> Schedule:
    """The lowered schedule of a run."""
    return build_schedule(
        run.config,
        run.num_microbatches,
        units_per_stage=run.stages.units_per_stage,
        tied_groups=run.stages.tied,
        data_parallel=run.synchronises_gradients,
        recompute=run.recomputed,
        offload=run.moved,
    )


def simulated(
    run: RunLayout, costs: StageCosts, assumptions: Assumptions, source: str, contended: bool = False
) -> tuple[Schedule, Simulation, tuple[Term, ...]]:
    """A run's schedule, its simulation, and the terms of a step, which add up to its time.

    contended: costs are those of a rank by itself, and ranks slow each other down as was measured.
    """
    schedule = schedule_of(run)
    of_actions = _action_costs(run, costs, assumptions)
    measured = run.hardware.measured if contended else None

    def simulated_for(of_actions: Costs, steps: int) -> Simulation:
        if measured is None:
            return simulate(schedule, of_actions, steps)
        return simulate_measured(
            schedule,
            of_actions,
            measured,
            processes=run.world_size // run.pipeline,
            traffic_share=traffic_share(run.placement.nodes[0].inside, run.costs.replicas),
            steps=steps,
        )

    def timed(of_actions: Costs) -> tuple[Simulation, float]:
        if schedule.flushes:
            simulation = simulated_for(of_actions, 1)
            return simulation, simulation.finish
        simulation, shorter = simulated_for(of_actions, STEPS), simulated_for(of_actions, STEPS // 2)
        return simulation, (simulation.finish - shorter.finish) / (STEPS - STEPS // 2)

    simulation, seconds = timed(of_actions)
    found = [*_terms(run, costs, schedule, seconds, source)]
    if moves_to_host(run.config):
        simulation, slower = timed(_with_copies(of_actions, host_copies(run, schedule)))
        found.append(Term("offload", slower - seconds, "copies to and from host memory that compute does not hide"))
    return schedule, simulation, tuple(term for term in found if term.seconds)


def _with_copies(costs: Costs, copies: HostCopies) -> Costs:
    """Gathers of weights are these copies: with replicas that gather from each other they do not go together."""
    gathers = copies.weights if any(copies.weights) else costs.gather_weights
    return replace(costs, offload=copies.activations, offload_state=copies.state, gather_weights=gathers)


def _action_costs(run: RunLayout, costs: StageCosts, assumptions: Assumptions) -> Costs:
    size = run.pipeline
    hops = [Link(*each) for each in hop_seconds(run, assumptions)]
    links = {(rank, (rank + 1) % size): hops[rank] for rank in range(size)}
    links |= {(to, sender): link for (sender, to), link in links.items() if (to, sender) not in links}
    whole = costs.input_half + costs.weight_half(apart=False)
    gathered = run.gathers_after_update and not assumptions.gathers_beside_forward
    update = costs.update + (costs.gather if gathered else 0.0)
    return Costs(
        forward=tuple(costs.whole_forward),
        recompute=tuple(costs.whole_again * _spread(run)),
        backward=tuple(whole),
        backward_input=tuple(costs.input_half),
        backward_weight=tuple(costs.weight_half(apart=True)),
        update=tuple(update),
        reduce_gradients=tuple(costs.reduction),
        gather_weights=tuple(costs.gather),
        reduce_tied=tied_seconds(run),
        reduce_scalars=scalar_seconds(run),
        links=links,
        blocking_sends=assumptions.waits_for_sends,
    )


def _spread(run: RunLayout) -> Floats:
    """By stage, its units over those that run again: the simulator gives every unit an equal part of its stage."""
    spans = run.recomputed
    if not spans:
        return np.ones(len(run.stages.ranges))
    again = [sum(len(span) for span in own) for own in spans]
    return np.array([units / max(1, own) for units, own in zip(run.stages.units_per_stage, again, strict=True)])


def _terms(run: RunLayout, costs: StageCosts, schedule: Schedule, seconds: float, source: str) -> Iterator[Term]:
    """What the busiest rank does, and the rest: waiting."""
    rank, count = costs.by_rank, run.num_microbatches
    splits = any((rows[:, KIND] == Kind.BACKWARD_INPUT).any() for rows in schedule.sections.body)
    weight = costs.weight_half(apart=splits)
    work = rank(costs.whole_forward + costs.whole_again + costs.input_half + weight)
    busiest = int(work.argmax())

    def once(values: object) -> float:
        return float(rank(values)[busiest]) * count  # type: ignore[arg-type]

    apart = 1.0 if splits else 0.0
    parts = [
        Term("compute", once(costs.forward + costs.backward_input + costs.backward_weight), source),
        Term("recompute", once(costs.recompute + costs.made_again), f"forwards again: {source}"),
        Term("tensor", once(costs.tensor + apart * costs.tensor_weight), costs.tensor_source),
        Term("context", once(costs.context + apart * costs.context_weight), costs.context_source),
        Term("update", float(rank(costs.update)[busiest]) * schedule.header.updates_per_step, "optimizer"),
    ]
    yield from parts
    waiting = seconds - sum(part.seconds for part in parts)
    yield Term(
        "waiting",
        waiting if abs(waiting) > 1e-9 * seconds else 0.0,  # no wait but rounding
        "simulation of the schedule: bubble, messages, gradient reduction over replicas",
    )


def exact_memories(run: RunLayout, schedule: Schedule) -> tuple[RankMemory, ...]:
    """Of every pipeline coordinate, along its own actions."""
    shape = MeshShape(run.placement.sizes)
    device = hardware_device_type(run.hardware)
    found = []
    for coordinate in range(run.pipeline):
        rank = shape.rank_of({"data": 0, "pipeline": coordinate, "context": 0, "tensor": 0})
        exact = predict_rank(run.config, schedule, rank, device=device)
        peak = exact.peak()
        lasting = _on_device(exact)
        found.append(
            RankMemory(
                lasting.weights,
                lasting.master,
                lasting.gradients,
                lasting.moments,
                peak.activations,
                peak.weights + peak.gradients + peak.summands + peak.reloaded,
                exact.messages + peak.sent,
                exact.temporaries(),
            )
        )
    return tuple(found)


def _on_device(rank: RankPrediction) -> StateBytes:
    """Of what lives between steps the part that does not lie in host memory."""
    state, offload = rank.state(), rank.costs.config.offload
    if not offload.optimizer:
        return state
    away = sum(rank.state_of(place).weights for place in rank.units if rank.weights_in_host(place))
    return StateBytes(state.weights - away, 0, state.gradients, 0)
