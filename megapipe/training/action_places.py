"""An action in words: what it is, and which ranks it waits for where it waits."""

from megapipe.engine.program import Instruction
from megapipe.parallel.mesh import Mesh
from megapipe.schedules.actions import Action, Kind
from megapipe.schedules.schedule import Schedule

_FROM_BEFORE = (Kind.FORWARD, Kind.RECV_ACTIVATION, Kind.SEND_GRADIENT)
_FROM_BEHIND = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.RECV_GRADIENT, Kind.SEND_ACTIVATION)
_AMONG_REPLICAS = (Kind.REDUCE_GRADIENTS, Kind.GATHER_WEIGHTS)
_AMONG_ALL = (Kind.REDUCE_TIED, Kind.REDUCE_COUNTS, Kind.REDUCE_SCALARS, Kind.UPDATE)


class ActionPlaces:
    """Words for the actions of one rank's part of a schedule."""

    def __init__(self, schedule: Schedule, mesh: Mesh) -> None:
        self._schedule = schedule
        self._mesh = mesh

    def words(self, instruction: Instruction) -> str:
        """Such as `FORWARD stage 1 microbatch 3 (may wait for rank 0)`."""
        action = instruction.action
        fields = [f"{name} {value}" for name, value in action._asdict().items() if name != "kind" and value >= 0]
        ranks = self._awaited(action)
        peers = f" (may wait for {told(ranks)})" if ranks else ""
        return f"{action.kind.name} {' '.join(fields)}".rstrip() + peers

    def _awaited(self, action: Action) -> tuple[int, ...]:
        """Global ranks that an action may wait for."""
        mesh = self._mesh
        own = mesh.rank
        found: set[int] = set()
        if action.kind in (*_FROM_BEFORE, *_FROM_BEHIND):
            step = self._schedule.previous_stage if action.kind in _FROM_BEFORE else self._schedule.next_stage
            neighbour = step(action.stage, action.microbatch)
            if neighbour is not None:
                found.add(mesh.group("pipeline").ranks[self._schedule.rank_of(neighbour)])
            found.update(mesh.group("tensor").ranks, mesh.group("context").ranks)
        elif action.kind in _AMONG_REPLICAS:
            found.update(mesh.group("data", "context").ranks)
        elif action.kind in _AMONG_ALL:
            found.update(mesh.world.ranks)
        return tuple(sorted(found - {own}))


def told(ranks: tuple[int, ...]) -> str:
    """Ranks in words; of many the number."""
    if len(ranks) > 16:
        return f"any of {len(ranks)} ranks, {ranks[0]} to {ranks[-1]}"
    return f"rank {', '.join(map(str, ranks))}"
