"""Does the header agree with itself? Everything else is checked against it."""

from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.schedule import Header


def check_header(header: Header) -> None:
    """Raise ScheduleError where stages, routes, counts and groups contradict one another."""
    stages = range(len(header.stages))
    for rank in range(header.num_ranks):
        if not header.stages_on(rank):
            raise ScheduleError(f"{header.name}: rank {rank} of {header.num_ranks} has no stage")
    for name, least in (
        ("units_per_stage", 1),
        ("versions_per_stage", 1),
        ("activation_slots", 0),
        ("gradient_slots", 0),
    ):
        values = getattr(header, name)
        if len(values) != len(stages) or min(values) < least:
            raise ScheduleError(
                f"{header.name}: {name} {list(values)} must have a value of at least {least} for each of "
                f"{len(stages)} stages"
            )
    visited = {stage for route in header.routes for stage in route}
    for route in header.routes:
        if not set(route) <= set(stages) or len(set(route)) < len(route):
            raise ScheduleError(
                f"{header.name}: route {list(route)} must visit stages 0 to {len(stages) - 1} once each"
            )
    for stage in stages:
        if stage not in visited:
            raise ScheduleError(f"{header.name}: stage {stage} is on no route")
    for group in header.tied_groups:
        if not group or not set(group) <= set(stages):
            raise ScheduleError(f"{header.name}: tied group {list(group)} must name stages 0 to {len(stages) - 1}")
        if header.updates_per_step > 1 and len({header.stages[stage].rank for stage in group}) > 1:
            raise ScheduleError(
                f"{header.name} updates {header.updates_per_step} times per step, but stages {list(group)} on "
                "different ranks tie a weight, so every update would wait for all of them; untie it"
            )
        if len({header.versions_per_stage[stage] for stage in group}) > 1:
            raise ScheduleError(
                f"{header.name}: stages {list(group)} tie a weight and keep different numbers of versions"
            )
    if header.num_microbatches % header.updates_per_step:
        counts = (
            f"{header.num_microbatches} micro-batches cannot be divided evenly into {header.updates_per_step} updates"
        )
        raise ScheduleError(f"{header.name}: {counts}")
