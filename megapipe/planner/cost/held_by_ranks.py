"""What the ranks of a pipeline hold at their fullest, in layers, micro-batches and messages, before any has a size."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.planner.cost.in_flight import Counts, most_held
from megapipe.planner.cost.message_slots import message_slots
from megapipe.schedules.generators.policies import Policy
from megapipe.schedules.generators.registry import Options, find_generator

Numbers = npt.NDArray[np.int64]


class HeldByRanks(NamedTuple):
    """What the memory of a run depends on beside the sizes of its layers.

    policy, splits: of the schedule, the latter whether it splits backwards. layers: by rank, how many of each kind.
    shown: a stage of each likeness, and whether its input comes from another rank. like: of every rank's stages the
    place in `shown`, shape [ranks, chunks]. moments: the fullest ones of all ranks (`most_held`), those of a rank in a
    row, shape [moments, 2 chunks]; rank_of_moment: of each; first_moments: of each rank. slots: by rank, of messages
    from other ranks.
    """

    policy: Policy
    splits: bool
    layers: tuple[tuple[int, ...], ...]
    shown: tuple[tuple[int, bool], ...]
    like: Numbers
    moments: Counts
    rank_of_moment: Numbers
    first_moments: Numbers
    slots: tuple[int, ...]


@lru_cache(maxsize=4096)
def held_by_ranks(
    name: str,
    pipeline: int,
    num_microbatches: int,
    options: tuple[tuple[str, object], ...],
    ranks: tuple[int, ...],
    ranges: tuple[range, ...],
    classes: tuple[int, ...],
) -> HeldByRanks:
    """Of a schedule by name and options, for so many micro-batches. ranks, ranges: of every stage its rank and its
    layers. classes: of every layer its kind, a number."""
    generator, given = find_generator(name), Options(**dict(options))  # type: ignore[typeddict-item]
    policy = generator.policy_of(pipeline, num_microbatches, given)
    splits = generator.splits or given.get("two_bp", False)
    held = most_held(name, pipeline, num_microbatches, generator.number_of_chunks(given), given)
    own: list[list[int]] = [[] for _ in range(pipeline)]
    places: dict[tuple[tuple[int, ...], bool], int] = {}
    shown, like = [], []
    for stage, (rank, members) in enumerate(zip(ranks, ranges, strict=True)):
        own[rank].append(stage)
        arrives = stage > 0 and ranks[stage - 1] != rank
        key = classes[members.start : members.stop], arrives
        if key not in places:
            places[key] = len(places)
            shown.append((stage, arrives))
        like.append(places[key])
    mine = [[kind for stage in stages for kind in classes[ranges[stage].start : ranges[stage].stop]] for stages in own]
    lengths = [len(each) for each in held]
    return HeldByRanks(
        policy,
        splits,
        tuple(tuple(each.count(kind) for kind in range(max(classes) + 1)) for each in mine),
        tuple(shown),
        np.array([[like[stage] for stage in stages] for stages in own]),
        np.concatenate(held),
        np.repeat(np.arange(pipeline), lengths),
        np.cumsum([0, *lengths[:-1]]),
        _slots(name, held, num_microbatches, ranks, splits=splits, flushes=policy.flushes),
    )


def _slots(
    name: str,
    held: Sequence[Counts],
    num_microbatches: int,
    ranks: Sequence[int],
    *,
    splits: bool,
    flushes: bool,
) -> tuple[int, ...]:
    """By pipeline rank, slots of messages from other ranks, forward and backward. ranks: of every stage."""
    num_ranks = len(held)
    slots, chunks = [0] * num_ranks, [0] * num_ranks
    for stage, rank in enumerate(ranks):
        found = message_slots(
            name, held[rank], chunks[rank], num_ranks, rank, num_microbatches, splits=splits, flushes=flushes
        )
        chunks[rank] += 1
        if stage > 0 and ranks[stage - 1] != rank:
            slots[rank] += found.activations
        if stage < len(ranks) - 1 and ranks[stage + 1] != rank:
            slots[rank] += found.gradients
    return tuple(slots)
