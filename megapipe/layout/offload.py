"""The choice of blocks that keep their activations, move them to host memory, or recompute them.

KARMA's rule (Wahib et al. 2020, 2008.11421, section III): move while the copy overlaps with compute, recompute the
rest, and keep what is needed soonest.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from typing import Literal, NamedTuple

Treatment = Literal["keep", "move", "recompute"]


@dataclass(frozen=True)
class BlockCost:
    """One block and micro-batch. forward, backward: seconds of its forward, and of its backward or its input half.
    kept: bytes that it keeps in between. input: bytes of its input, all that a recomputed block keeps."""

    forward: float
    backward: float
    kept: int
    input: int


@dataclass(frozen=True)
class Treatments:
    """One treatment for each block, in order, and their costs.

    bytes: peak bytes of activations on the device. recomputed, moved: seconds of recomputed forwards and bytes moved,
    per micro-batch.
    """

    of_blocks: tuple[Treatment, ...]
    bytes: int
    recomputed: float
    moved: int


class DoesNotFit(ValueError):
    """No treatment fits into the memory. least: minimum bytes of any treatment."""

    def __init__(self, least: int, memory: float) -> None:
        super().__init__(
            f"activations need at least {least} bytes with any offloading "
            f"and recomputation, but offload.memory allows {memory:.0f}"
        )
        self.least = least


class _Partial(NamedTuple):
    """Treatments of the first blocks. kept: bytes of every micro-batch. recomputed, moved: as in `Treatments`; moves:
    number of blocks that move. last: treatment of the last block; before: the treatments before it."""

    kept: int
    recomputed: float
    moved: int
    moves: int
    before: "_Partial | None" = None
    last: Treatment = "keep"

    def of_blocks(self) -> tuple[Treatment, ...]:
        """Return all treatments, in order."""
        treatments: list[Treatment] = []
        partial = self
        while partial.before is not None:
            treatments.append(partial.last)
            partial = partial.before
        return tuple(reversed(treatments))


def treat(
    blocks: Sequence[BlockCost], *, microbatches: float, memory: float, bandwidth: float, prefetch: int = 1
) -> Treatments:
    """Return the treatments that recompute least among those that fit into memory and whose copies overlap with
    compute; among equals those that move the fewest bytes.

    The device holds the kept activations and the inputs of recomputed blocks of every micro-batch, one block while it
    is recomputed, and of moved blocks one that leaves, `prefetch` that wait and one in use.

    Args:
        blocks: of one stage.
        microbatches: number whose activations the stage would hold at once if all were kept.
        memory: bytes for activations.
        bandwidth: bytes per second between device and host, one way.
        prefetch: compute actions between a reload and its backward.

    Raises:
        DoesNotFit: every choice needs more memory.
    """
    copies = _Copies(blocks, bandwidth, prefetch)
    most = max(block.kept for block in blocks)
    best: tuple[tuple[float, int, int], _Partial] | None = None
    least: int | None = None
    for again, partial in _complete(blocks, copies):
        held = ceil(microbatches * partial.kept) + (most if again else 0)
        held += min(prefetch + 2, ceil(microbatches * partial.moves)) * most
        least = held if least is None else min(least, held)
        rank = partial.recomputed, partial.moved, held
        if held <= memory and (best is None or rank < best[0]):
            best = rank, partial
    if best is None:
        raise DoesNotFit(least or 0, memory)
    (recomputed, moved, held), partial = best
    return Treatments(partial.of_blocks(), held, recomputed, moved)


def _complete(blocks: Sequence[BlockCost], copies: "_Copies") -> Iterator[tuple[bool, _Partial]]:
    """Yield (whether any block is recomputed, treatments of all blocks) whose copies overlap with compute, without
    treatments that others dominate in memory and cost.

    This is dynamic programming over the blocks. The next choices depend only on the last block that moved; the value
    of memory depends on whether any block is recomputed and on how many move.
    """
    fronts: dict[tuple[int, bool, int], list[_Partial]] = {(-1, False, 0): [_Partial(0, 0.0, 0, 0)]}
    for index, block in enumerate(blocks):
        grown: defaultdict[tuple[int, bool, int], list[_Partial]] = defaultdict(list)
        for (last, again, moves), front in fronts.items():
            hides = last < 0 or copies.hide_until(last, index)
            for partial in front:
                kept, recomputed, moved, count, *_ = partial
                keep = _Partial(kept + block.kept, recomputed, moved, count, partial, "keep")
                rerun = _Partial(kept + block.input, recomputed + block.forward, moved, count, partial, "recompute")
                grown[last, again, moves].append(keep)
                grown[last, True, moves].append(rerun)
                if hides:  # the memory of moved blocks does not grow beyond a few of them
                    move = _Partial(kept, recomputed, moved + block.kept, count + 1, partial, "move")
                    grown[index, again, min(moves + 1, copies.most_at_once)].append(move)
        fronts = {state: _undominated(partials) for state, partials in grown.items()}
    for (last, again, _), front in fronts.items():
        if last < 0 or copies.hide_at_end(last):
            yield from ((again, partial) for partial in front)


def _undominated(partials: list[_Partial]) -> list[_Partial]:
    """Return the partial treatments that no other one dominates in memory and cost."""
    front: list[_Partial] = []
    for partial in sorted(partials, key=lambda each: each[:3]):
        if not front or partial[1:3] < front[-1][1:3]:
            front.append(partial)
    return front


class _Copies:
    """Whether the copies of moved blocks overlap with compute.

    A copy to the host may take as long as the forwards from its own block to the next moved one, whose copy waits for
    it, and at most the time between its forward and its reload. A copy back may take as long as the backwards from the
    next moved block to its own, at most `prefetch` of them: the stream is free when that block's backward starts.
    """

    def __init__(self, blocks: Sequence[BlockCost], bandwidth: float, prefetch: int) -> None:
        self._seconds = [block.kept / bandwidth for block in blocks]
        self._forward = [0.0, *accumulate(block.forward for block in blocks)]
        self._backward = [0.0, *accumulate(block.backward for block in blocks)]
        self._prefetch = prefetch
        self.most_at_once = prefetch + 2

    def hide_until(self, moved: int, following: int) -> bool:
        """Return whether both copies of a moved block overlap with compute, if `following` is the next moved block."""
        out = self._forward[following + 1] - self._forward[moved + 1]
        return self._seconds[moved] <= min(out, self._until_reload(moved), self._way_in(moved, following))

    def hide_at_end(self, moved: int) -> bool:
        """Return whether both copies of the stage's last moved block overlap with compute. Another forward may run
        before its backward; the copy to the host then ends at the first block there."""
        end = len(self._seconds)
        out = min(self._until_reload(moved), self._forward[end] - self._forward[moved + 1] + self._forward[1])
        return self._seconds[moved] <= min(out, self._way_in(moved, end - 1))

    def _until_reload(self, moved: int) -> float:
        """Return the seconds from the block's forward to `prefetch` actions before its backward."""
        end = len(self._seconds)
        blocks_after = end - 1 - moved
        actions = max(0, 2 * blocks_after - self._prefetch)
        forwards = min(actions, blocks_after)
        out = self._forward[moved + 1 + forwards] - self._forward[moved + 1]
        return out + self._backward[end] - self._backward[end - (actions - forwards)]

    def _way_in(self, moved: int, following: int) -> float:
        return self._backward[min(following, moved + self._prefetch) + 1] - self._backward[moved + 1]
