"""Branch and bound: find the best layouts of a space with few estimates.

The search visits branches of the space and their layouts in the order of a lower bound, and divides a branch only when
its bound is the lowest. It never estimates a layout that its bounds rule out, and never creates one whose branch is
ruled out. No estimate is below its bound, so the results are the same as if every layout were estimated.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from heapq import heappop, heappush
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np

from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.search.bounds import LayoutBounds
from megapipe.planner.search.evaluation import Evaluation
from megapipe.planner.search.space import Branch, Choice, Layout, Layouts, Shape

BoundName = Literal["seconds", "num_bytes"]
Useless = Callable[[float, float], bool]
"""Whether bounds of seconds and of bytes rule a layout out."""
_Bounded = tuple[float, float, Layout]
"""Lower bounds of a layout's seconds and bytes, and the layout."""


class LayoutFilter(NamedTuple):
    """A subset of layouts. layout: whether it has a layout. branch: whether it may have layouts of a branch."""

    layout: Callable[[Layout], bool] = lambda layout: True
    branch: Callable[[Branch], bool] = lambda branch: True


EVERY = LayoutFilter()
STAGES = 3
"""Number of times that `Explorer` computes closer bounds of a layout, before it is estimated."""


@dataclass(eq=False)
class _Node:
    """A branch with its bounds. place: position in the order of the space. parts: branches or layouts of the branch;
    None until it is divided."""

    branch: Branch
    schedules: tuple[str, ...]
    place: tuple[int, ...]
    seconds: float
    num_bytes: float
    parts: "list[_Node] | _Leaf | None" = None


class _Leaf(NamedTuple):
    """All layouts of a branch with a micro-batch size, each as a shape and the values of a choice.

    bounds: both lower bounds of each layout. orders: numbers of layouts by ascending bound; in the order of seconds,
    only layouts that may fit.
    """

    layouts: list[tuple[Shape, Choice]]
    bounds: dict[BoundName, list[float]]
    orders: dict[BoundName, list[int]]


