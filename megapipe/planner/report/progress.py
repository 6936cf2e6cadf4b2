"""Show how far a slow command is, on a terminal's standard error."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_SECONDS = 2.0
"""Commands that are faster than this show nothing."""

Report = Callable[[float], None]
"""Takes the share that is done, 0 to 1."""


@contextmanager
def progress(words: str) -> Iterator[Report]:
    """Within the block, calls of the yielded function draw a bar with the time left, `PATIENCE_SECONDS` after the
    start. Nothing is written if standard error is no terminal."""
    if not sys.stderr.isatty():
        yield lambda share: None
        return
    # Imported here because the import takes longer than a quick command.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(words), BarColumn(), TextColumn("{task.percentage:.0f}%"), TimeRemainingColumn()
    bar, began = Progress(*columns, console=Console(stderr=True), transient=True), time.monotonic()
    task = bar.add_task(words, total=1.0)

    def report(share: float) -> None:
        bar.update(task, completed=share)
        if not bar.live.is_started and time.monotonic() - began >= PATIENCE_SECONDS:
            bar.start()

    try:
        yield report
    finally:
        bar.stop()
