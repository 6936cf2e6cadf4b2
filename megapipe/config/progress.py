"""The progress bar of slow commands, on standard error."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

SHOWN_AFTER = 2.0
"""Seconds before the bar appears, so that quick commands show nothing."""
LOG_EVERY = 10.0
"""Seconds between progress lines where standard error is not a terminal."""


class HasBytes(Protocol):
    """An item whose work is proportional to its size."""

    @property
    def num_bytes(self) -> int: ...


Item = TypeVar("Item", bound=HasBytes)
Report = Callable[[float], None]
"""Receives the fraction of the work that is done, from 0 to 1."""


class ProgressBar:
    """A bar with the time left, on a terminal; it disappears when it is closed.

    Args:
        task: the work, such as "generating".
        total: amount of work.
        unit: unit of the amount: "bytes", any other plural, or empty for a fraction, which is shown in percent.
        log: where standard error is not a terminal, print a line every `LOG_EVERY` seconds instead of nothing.
    """

    def __init__(self, task: str, total: float = 1.0, unit: str = "", *, log: bool = False) -> None:
        self._task, self._total, self._unit, self._log = task, total, unit, log
        self._terminal = sys.stderr.isatty()
        self._done = 0.0
        self._start = time.monotonic()
        self._next = SHOWN_AFTER if self._terminal else LOG_EVERY
        self._bar: Progress | None = None

    def advance(self, amount: float) -> None:
        """Count a further amount of work as done."""
        self.update(self._done + amount)

    def update(self, done: float) -> None:
        """Set the amount of work that is done so far."""
        self._done = done
        elapsed = time.monotonic() - self._start
        if elapsed < self._next:
            return
        if self._terminal:
            self._draw(elapsed)
        elif self._log:
            print(f"{self._task}: {self._amount(elapsed)}", file=sys.stderr, flush=True)
            self._next = elapsed + LOG_EVERY

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self._bar is not None:
            self._bar.stop()

    def _draw(self, elapsed: float) -> None:
        if self._bar is None:
            # Imported here because the import takes longer than a quick command.
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = ("{task.description}", BarColumn(), TextColumn("{task.fields[amount]}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task(self._task, total=self._total, amount="")
            self._bar.start()
        (task,) = self._bar.task_ids
        self._bar.update(task, completed=self._done, amount=self._amount(elapsed))

    def _amount(self, elapsed: float) -> str:
        done, total, unit = self._done, self._total, self._unit
        if not unit:
            return f"{done / total:.0%}"
        if unit == "bytes":
            return f"{done / 1e9:,.1f} of {total / 1e9:,.1f} GB"
        return f"{done:,.0f} of {total:,.0f} {unit}, {done / elapsed:,.1f} {unit}/s"


@contextmanager
def progress_bar(task: str) -> Iterator[Report]:
    """Within the block, calls of the yielded function update a bar."""
    bar = ProgressBar(task)
    try:
        yield bar.update
    finally:
        bar.close()


@contextmanager
def tracked(items: Sequence[Item], task: str) -> Iterator[Iterator[Item]]:
    """Within the block, yield an iterator over items that counts each as done once the next one is requested."""
    bar = ProgressBar(task, sum(item.num_bytes for item in items), "bytes")

    def count() -> Iterator[Item]:
        for item in items:
            yield item
            bar.advance(item.num_bytes)

    try:
        yield count()
    finally:
        bar.close()
