"""Samples that no step takes, because the user or a loss spike excluded them.

Ranges count samples in the order in which the run takes them: the same on every layout.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megapipe.layout.batch_plan import BatchPlan
from megapipe.training.output import LineFile
from megapipe.training.records import Listener

FILE_NAME = "skipped_samples.jsonl"
EVENT = "skipped_samples"

Range = tuple[int, int]
"""Half-open range [first, end) of samples."""


class SkippingPlan:
    """A batch plan whose steps skip samples: a step that would take one of a range starts after that range."""

    def __init__(self, plan: BatchPlan, ranges: tuple[Range, ...] = ()) -> None:
        self._plan = plan
        self.ranges = tuple(sorted(set(ranges)))

    def begin(self, consumed: int) -> int:
        """Return the first sample of the step that follows after `consumed` samples."""
        for first, stop in self.ranges:
            if consumed < stop and consumed + self._plan.size(consumed) > first:
                consumed = stop
        return consumed

    def end(self, consumed: int) -> int:
        """Return the samples consumed after that step, including those skipped before it."""
        begin = self.begin(consumed)
        return begin + self._plan.size(begin)

    def size(self, consumed: int) -> int:
        """Return the number of samples of that step."""
        return self._plan.size(self.begin(consumed))

    def cursors(self, consumed: int) -> Iterator[int]:
        """Yield the first sample of that step and of all later ones, without an end."""
        while True:
            begin = self.begin(consumed)
            yield begin
            consumed = begin + self._plan.size(begin)

    def last_batches(self, start: int, consumed: int, count: int) -> Range:
        """Return the samples of the last `count` steps from `start` up to `consumed`; all of them where there are
        fewer steps."""
        begins = []
        for begin in self.cursors(start):
            if begin >= consumed:
                break
            begins.append(begin)
        return begins[-count:][0], consumed

    def without(self, skipped: Range) -> "SkippingPlan":
        """Return the same plan with another range skipped."""
        return SkippingPlan(self._plan, (*self.ranges, skipped))


class SkippedSamplesFile(Listener):
    """Writes every range that a run skipped to `skipped_samples.jsonl` in its folder: {"step", "first", "stop"}."""

    def __init__(self, directory: Path) -> None:
        self._file = LineFile(directory / FILE_NAME)

    def event(self, name: str, **fields: Any) -> None:
        if name == EVENT:
            self._file.write(json.dumps(fields))

    def close(self) -> None:
        self._file.close()
