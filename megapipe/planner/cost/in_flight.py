"""How many micro-batches a rank holds at once under a schedule, found from its order of actions alone."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from megapipe.schedules import Options, order
from megapipe.schedules.actions import KIND, STAGE, Kind
from megapipe.schedules.generators.registry import find_generator

ROUNDS = 3
"""Micro-batches a pipeline rank, or groups of them where those are larger, after which no schedule that alternates
holds more."""
Counts = npt.NDArray[np.float64]


def most_held(name: str, num_ranks: int, num_microbatches: int, chunks: int, options: Options) -> tuple[Counts, ...]:
    """Per pipeline rank, every fullest moment: shape [moments, 2 chunks], first the micro-batches of each chunk whose
    activations wait for a backward, then those whose weight half is put off.

    A moment is left out where another has at least as much of everything.
    """
    options, period = find_generator(name).settled(num_ranks, num_microbatches, options)
    shown = min(num_microbatches, ROUNDS * period)
    return _from_order(name, num_ranks, shown, chunks, tuple(sorted(options.items())))


@lru_cache(maxsize=4096)
def _from_order(
    name: str, num_ranks: int, num_microbatches: int, chunks: int, options: tuple[tuple[str, object], ...]
) -> tuple[Counts, ...]:
    schedule = order(name, num_ranks, num_microbatches, **dict(options))  # type: ignore[arg-type]
    chunk_of = np.zeros(len(schedule.header.stages), dtype=np.int64)
    for rank in range(num_ranks):
        for chunk, stage in enumerate(schedule.header.stages_on(rank)):
            chunk_of[stage] = chunk
    return tuple(_fullest(rows, chunk_of, chunks) for rows in schedule.expand(schedule.prologue_steps or 1))


def _fullest(rows: npt.NDArray[np.int32], chunk_of: npt.NDArray[np.int64], chunks: int) -> Counts:
    kind, chunk = rows[:, KIND], chunk_of[rows[:, STAGE]]
    change = np.zeros((len(rows), 2 * chunks))
    at = np.arange(len(rows))
    for which, held, pending in (
        (Kind.FORWARD, 1, 0),
        (Kind.BACKWARD, -1, 0),
        (Kind.BACKWARD_INPUT, -1, 1),
        (Kind.BACKWARD_WEIGHT, 0, -1),
    ):
        rows_of_kind = at[kind == which]
        change[rows_of_kind, chunk[rows_of_kind]] += held
        change[rows_of_kind, chunks + chunk[rows_of_kind]] += pending
    # Behind a forward there is more of everything, and what is sorted in front has more of something.
    left = np.unique(change.cumsum(axis=0)[np.append(kind[1:] != Kind.FORWARD, True)], axis=0)[::-1]
    kept: list[npt.NDArray[np.float64]] = []
    while len(left):
        kept.append(left[0])
        left = left[(left > left[0]).any(axis=1)]
    return np.array(kept)
