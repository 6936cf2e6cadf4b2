"""Which blocks of a stage keep their activations, which move them to host memory and which run again.

KARMA's rule (Wahib et al. 2020, 2008.11421, section III): move while the copy hides behind compute, recompute the
rest, and keep what is needed soonest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from typing import Literal

Treatment = Literal["keep", "move", "recompute"]


@dataclass(frozen=True)
class BlockCost:
    """One block and micro-batch: seconds of its forward and backward; bytes that it keeps in between, and bytes of its
    input, which is all that is kept of a block that runs again."""

    forward: float
    backward: float
    kept: int
    input: int


@dataclass(frozen=True)
class Treatments:
    """One for each block, in order, and what they amount to.

    bytes: of activations on the device, at most. recomputed, moved: of each micro-batch, seconds of forwards that run
    again, and bytes that leave.
    """

    of_blocks: tuple[Treatment, ...]
    bytes: int
    recomputed: float
    moved: int


class DoesNotFit(ValueError):
    """There is less memory than any treatment needs. least: bytes that the smallest one needs."""

    def __init__(self, least: int, memory: float) -> None:
        super().__init__(f"activations need {least} bytes whatever is moved or recomputed, and there are {memory:.0f}")
        self.least = least


@dataclass(frozen=True)
class _Partial:
    """Treatments of the first blocks. kept: bytes of every micro-batch. cost: `recomputed`, then `moved`."""

    of_blocks: tuple[Treatment, ...]
    kept: int
    cost: tuple[float, int]


def treat(
    blocks: Sequence[BlockCost], *, microbatches: float, memory: float, bandwidth: float, prefetch: int = 1
) -> Treatments:
    """The treatments that recompute least of those that fit into memory and whose copies hide; of several the ones
    that move the fewest bytes.

    On the device are the kept activations and the inputs of what runs again, of every micro-batch; beside them one
    block that runs again, and of moved ones one that leaves, `prefetch` that wait and one that is in use.

    Args:
        blocks: of one stage.
        microbatches: whose activations the stage holds at once, were all of them kept.
        memory: bytes for activations.
        bandwidth: bytes per second between device and host, one way.
        prefetch: compute actions between a reload and its backward.

    Raises:
        DoesNotFit: even the least needs more memory.
    """
    copies = _Copies(blocks, microbatches, bandwidth, prefetch)
    most = max(block.kept for block in blocks)
    fits: list[Treatments] = []
    least = None
    for partial in _complete(blocks, copies):
        count = {name: partial.of_blocks.count(name) for name in ("move", "recompute")}
        held = ceil(microbatches * partial.kept) + (most if count["recompute"] else 0)
        held += min(prefetch + 2, ceil(microbatches * count["move"])) * most
        least = held if least is None else min(least, held)
        if held <= memory:
            fits.append(Treatments(partial.of_blocks, held, *partial.cost))
    if not fits:
        raise DoesNotFit(least or 0, memory)
    return min(fits, key=lambda each: (each.recomputed, each.moved, each.bytes))


def _complete(blocks: Sequence[BlockCost], copies: "_Copies") -> Iterator[_Partial]:
    """Treatments of all blocks whose copies hide; those are left out than which others keep and cost no more.

    By dynamic programming over the blocks. What comes depends of what went before on the last block that moves, and on
    whether anything runs again or moves.
    """
    fronts: dict[tuple[int, bool], list[_Partial]] = {(-1, False): [_Partial((), 0, (0.0, 0))]}
    for index, block in enumerate(blocks):
        grown: dict[tuple[int, bool], list[_Partial]] = {}
        for (last, again), front in fronts.items():
            options: list[tuple[Treatment, tuple[int, bool], int, float, int]] = [
                ("keep", (last, again), block.kept, 0.0, 0),
                ("recompute", (last, True), block.input, block.forward, 0),
            ]
            if last < 0 or copies.hide_until(last, index):
                options.append(("move", (index, again), 0, 0.0, block.kept))
            for name, state, kept, recomputed, moved in options:
                grown.setdefault(state, []).extend(
                    _Partial(
                        (*partial.of_blocks, name),
                        partial.kept + kept,
                        (partial.cost[0] + recomputed, partial.cost[1] + moved),
                    )
                    for partial in front
                )
        fronts = {state: _undominated(partials) for state, partials in grown.items()}
    for (last, _), front in fronts.items():
        if last < 0 or copies.hide_at_end(last):
            yield from front


def _undominated(partials: list[_Partial]) -> list[_Partial]:
    """Without those that keep and cost no less than another one."""
    front: list[_Partial] = []
    for partial in sorted(partials, key=lambda each: (each.kept, each.cost)):
        if not front or partial.cost < front[-1].cost:
            front.append(partial)
    return front


class _Copies:
    """Whether the copies of moved blocks fit behind compute.

    A block's way out has the forwards from its own to the next moved one's, whose copy waits for it, and no more than
    what stands between its forward and its reload. Its way in has the backwards from the next moved one's to its own,
    `prefetch` of them at most: the stream is free when that one's backward starts.
    """

    def __init__(self, blocks: Sequence[BlockCost], microbatches: float, bandwidth: float, prefetch: int) -> None:
        self._seconds = [block.kept / bandwidth for block in blocks]
        self._forward = [0.0, *accumulate(block.forward for block in blocks)]
        self._backward = [0.0, *accumulate(block.backward for block in blocks)]
        self._prefetch = prefetch
        self._next_microbatch = microbatches > 1

    def hide_until(self, moved: int, following: int) -> bool:
        """Whether both copies of a moved block hide where `following` is the next one that moves."""
        out = self._forward[following + 1] - self._forward[moved + 1]
        return self._seconds[moved] <= min(out, self._until_reload(moved), self._way_in(moved, following))

    def hide_at_end(self, moved: int) -> bool:
        """Whether both copies of the stage's last moved block hide; where the next micro-batch's forward may come
        before its backward, its way out ends at the first block there."""
        end = len(self._seconds)
        out = self._until_reload(moved)
        if self._next_microbatch:
            out = min(out, self._forward[end] - self._forward[moved + 1] + self._forward[1])
        return self._seconds[moved] <= min(out, self._way_in(moved, end - 1))

    def _until_reload(self, moved: int) -> float:
        """From the block's forward through the others behind it and back, `prefetch` actions ahead of its backward."""
        end = len(self._seconds)
        behind = end - 1 - moved
        actions = max(0, 2 * behind - self._prefetch)
        forwards = min(actions, behind)
        out = self._forward[moved + 1 + forwards] - self._forward[moved + 1]
        return out + self._backward[end] - self._backward[end - (actions - forwards)]

    def _way_in(self, moved: int, following: int) -> float:
        return self._backward[min(following, moved + self._prefetch) + 1] - self._backward[moved + 1]
