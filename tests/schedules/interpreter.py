"""An oracle for schedules: runs the actions symbolically, with blocking sends and physical buffers, knowing no rules.

Every value is a hash of what it was made from. A schedule is right when it ends in the weights that
``tests.schedules.serial`` computes in one process.
"""

from collections import defaultdict, deque

from megapipe.schedules import Action, Kind, Schedule
from tests.schedules.interpreter_rank import Rank
from tests.schedules.interpreter_state import Broken
from tests.schedules.serial import Weights, mix


class World:
    """All ranks, their links and collectives."""

    def __init__(self, schedule: Schedule, steps: int, ordered: bool) -> None:
        self.schedule, self.ordered = schedule, ordered
        self.posted: dict[tuple[int, int], deque[tuple[Rank, tuple[str, int, int]]]] = defaultdict(deque)
        self.collectives: dict[tuple[tuple[object, ...], int], dict[int, dict[str, object]]] = defaultdict(dict)
        programs = schedule.expand(steps)
        self.ranks = [
            Rank(self, rank, [Action(Kind(row[0]), *row[1:]) for row in rows.tolist()])
            for rank, rows in enumerate(programs)
        ]

    def members(self, name: tuple[object, ...]) -> set[int]:
        header = self.schedule.header
        if name[0] == "tied":
            return {header.stages[stage].rank for stage in header.tied_groups[int(str(name[1]))]}
        if name[0] == "shared":
            return {place.rank for place in header.stages if place.part == header.stages[int(str(name[1]))].part}
        return set(range(header.num_ranks))

    def result(self, name: tuple[object, ...], number: int) -> int | None:
        """A collective's result, None until every member has started it."""
        parts = self.collectives[name, number]
        if set(parts) != self.members(name):
            return None
        values = []
        for key, value in sorted((key, value) for part in parts.values() for key, value in part.items()):
            resolved = self.result(*value) if isinstance(value, tuple) else value
            if resolved is None:
                return None
            values.append((key, resolved))
        return mix(name, *values)


def run(schedule: Schedule, steps: int, *, ordered: bool = True) -> Weights:
    """Weights after the steps; raises Broken where the schedule cannot run. ``ordered`` keeps the order of sums."""
    world = World(schedule, steps, ordered)
    moved = True
    while moved:
        moved = False
        for rank in world.ranks:
            while rank.step():
                moved = True
    if any(rank.position < len(rank.program) for rank in world.ranks):
        raise Broken("deadlock")
    if any(world.posted.values()):
        raise Broken("a receive was never served")
    weights: Weights = {}
    for rank in world.ranks:
        for name, copies in rank.weights.items():
            if weights.setdefault(name, copies) != copies:
                raise Broken(f"copies of {name} differ between ranks")
    return weights
