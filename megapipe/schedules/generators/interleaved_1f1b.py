"""Interleaved 1F1B: 1F1B over several stages on each rank."""

from functools import lru_cache
from typing import Final

import numpy as np

from megapipe.schedules.actions import KIND, Floats, Kind
from megapipe.schedules.building_blocks import in_groups, round_robin
from megapipe.schedules.registry import Options, schedule
from megapipe.schedules.schedule import Sections

MORE_HELD: Final = 2
"""Micro-batches of activations that the default group size may add to a rank's peak."""


@lru_cache(maxsize=4096)
def default_group_size(num_ranks: int, num_microbatches: int, chunks: int) -> int:
    """Return the default number of consecutive micro-batches that pass through a chunk.

    A last group that is smaller than the pipeline leaves ranks idle. So if the ranks do not divide the micro-batches,
    the group size is ceil(m / floor(m / p)) instead of p, which is never slower, unless this adds more than
    ``MORE_HELD`` micro-batches to the peak of a rank.
    """
    rounds = num_microbatches // num_ranks
    larger = -(-num_microbatches // rounds) if rounds else num_ranks
    if larger == num_ranks or chunks == 1:
        return num_ranks
    usual, held = (_peak_held(num_ranks, num_microbatches, chunks, size) for size in (num_ranks, larger))
    return larger if held <= usual + MORE_HELD * chunks else num_ranks


def _peak_held(num_ranks: int, num_microbatches: int, chunks: int, group_size: int) -> int:
    """Return the peak number of chunk activations on the first rank, which holds the most."""
    rows = in_groups(num_ranks, num_microbatches, chunks, group_size, 0, ahead=2 * (num_ranks - 1))
    return int(np.cumsum(np.where(rows[:, KIND] == Kind.FORWARD, 1, -1)).max())


def held_in_groups(num_ranks: int, num_microbatches: int, chunks: int, options: Options) -> Floats:
    """Return the bound of :attr:`Generator.held`: (v - 1) g + 2 (p - 1 - r) forwards and the next one run before the
    first backward."""
    group = options.get("group_size", default_group_size(num_ranks, num_microbatches, chunks))
    group = min(group, num_microbatches)
    ranks = np.arange(num_ranks)[:, None]
    forwards = (chunks - 1) * group + np.minimum(2 * (num_ranks - 1 - ranks), 2 * group) + 1
    before = np.arange(chunks)[None] * group
    first = np.maximum(np.minimum(forwards - before, group), 0)
    # A last group that is smaller leaves its places empty.
    second = np.maximum(np.minimum(forwards - chunks * group - before, min(group, num_microbatches - group)), 0)
    return (first + second).astype(np.float64)


def _settle(num_ranks: int, num_microbatches: int, options: Options) -> Options:
    chunks = options.get("chunks", 2)
    return {"group_size": default_group_size(num_ranks, num_microbatches, chunks), **options}


TEXT: Final = """megapipe schedule 3
name interleaved_1f1b
ranks p
microbatches m
option chunks 2                        # stages on each rank
option group_size 0                    # micro-batches that pass a chunk in a row; 0: the number of ranks
for s in 0..p*chunks: stage {s} rank {s % p}
body
rank r:
  let g = min(m, max(group_size, p * (group_size == 0)))
  let n = (m+g-1)//g * g*chunks        # passes through a chunk; those of micro-batches from m on are left out
  let w = min(n, (chunks-1)*g + min(2*(p-1-r), 2*g))
  for k in 0..n+w:
    let i = k//(g*chunks)*g + k%g
    let c = k//g % chunks
    if k < n and i < m: F{c*p+r}.{i}
    let b = k-w
    let j = b//(g*chunks)*g + b%g
    let d = chunks-1 - b//g % chunks
    if k >= w and j < m: B{d*p+r}.{j}
"""


@schedule(
    "interleaved_1f1b",
    "A",
    placement=round_robin,
    chunks=2,
    takes_two_bp=True,
    repeats=True,
    settle=_settle,
    held=held_in_groups,
    search="all",
    text=TEXT,
)
def interleaved_1f1b(num_ranks: int, num_microbatches: int, *, chunks: int, group_size: int | None = None) -> Sections:
    """1F1B over ``chunks`` stages a rank: its bubble divided by their number (Megatron-LM, arXiv 2104.04473,
    section 2.2).

    Micro-batches pass the rank's chunks in groups of ``group_size`` (:func:`default_group_size` by default); the last
    group may be smaller. Any number of micro-batches works: the order is built for whole groups, and rows of
    micro-batches that do not exist are removed.
    """
    if group_size is None:
        group_size = default_group_size(num_ranks, num_microbatches, chunks)
    return Sections.flushing(
        in_groups(num_ranks, num_microbatches, chunks, group_size, rank, ahead=2 * (num_ranks - 1 - rank))
        for rank in range(num_ranks)
    )
