"""Which stages of a rank use the tied weights that one of them keeps."""

from megapipe.schedules.schedule import Header


def local_uses(header: Header) -> dict[int, dict[int, tuple[int, ...]]]:
    """Per owning stage and tied group, the stages of its rank that hold a use."""
    uses: dict[int, dict[int, tuple[int, ...]]] = {}
    for group, stages in enumerate(header.tied_groups):
        for owner in header.tied_owners(group):
            local = (stage for stage in stages if header.stages[stage].rank == header.stages[owner].rank)
            uses.setdefault(owner, {})[group] = tuple(sorted(set(local)))
    return uses


def readers_of_state(header: Header) -> dict[int, set[int]]:
    """Per stage that keeps state, the stages of its rank whose compute uses any of it."""
    readers = {stage: {stage} for stage in range(len(header.stages))}
    for owner, uses in local_uses(header).items():
        readers[owner].update(stage for stages in uses.values() for stage in stages)
    return readers
