"""Chimera: two pipelines in opposite directions over the same ranks, each of which fills the idle time of the other.

BitPipe has the same order (`merged`) on other stages.
"""

from collections import deque
from collections.abc import Iterator

from megapipe.schedules.actions import Kind
from megapipe.schedules.building_blocks import StagePlacement, Step, bidirectional, rows_from_steps
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.generators._zero_bubble import FORWARD
from megapipe.schedules.registry import schedule
from megapipe.schedules.schedule import Sections


def require_whole_rounds(name: str, num_ranks: int, num_microbatches: int) -> None:
    """Raise ScheduleError unless ranks come in pairs, and each round of micro-batches has one of every rank."""
    if num_ranks % 2:
        raise ScheduleError(f"{name} runs in both directions over pairs of ranks, got {num_ranks}; use an even number")
    if num_microbatches % num_ranks:
        raise ScheduleError(
            f"{name} needs a multiple of its {num_ranks} pipeline ranks "
            f"as the number of micro-batches, got {num_microbatches}; use "
            f"{num_ranks * max(1, round(num_microbatches / num_ranks))}"
        )


def merged(num_ranks: int, num_microbatches: int, placement: StagePlacement) -> Sections:
    """Return the order in which each rank runs, one action per unit of time, what can run: backwards first, then the
    oldest micro-batch, then the later part of the model. A stage holds at most ``num_ranks / 2`` micro-batches.

    For the first ``num_ranks`` micro-batches, this is the order that the papers draw; later ones fill its idle time.
    """
    stages, routes = placement.stages, placement.routes
    waiting: dict[tuple[Kind, int], deque[int]] = {
        (kind, stage): deque() for kind in (FORWARD, Kind.BACKWARD) for stage in range(len(stages))
    }
    for number, route in enumerate(routes):
        waiting[FORWARD, route[0]].extend(range(number, num_microbatches, len(routes)))
    held = [0] * len(stages)

    def startable(rank: int) -> Iterator[tuple[bool, int, int, Step]]:
        for (kind, stage), microbatches in waiting.items():
            backward = kind == Kind.BACKWARD
            if stages[stage].rank == rank and microbatches and (backward or held[stage] < num_ranks // 2):
                turn = microbatches[0] // len(routes)
                yield not backward, turn, -stages[stage].part, (kind, stage, microbatches[0])

    orders: list[list[Step]] = [[] for _ in range(num_ranks)]
    while any(waiting.values()):
        started = [min(steps)[-1] for rank in range(num_ranks) if (steps := list(startable(rank)))]
        for kind, stage, microbatch in started:
            waiting[kind, stage].popleft()
            held[stage] += 1 if kind == FORWARD else -1
            orders[stages[stage].rank].append((kind, stage, microbatch))
            route = routes[microbatch % len(routes)]
            place = stages[stage].part + (1 if kind == FORWARD else -1)
            if place == len(route):
                waiting[Kind.BACKWARD, stage].append(microbatch)
            elif place >= 0:
                waiting[kind, route[place]].append(microbatch)
    return Sections.flushing(map(rows_from_steps, orders))


@schedule("chimera", "C", placement=bidirectional, chunks=2, check=require_whole_rounds, search="never")
def chimera(num_ranks: int, num_microbatches: int) -> Sections:
    """1F1B in both directions at once: every other micro-batch runs up the ranks, which hold the model twice (Chimera,
    arXiv 2107.06925, section 3.1; its forward doubling and backward halving are not used).

    For p ranks and m micro-batches, with backwards as long as forwards, the idle part of the makespan is
    (p - 2) / (2m + p - 2), table 2 of the paper; with backwards twice as long and m = p, (p - 2) / (1.5m + p - 2).
    Rank r holds p / 2 + 1 + min(r, p - 1 - r) micro-batches.
    """
    return merged(num_ranks, num_microbatches, bidirectional(num_ranks, 2))