class Explorer:
    """Finds the best layouts of one space, and remembers their costs.

    layouts: valid layouts of a run. bounds: lower bounds of their costs. costs: costs of each layout. memory_limit:
    bytes of the largest device. count: number of layouts.
    """

    def __init__(self, layouts: Layouts, bounds: LayoutBounds, costs: Evaluation, memory_limit: float) -> None:
        self.layouts, self._bounds, self._costs, self._limit = layouts, bounds, costs, memory_limit
        self._closer = cache(bounds.closer)
        self._examined: set[Layout] = set()
        self._examined_too_large = 0
        self.count = 0
        self._roots: list[_Node] = []
        self._add(layouts.meshes(), layouts.schedules)

    @property
    def examined(self) -> int:
        """Return the number of layouts for which at least a bound was computed from their stages."""
        return len(self._examined)

    @property
    def meshes(self) -> list[Branch]:
        """Return all divisions of the ranks that have at least one layout."""
        return [node.branch for node in self._roots if node.branch.micro_size is None]

    def add_other_schedules(self, most: int) -> None:
        """Add layouts with the space's other schedules for up to `most` branches with several pipeline ranks and a
        micro-batch size: the branches with the lowest time bounds."""
        branches: dict[Branch, None] = {}
        for _, _, layout in self._in_order("seconds"):
            if layout.shape.pipeline > 1:
                branches[Branch(*layout.shape[:5])] = None
            if len(branches) == most:
                break
        self._add(branches, self.layouts.other_schedules)

    def _add(self, branches: Iterable[Branch], schedules: tuple[str, ...]) -> None:
        for branch in branches:
            count = self.layouts.count(branch, schedules)
            if count:
                self.count += count
                self._roots.append(self._node(branch, schedules, (len(self._roots),)))

    def _node(self, branch: Branch, schedules: tuple[str, ...], place: tuple[int, ...]) -> _Node:
        choices = self.layouts.choices(branch)
        if branch.micro_size is None:
            sizes = [each.micro_size or 1 for each in self.layouts.narrowed(branch)]
            return _Node(branch, schedules, place, *self._bounds.of_mesh(branch, sizes, choices))
        shapes = [shape for shape, _ in self.layouts.shapes(branch, schedules)]
        return _Node(branch, schedules, place, *self._bounds.of_branch(branch, shapes, choices))

    def _parts(self, node: _Node) -> "list[_Node] | _Leaf":
        """Divide a branch, into one branch per micro-batch size or into layouts. A part's bounds are never lower."""
        if node.parts is None and node.branch.micro_size is None:
            sizes = self.layouts.narrowed(node.branch)
            branches = [each for each in sizes if self.layouts.count(each, node.schedules)]
            node.parts = [self._node(each, node.schedules, (*node.place, at)) for at, each in enumerate(branches)]
        elif node.parts is None:
            shapes = list(self.layouts.shapes(node.branch, node.schedules))
            bounds = [self._bounds.of(*each) for each in shapes]
            seconds, num_bytes = (np.concatenate(each) for each in zip(*bounds, strict=True))
            seconds, num_bytes = np.maximum(seconds, node.seconds), np.maximum(num_bytes, node.num_bytes)
            fits, by_seconds = num_bytes <= self._limit, np.argsort(seconds, kind="stable")
            by_bytes = np.lexsort((seconds, num_bytes))
            node.parts = _Leaf(
                [(shape, choice) for shape, choices in shapes for choice in choices],
                {"seconds": seconds.tolist(), "num_bytes": num_bytes.tolist()},
                {"seconds": by_seconds[fits[by_seconds]].tolist(), "num_bytes": by_bytes.tolist()},
            )
        return node.parts

    def _in_order(
        self, key: BoundName, kind: LayoutFilter = EVERY, useless: Useless = lambda seconds, num_bytes: False
    ) -> Iterator[_Bounded]:
        """Yield all layouts of a kind with their bounds, by ascending `key`. In the order of seconds, layouts that
        cannot fit are skipped; layouts with `useless` bounds may be skipped too."""
        heap: list[tuple[float, tuple[int, ...], _Node, int]] = []

        def put(node: _Node) -> None:
            may_fit = key == "num_bytes" or node.num_bytes <= self._limit
            if may_fit and kind.branch(node.branch):
                heappush(heap, (getattr(node, key), node.place, node, -1))

        for node in self._roots:
            put(node)
        while heap:
            _, _, node, at = heappop(heap)
            parts = self._parts(node)
            if isinstance(parts, list):
                for part in parts:
                    put(part)
                continue
            order, seconds, num_bytes = parts.orders[key], parts.bounds["seconds"], parts.bounds["num_bytes"]
            if at >= 0:
                shape, choice = parts.layouts[order[at]]
                layout = Layout(shape, *choice)
                if kind.layout(layout):
                    yield seconds[order[at]], num_bytes[order[at]], layout
            for after in range(at + 1, len(order)):
                following = order[after]
                if not useless(seconds[following], num_bytes[following]):
                    heappush(heap, (parts.bounds[key][following], (*node.place, following), node, after))
                    break

    def pruned(self) -> dict[str, int]:
        """Return why layouts were never estimated: rule -> number of layouts, including those of whole branches."""
        waiting, too_large = list(self._roots), -self._examined_too_large
        while waiting:
            node = waiting.pop()
            if isinstance(node.parts, list):
                waiting += node.parts
            elif node.parts is not None:
                too_large += len(node.parts.layouts) - len(node.parts.orders["seconds"])
            elif node.num_bytes > self._limit:
                too_large += self.layouts.count(node.branch, node.schedules)
        counts = {"memory": too_large, "time": self.count - self.examined - too_large}
        return {rule: count for rule, count in counts.items() if count}

    def _num_bytes(self, layout: Layout, too_large: bool = False) -> int:
        """Return the bytes of a layout's fullest rank. too_large: whether its bound exceeds the memory limit."""
        self._examined_too_large += too_large and layout not in self._examined
        self._examined.add(layout)
        return self._costs.num_bytes(layout)

    def _fits(self, layout: Layout) -> bool:
        return self._num_bytes(layout) <= self._limit and self._costs.fits(layout)

    def fastest(self, keep: int = 1, kind: LayoutFilter = EVERY) -> list[Estimate]:
        """Return up to `keep` layouts of a kind that fit, the fastest first; on a tie, the one with less memory."""
        fastest: list[Estimate] = []

        def too_slow(seconds: float, num_bytes: float) -> bool:
            return len(fastest) == keep and seconds > fastest[-1].step_seconds

        for seconds, num_bytes, layout in self._that_fit(self._in_order("seconds", kind), too_slow):
            if not too_slow(seconds, num_bytes):
                fastest = sorted([*fastest, self._costs.estimate(layout)], key=order)[:keep]
        return fastest

    def _that_fit(self, layouts: Iterable[_Bounded], useless: Useless) -> Iterator[_Bounded]:
        """Yield the layouts that fit, by ascending closer bound of their seconds, with this bound and their bytes.

        layouts: by ascending bound of their seconds. Layouts whose bounds or bytes are `useless` may be skipped. A
        closer bound is computed only when no other layout has a lower bound. The last one is nearly the estimate, so
        the results of the layouts that come first make most of the later ones useless.
        """
        waiting: list[tuple[float, int, int, float, Layout]] = []

        def up_to(seconds: float) -> Iterator[_Bounded]:
            while waiting and waiting[0][0] <= seconds:
                at_least, number, stage, num_bytes, layout = heappop(waiting)
                if stage == STAGES:
                    yield at_least, num_bytes, layout
                elif not useless(at_least, num_bytes):
                    closer, num_bytes = self._closer_bounds(layout, stage, num_bytes, partial(useless, at_least))
                    if num_bytes <= self._limit:
                        heappush(waiting, (max(at_least, closer), number, stage + 1, num_bytes, layout))

        for number, (seconds, num_bytes, layout) in enumerate(layouts):
            yield from up_to(seconds)
            if useless(seconds, 0.0):  # all later layouts are too slow
                break
            heappush(waiting, (seconds, number, 0, num_bytes, layout))
        yield from up_to(math.inf)

    def _closer_bounds(
        self, layout: Layout, stage: int, num_bytes: float, too_large: Callable[[float], bool]
    ) -> tuple[float, float]:
        """Return bounds of a layout's seconds and bytes: a close one of the seconds, then close ones of both, then the
        exact bytes. The bytes are infinite where the layout does not fit. too_large: whether bytes rule it out."""
        if stage == 0:
            return self._closer(layout), num_bytes
        if stage == 1:
            self._examined.add(layout)
            num_bytes = self._costs.least_bytes(layout)
            if num_bytes > self._limit or too_large(num_bytes):
                return 0.0, math.inf
            return self._costs.least_seconds(layout), num_bytes
        return 0.0, self._num_bytes(layout) if self._fits(layout) else math.inf

    def nearest(self, kind: LayoutFilter = EVERY) -> Estimate | None:
        """Return the layout of a kind whose fullest rank needs the fewest bytes; None if there is no layout."""
        best: Estimate | None = None
        size = attrgetter("peak_bytes", "step_seconds")
        for _, at_least, layout in self._in_order("num_bytes", kind):
            most = math.inf if best is None else best.peak_bytes
            if at_least > most:
                break
            if self._num_bytes(layout, too_large=at_least > self._limit) > most:
                continue
            candidate = self._costs.estimate(layout)
            best = candidate if best is None else min(best, candidate, key=size)
        return best

    def front(self, slowest: float, tolerance: float, known: Iterable[Estimate] = ()) -> list[Estimate]:
        """Return the Pareto front of step time and memory, the fastest layout first.

        For each layout that fits and takes at most `slowest` seconds a step, the front has a layout that exceeds
        neither its time nor its memory by more than the fraction `tolerance`. known: layouts that fit, to start from.
        """
        front, more = pareto(known), 1.0 + tolerance

        def covered(seconds: float, num_bytes: float) -> bool:
            """Return whether a layout is fast enough, but one of the front needs at most `more` times its seconds and
            bytes. Among the layouts that are as fast, the slowest one needs the least memory."""
            as_fast = bisect_right(front, seconds * more, key=attrgetter("step_seconds"))
            return seconds <= slowest and as_fast > 0 and front[as_fast - 1].peak_bytes <= num_bytes * more

        def useless(seconds: float, num_bytes: float) -> bool:
            return seconds > slowest or covered(seconds, num_bytes)

        near = (each for each in self._in_order("seconds", useless=covered) if not covered(*each[:2]))
        for seconds, num_bytes, layout in self._that_fit(near, useless):
            if not useless(seconds, num_bytes):
                new = self._costs.estimate(layout)
                front = pareto([*front, new] if new.step_seconds <= slowest else front)
        return front


def order(estimate: Estimate) -> tuple[float, int]:
    """Return the sort key that puts the best estimate first."""
    return estimate.step_seconds, estimate.peak_bytes


def pareto(estimates: Iterable[Estimate]) -> list[Estimate]:
    """Return the Pareto front of estimates by seconds and bytes, the fastest first. Equal estimates appear once."""
    front: list[Estimate] = []
    for candidate in sorted(estimates, key=order):
        if not front or candidate.peak_bytes < front[-1].peak_bytes:
            front.append(candidate)
    return front
