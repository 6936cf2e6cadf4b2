"""What a rank's stages share with other ranks: the groups that the engine sums over, and who counts which state."""

from collections.abc import Mapping

from megapipe.engine.reductions import Communicators
from megapipe.engine.stage import Stage
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.sharding import WHOLE
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules.schedule import Schedule


def communicators(mesh: Mesh, schedule: Schedule, stages: Mapping[int, Stage]) -> Communicators:
    """The groups that the engine sums over. A collective call: every rank makes it, in the same order."""
    tied = {}
    counted_elsewhere = set()
    for group, users in enumerate(schedule.header.tied_groups):
        holders = tuple(sorted({schedule.rank_of(stage) for stage in users}))
        members = mesh.stage_group(holders)
        if members is not None:
            tied[group] = members
        if mesh.coordinate("pipeline") != holders[0]:
            counted_elsewhere.add(group)
    sharding = next((state.sharding for state in unit_states(stages)), WHOLE)
    shards = mesh.shard_group(sharding.count) if sharding.count > 1 else None
    copies = mesh.shard_replicas(sharding.count) if sharding.count > 1 else None
    ends_here = any(route[-1] in stages for route in schedule.header.routes)
    return Communicators(
        world=mesh.world,
        data=mesh.group("data", "context"),
        tied=tied,
        scalars=mesh.world if schedule.flushes else mesh.second_world(),
        counts_loss=ends_here and mesh.coordinate("tensor") == 0,
        counts_norm=mesh.group("data", "context").rank < sharding.count,
        counted_elsewhere=frozenset(counted_elsewhere),
        shards=shards,
        copies=None if copies is None or copies.size == 1 else copies,
        tensor=mesh.group("tensor"),
    )


def unit_states(stages: Mapping[int, Stage]) -> list[UnitState]:
    """The states of a rank's stages, tied ones once."""
    unique = {id(state): state for stage in stages.values() for state in stage.states.values()}
    return list(unique.values())


def counted_states(stages: Mapping[int, Stage], groups: Communicators) -> list[UnitState]:
    """States whose gradient norm this rank contributes: a tied weight counts on the first stage that holds it."""
    elsewhere = {
        id(stage.states[len(stage.units) + group])
        for stage in stages.values()
        for group in groups.counted_elsewhere
        if len(stage.units) + group in stage.states
    }
    return [state for state in unit_states(stages) if id(state) not in elsewhere]
