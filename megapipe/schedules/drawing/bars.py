"""What the drawings show: the simulated actions that take time, and the activations alive over time."""

from typing import Final, NamedTuple

import numpy as np

from megapipe.schedules.actions import Kind
from megapipe.schedules.memory import activations_gone, activations_made, rank_shares
from megapipe.schedules.schedule import Header
from megapipe.schedules.simulation.simulate import Simulation
from megapipe.schedules.table import Table
from megapipe.schedules.tokens import describe
from megapipe.schedules.validation.failure import action_at

COMPUTE, TRANSFER, REDUCTION, COPY_OUT, COPY_IN = "compute", "transfer", "reduction", "copy out", "copy in"
LANES: Final = {
    Kind.SEND_ACTIVATION: TRANSFER,
    Kind.SEND_GRADIENT: TRANSFER,
    Kind.GATHER_WEIGHTS: REDUCTION,
    Kind.REDUCE_GRADIENTS: REDUCTION,
    Kind.REDUCE_TIED: REDUCTION,
    Kind.REDUCE_SCALARS: REDUCTION,
    Kind.OFFLOAD: COPY_OUT,
    Kind.RELOAD: COPY_IN,
}


class Bar(NamedTuple):
    """One action on one lane of a rank.

    ``critical`` if the finish hangs on it. A measured action waited for other ranks for ``wait`` before ``start``.
    """

    rank: int
    lane: str
    kind: Kind
    stage: int
    chunk: int
    microbatch: int
    step: int
    start: float
    end: float
    critical: bool
    text: str
    wait: float = 0.0


def bars_of(simulation: Simulation) -> list[Bar]:
    """Every action that takes time, by rank, then in program order; waiting alone is no bar."""
    table = simulation.table
    critical, chunk_of = set(simulation.critical_path()), chunks_of(table.header)
    travelling = table.is_kind(Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT) & (simulation.end > simulation.start)
    return [
        bar_of(table, row, chunk_of, float(simulation.start[row]), float(simulation.end[row]), row in critical)
        for row in np.flatnonzero(simulation.working | travelling).tolist()
    ]


def chunks_of(header: Header) -> dict[int, int]:
    """Per stage, which chunk of its rank it is."""
    return {stage: index for rank in range(header.num_ranks) for index, stage in enumerate(header.stages_on(rank))}


def bar_of(table: Table, row: int, chunk_of: dict[int, int], start: float, end: float, critical: bool = False) -> Bar:
    """The bar of a row."""
    action = action_at(table, row)
    step, microbatch = divmod(action.microbatch, table.header.num_microbatches)
    lane, text = LANES.get(action.kind, COMPUTE), describe(action._replace(slot=-1))
    if action.kind == Kind.GATHER_WEIGHTS and table.header.weights_in_host:
        lane = COPY_IN
    chunk = chunk_of.get(action.stage, 0)
    return Bar(
        int(table.rank[row]), lane, action.kind, action.stage, chunk, microbatch, step, start, end, critical, text
    )


def activation_curves(simulation: Simulation) -> list[list[tuple[float, float]]]:
    """Per rank the (time, micro-batches of activations alive) at every change, counted as in ``peak_activations``."""
    table = simulation.table
    share = rank_shares(table)
    opening, closing = np.flatnonzero(activations_made(table)), np.flatnonzero(activations_gone(table))
    curves = []
    for rank in range(table.header.num_ranks):
        begins, ends = opening[table.rank[opening] == rank], closing[table.rank[closing] == rank]
        times = np.concatenate([simulation.end[ends], simulation.start[begins]])
        order = np.argsort(times, kind="stable")
        alive = np.cumsum(np.concatenate([-share[ends], share[begins]])[order])
        curves.append([(float(time), round(float(count), 6)) for time, count in zip(times[order], alive, strict=True)])
    return curves
