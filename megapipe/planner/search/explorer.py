"""The best layouts of many, with as few estimates as bounds allow.

Branch and bound: layouts come in the order of a lower bound of their time, and what cannot be among the answers by its
bounds is never estimated. With bounds that hold, answers are those of estimating everything.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from operator import attrgetter
from typing import Protocol

import numpy as np

from megapipe.config.progress import Report
from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.search.layouts import Layout, Layouts, Shape

Kind = Callable[[Layout], bool]
REPORTED = 50
"""Number of shapes between two reports of progress."""


class Bounds(Protocol):
    """What no layout can go below, by rules that are much faster than its estimate."""

    def of(self, shape: Shape, layouts: Sequence[Layout]) -> tuple[list[float], list[float]]:
        """Seconds of a step and bytes of the fullest rank, of layouts that all have this shape."""
        ...

    def closer(self, layout: Layout) -> float:
        """Seconds of a step of one layout, nearer to what they are; takes longer, and is asked for few."""
        ...


class LayoutPredictor(Protocol):
    """What layouts cost; the bytes alone are found faster, and most often they decide already."""

    def num_bytes(self, layout: Layout) -> int:
        """Of the fullest rank."""
        ...

    def fits(self, layout: Layout) -> bool:
        """Whether every rank fits its own device."""
        ...

    def estimate(self, layout: Layout) -> Estimate:
        """All of it."""
        ...


class Explorer:
    """Layouts of one space and what is known of them.

    Args:
        layouts: valid ones of a run.
        bounds: lower bounds of their costs.
        costs: of each layout.
        memory_limit: bytes of the largest device.
        report: receives the fraction of the layouts whose bounds are known.

    layouts: all of them. pruned: rule -> layouts that it kept from being estimated in `fastest` and `front`; a layout
    that is estimated later, for another question, counts all the same.
    """

    def __init__(
        self,
        layouts: Layouts,
        bounds: Bounds,
        costs: LayoutPredictor,
        memory_limit: float,
        report: Report = lambda share: None,
    ) -> None:
        self._costs, self._limit = costs, memory_limit
        self._closer = cache(lambda at: bounds.closer(self.layouts[at]))
        self.layouts: list[Layout] = []
        self._seconds: list[float] = []
        self._bytes: list[float] = []
        self._known: dict[int, int] = {}
        self._of, self._bounds = layouts.of, bounds
        self.add(layouts.shapes(), report)

    def add(self, shapes: Iterable[Shape], report: Report = lambda share: None) -> None:
        """Add the valid layouts of new shapes. report: receives the fraction of the shapes that is done."""
        shapes = list(shapes)
        for number, shape in enumerate(shapes):
            if number % REPORTED == 0:
                report(number / len(shapes))
            options = list(self._of(shape))
            if options:
                self.layouts += options
                for all_of, some in zip((self._seconds, self._bytes), self._bounds.of(shape, options), strict=True):
                    all_of += some
        by_time, of_bytes = np.argsort(self._seconds, kind="stable"), np.array(self._bytes)
        self._by_time: list[int] = by_time[of_bytes[by_time] <= self._limit].tolist()
        self._by_bytes: list[int] = by_time[np.argsort(of_bytes[by_time], kind="stable")].tolist()

    def promising(self, most: int) -> list[Shape]:
        """Return up to `most` pipeline shapes with the lowest time bounds, which differ in more than the schedule."""
        found: dict[Shape, Shape] = {}
        for at in self._by_time:
            shape = self.layouts[at].shape
            if shape.pipeline > 1:
                found.setdefault(shape._replace(schedule="", chunks=None), shape)
            if len(found) == most:
                break
        return list(found.values())

    @property
    def examined(self) -> int:
        """Layouts that were estimated, their bytes at the least."""
        return len(self._known)

    def pruned(self) -> dict[str, int]:
        """Why layouts were never estimated -> how many."""
        unseen = np.ones(len(self.layouts), dtype=bool)
        unseen[list(self._known)] = False
        too_large = np.array(self._bytes) > self._limit
        found = {"memory": int((unseen & too_large).sum()), "time": int((unseen & ~too_large).sum())}
        return {rule: count for rule, count in found.items() if count}

    def _num_bytes(self, at: int) -> int:
        """Of the fullest rank of a layout, found once."""
        if at not in self._known:
            self._known[at] = self._costs.num_bytes(self.layouts[at])
        return self._known[at]

    def _fits(self, at: int) -> bool:
        return self._num_bytes(at) <= self._limit and self._costs.fits(self.layouts[at])

    def fastest(self, keep: int = 1, kind: Kind = lambda layout: True) -> list[Estimate]:
        """Up to `keep` layouts of a kind that fit, the least seconds first; of equal ones the least memory."""
        found: list[Estimate] = []
        for at in self._by_time:
            if len(found) == keep and self._seconds[at] > found[-1].step_seconds:
                break
            layout = self.layouts[at]
            if not kind(layout) or (len(found) == keep and self._closer(at) > found[-1].step_seconds):
                continue
            if self._fits(at):
                found = sorted([*found, self._costs.estimate(layout)], key=order)[:keep]
        return found

    def nearest(self, kind: Kind = lambda layout: True) -> Estimate | None:
        """Of a kind the layout whose fullest rank holds the least; None where there is no layout."""
        best: Estimate | None = None
        for at in self._by_bytes:
            if best is not None and self._bytes[at] > best.peak_bytes:
                break
            layout = self.layouts[at]
            if not kind(layout):
                continue
            num_bytes = self._num_bytes(at)
            if best is not None and num_bytes > best.peak_bytes:
                continue
            estimate = self._costs.estimate(layout)
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

        for at in self._by_time:
            seconds = self._seconds[at]
            if seconds > slowest:
                break
            if covered(seconds, self._bytes[at], 1.0 + tolerance):
                continue
            seconds = self._closer(at)
            if seconds > slowest or covered(seconds, self._bytes[at]):
                continue
            num_bytes = self._num_bytes(at)
            if covered(seconds, num_bytes) or not self._fits(at):
                continue
            estimate = self._costs.estimate(self.layouts[at])
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
