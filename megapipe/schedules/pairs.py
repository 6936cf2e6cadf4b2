"""Pairs: groups of a forward and a backward, whose halves may run at the same time on two streams of a GPU."""

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from megapipe.schedules.actions import Action, Kind

BACKWARDS: Final = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def pairs_of(actions: Sequence[Action]) -> list[int]:
    """Return the index of the first action of each group that is a forward and a backward, in either order.

    actions: of one rank and section, in order.
    """
    found = []
    for group, members in groupby(range(len(actions)), key=lambda index: actions[index].group):
        rows = list(members)
        kinds = {actions[row].kind for row in rows}
        if group >= 0 and len(rows) == 2 and Kind.FORWARD in kinds and not kinds.isdisjoint(BACKWARDS):
            found.append(rows[0])
    return found


def on_side_stream(actions: Sequence[Action]) -> frozenset[tuple[int, int]]:
    """Return (stage, micro-batch) of all actions on the second of two streams, chosen so that the halves of a pair
    never share a stream.

    All actions of a micro-batch on a stage have one stream. A forward takes the stream that the backward in its pair
    does not have: a backward comes after its own forward, so pairs never close a circle.
    """
    side: dict[tuple[int, int], bool] = {}
    for first in pairs_of(actions):
        forward, backward = sorted(actions[first : first + 2], key=lambda action: action.kind != Kind.FORWARD)
        other = side.get((backward.stage, backward.microbatch), False)
        side.setdefault((forward.stage, forward.microbatch), not other)
    return frozenset(place for place, is_side in side.items() if is_side)
