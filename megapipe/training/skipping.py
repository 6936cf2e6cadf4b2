"""Samples that no step takes, by hand or because the loss jumped up at them.

Ranges are told in the run's own numbers of samples, in the order that it takes them: the same on every layout.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megapipe.planner.runs.batch_plan import BatchPlan
from megapipe.training.records import Listener

FILE_NAME = "skipped_samples.jsonl"
EVENT = "skipped_samples"

Range = tuple[int, int]
"""The first sample, and the one behind the last."""


class SkippingPlan:
    """A batch plan whose steps leave samples out: a step that would take one begins behind its range."""

    def __init__(self, plan: BatchPlan, ranges: tuple[Range, ...] = ()) -> None:
        self._plan = plan
        self.ranges = tuple(sorted(set(ranges)))

    def begin(self, consumed: int) -> int:
        """Where the step begins that follows after `consumed` samples."""
        for first, stop in self.ranges:
            if consumed < stop and consumed + self._plan.size(consumed) > first:
                consumed = stop
        return consumed

    def end(self, consumed: int) -> int:
        """Samples consumed after that step, those left out before it included."""
        begin = self.begin(consumed)
        return begin + self._plan.size(begin)

    def size(self, consumed: int) -> int:
        """Samples of that step."""
        return self._plan.size(self.begin(consumed))

    def cursors(self, consumed: int) -> Iterator[int]:
        """Where each step begins, endless, from that step on."""
        while True:
            begin = self.begin(consumed)
            yield begin
            consumed = begin + self._plan.size(begin)

    def last_batches(self, start: int, consumed: int, count: int) -> Range:
        """The samples of the last `count` steps of those from `start` up to `consumed`; all where they are fewer."""
        begins = []
        for begin in self.cursors(start):
            if begin >= consumed:
                break
            begins.append(begin)
        return begins[-count:][0], consumed

    def without(self, skipped: Range) -> "SkippingPlan":
        """The same plan with another range left out."""
        return SkippingPlan(self._plan, (*self.ranges, skipped))


class SkippedSamplesFile(Listener):
    """Writes every range that a run left out to `skipped_samples.jsonl` in its folder: {"step", "first", "stop"}."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME

    def event(self, name: str, **fields: Any) -> None:
        if name == EVENT:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(fields) + "\n")
