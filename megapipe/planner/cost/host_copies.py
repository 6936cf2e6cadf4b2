"""Copies between devices and host memory: how long those of each stage take, and what of them nothing hides."""

from dataclasses import dataclass, replace

import numpy as np

from megapipe.config.mesh_shape import MeshShape
from megapipe.layout.prediction import predict_rank
from megapipe.layout.units import Unit
from megapipe.planner.cost.run_layout import RunLayout
from megapipe.planner.cost.stages import Floats, StageCosts
from megapipe.schedules import Schedule
from megapipe.schedules.actions import KIND, STAGE, VERSION, Kind
from megapipe.spec.dtypes import ELEMENT_BYTES


@dataclass(frozen=True)
class HostCopies:
    """Seconds by stage, one way, as the simulator's `Costs` take them: each unit gets an equal part.

    activations: of a micro-batch, if all of a stage's units were blocks that move. state: what the updates of all its
    units work on. weights: of all its layers.
    """

    activations: tuple[float, ...]
    state: tuple[float, ...]
    weights: tuple[float, ...]


def host_copies(run: RunLayout, schedule: Schedule) -> HostCopies:
    """Of a run that moves something to host memory, and its lowered schedule."""
    host, moved, costs = run.host, run.moved, run.costs
    stages = range(len(run.stages.ranges))
    layers = run.stages.layers
    activations = []
    for stage in stages:
        units = moved.units[stage] if moved.units else ()
        blocks = [layers[run.stages.ranges[stage][unit]] for unit in units]
        each = sum(host.seconds(costs.kept(block)) for block in blocks) / len(blocks) if blocks else 0.0
        activations.append(each * len(run.stages.ranges[stage]))
    state = [0.0] * len(stages)
    if moved.optimizer:
        shape = MeshShape(run.placement.sizes)
        for coordinate in range(run.pipeline):
            place = {"data": 0, "pipeline": coordinate, "context": 0, "tensor": 0}
            rank = predict_rank(run.config, schedule, shape.rank_of(place))
            for stage, unit in rank.units:
                state[stage] += host.seconds(rank.in_host_of((stage, unit)))
    weights = [0.0] * len(stages)
    if moved.weight_buffers:
        tied, size = set(run.tied), ELEMENT_BYTES[costs.precision]
        for stage in stages:
            for index in run.stages.ranges[stage]:
                own = Unit(tuple(spec for spec in layers[index].parameters.values() if spec.name not in tied))
                weights[stage] += host.seconds(costs.of_units.elements(own) * size)
    return HostCopies(tuple(activations), tuple(state), tuple(weights))


def slowed(run: RunLayout, costs: StageCosts, schedule: Schedule, copies: HostCopies) -> StageCosts:
    """Stages whose passes and updates take as long as their copies, where those take longer: the estimate.

    In a stage's forward its moved blocks leave, in its backward they come, each within the compute of as many units
    as it is prefetched by; weights come in both. Forwards of other micro-batches, which reloads far ahead of their
    backward may pass, are not counted on. What updates work on comes in and leaves at once, a unit ahead of the other,
    and nothing hides it.
    """
    units = np.array(run.stages.units_per_stage)
    moved = _a_microbatch(run, schedule, Kind.OFFLOAD)
    activations = np.array(copies.activations) * moved / units
    weights = np.array(copies.weights) * _a_microbatch(run, schedule, Kind.GATHER_WEIGHTS) / units / 2
    backward = costs.whole_again + costs.input_half + costs.weight_half(apart=False)
    beside = backward * np.where(moved > 0, np.minimum(1.0, moved * run.moved.prefetch / units), 1.0)
    late_forward = np.maximum(0.0, np.maximum(activations, weights) - costs.whole_forward)
    late_backward = np.maximum(0.0, np.maximum(activations - beside, activations + weights - backward))
    state = np.array(copies.state)
    last_out = state / [len(schedule.header.state_units(stage)) for stage in range(len(units))]
    return replace(
        costs,
        forward=costs.forward + late_forward,
        made_again=costs.made_again + late_backward,
        update=costs.update + state + last_out,
    )


def _a_microbatch(run: RunLayout, schedule: Schedule, kind: Kind) -> Floats:
    """By stage, units that a kind of action is about for each micro-batch; of offloads those of activations."""
    rows = np.concatenate(schedule.sections.body)
    chosen = rows[(rows[:, KIND] == kind) & ((kind != Kind.OFFLOAD) | (rows[:, VERSION] < 0))]
    found: Floats = np.bincount(chosen[:, STAGE], minlength=len(run.stages.ranges)) / run.num_microbatches
    return found
