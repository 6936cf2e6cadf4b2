"""The best layouts of many, with as few estimates as bounds allow.

Branch and bound: layouts come in the order of a lower bound of their time, and what cannot be among the answers by its
bounds is never estimated. With bounds that hold, answers are those of estimating everything.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.search.layouts import Layout, Layouts, Shape

Kind = Callable[[Layout], bool]


class Bounds(Protocol):
    """What no layout can go below, by rules that are much faster than its estimate."""

    def of(self, shape: Shape, layouts: Sequence[Layout]) -> tuple[list[float], list[float]]:
        """Seconds of a step and bytes of the fullest rank, of layouts that all have this shape."""
        ...


class Costs(Protocol):
    """What layouts cost; the bytes alone are found faster, and most often they decide already."""

    def num_bytes(self, layout: Layout) -> int:
        """Of the fullest rank."""
        ...

    def estimate(self, layout: Layout) -> Estimate:
        """All of it."""
        ...


class Candidate(NamedTuple):
    """A layout and its bounds."""

    layout: Layout
    seconds: float
    num_bytes: float


class Explorer:
    """Layouts of one space and what is known of them.

    Args:
        layouts: valid ones of a run.
        bounds: lower bounds of their costs.
        costs: of each layout.
        memory_limit: bytes of the smallest device.

    pruned: rule -> layouts that it kept from being estimated in `fastest` and `front`; a layout that is estimated
    later, for another question, counts all the same.
    """

    def __init__(self, layouts: Layouts, bounds: Bounds, costs: Costs, memory_limit: float) -> None:
        self._costs, self._limit = costs, memory_limit
        found: list[Candidate] = []
        for shape in layouts.shapes():
            options = list(layouts.of(shape))
            if options:
                found += map(Candidate, options, *bounds.of(shape, options))
        self.candidates = sorted(found, key=attrgetter("seconds"))
        self._possible = [each for each in self.candidates if each.num_bytes <= memory_limit]
        self._by_bytes = sorted(self.candidates, key=attrgetter("num_bytes"))
        self._known: dict[Layout, int] = {}

    @property
    def examined(self) -> int:
        """Layouts that were estimated, their bytes at the least."""
        return len(self._known)

    def pruned(self) -> dict[str, int]:
        """Why layouts were never estimated -> how many."""
        rest = Counter(
            "memory" if each.num_bytes > self._limit else "time"
            for each in self.candidates
            if each.layout not in self._known
        )
        return dict(rest)

    def _num_bytes(self, layout: Layout) -> int:
        """Of the fullest rank, found once."""
        if layout not in self._known:
            self._known[layout] = self._costs.num_bytes(layout)
        return self._known[layout]

    def fastest(self, keep: int = 1, kind: Kind = lambda layout: True) -> list[Estimate]:
        """Up to `keep` layouts of a kind that fit, the least seconds first; of equal ones the least memory."""
        found: list[Estimate] = []
        for each in self._possible:
            if len(found) == keep and each.seconds > found[-1].step_seconds:
                break
            if kind(each.layout) and self._num_bytes(each.layout) <= self._limit:
                found = sorted([*found, self._costs.estimate(each.layout)], key=order)[:keep]
        return found

    def nearest(self, kind: Kind = lambda layout: True) -> Estimate | None:
        """Of a kind the layout whose fullest rank holds the least; None where there is no layout."""
        best: Estimate | None = None
        for each in self._by_bytes:
            if best is not None and each.num_bytes > best.peak_bytes:
                break
            if not kind(each.layout):
                continue
            num_bytes = self._num_bytes(each.layout)
            if best is not None and num_bytes > best.peak_bytes:
                continue
            estimate = self._costs.estimate(each.layout)
            if best is None or (estimate.peak_bytes, estimate.step_seconds) < (best.peak_bytes, best.step_seconds):
                best = estimate
        return best

    def front(self, slowest: float, tolerance: float) -> list[Estimate]:
        """Layouts that no other of these betters in both speed and memory, the fastest first: of all layouts of at
        most `slowest` seconds a step that fit, each has one here that needs at most `tolerance` more of either, a
        share."""
        found: list[Estimate] = []

        def covered(seconds: float, num_bytes: float, more: float = 1.0) -> bool:
            """Whether another layout takes at most so many times as much as one of at least so much: of those that
            are as fast the slowest one holds the least."""
            as_fast = bisect_right(found, seconds * more, key=attrgetter("step_seconds"))
            return as_fast > 0 and found[as_fast - 1].peak_bytes <= num_bytes * more

        for each in self._possible:
            if each.seconds > slowest:
                break
            if covered(each.seconds, each.num_bytes, 1.0 + tolerance):
                continue
            num_bytes = self._num_bytes(each.layout)
            if num_bytes > self._limit or covered(each.seconds, num_bytes):
                continue
            estimate = self._costs.estimate(each.layout)
            if estimate.step_seconds <= slowest:
                found = pareto([*found, estimate])
        return found


def order(estimate: Estimate) -> tuple[float, int]:
    """Of estimates, the best first."""
    return estimate.step_seconds, estimate.peak_bytes


def pareto(estimates: Iterable[Estimate]) -> list[Estimate]:
    """Those that no other one betters or equals in both seconds and bytes, the fastest first; of equal ones one."""
    found: list[Estimate] = []
    for each in sorted(estimates, key=order):
        if not found or each.peak_bytes < found[-1].peak_bytes:
            found.append(each)
    return found
