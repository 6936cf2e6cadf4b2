"""What preprocessing shows while it runs."""

import sys
import time
from datetime import timedelta

from megapipe.data.index_writer import ShardWriter
from megapipe.data.preprocess.journal import Journal
from megapipe.data.preprocess.tokenize_part import TokenizedPart

SHOWN_SKIPS = 10
BAR_WIDTH = 20


class ProgressLine:
    """One line on stderr: redrawn in a terminal, else a new one every ten seconds."""

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._done = self._skipped = self._before = 0
        self._start = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._next = 0.0 if self._terminal else 10.0

    def start(self, journal: Journal) -> None:
        """Tells of what an earlier run of the same command has done."""
        self._done, self._skipped, self._before = journal.done_bytes, journal.num_skipped, journal.done_bytes
        if journal.next_part:
            print(f"continuing a run that stopped after {self._done / 1e6:,.1f} MB", file=sys.stderr)

    def show(self, part: TokenizedPart, writer: ShardWriter) -> None:
        """Count a finished part and print its first skipped documents. Redraw the line if enough time has passed."""
        for reason in part.skipped[: max(0, SHOWN_SKIPS - self._skipped)]:
            print(f"skipped: {reason}", file=sys.stderr)
        self._skipped += len(part.skipped)
        self._done += part.input_bytes
        elapsed = time.monotonic() - self._start
        if elapsed >= self._next:
            self._next = elapsed + (0.1 if self._terminal else 10.0)
            self._print(self._line(elapsed, writer.num_documents), "" if self._terminal else "\n")

    def finish(self) -> None:
        elapsed = time.monotonic() - self._start
        skipped = f", {self._skipped:,} documents skipped" if self._skipped else ""
        done = self._done - self._before
        self._print(f"{done / 1e6:,.1f} MB in {elapsed:.1f} s, {_rate(done, elapsed) / 1e6:.1f} MB/s{skipped}", "\n")

    def _line(self, elapsed: float, num_documents: int) -> str:
        # A table's rows may be smaller or larger than their file, so the sum may miss the total.
        share = min(1.0, self._done / max(self._total, 1))
        rate = _rate(self._done - self._before, elapsed)
        left = max(0, self._total - self._done) / max(rate, 1e-9)
        filled = round(share * BAR_WIDTH)
        return (
            f"{'█' * filled}{'░' * (BAR_WIDTH - filled)} {share:.0%} of {self._total / 1e6:,.1f} MB, "
            f"{num_documents:,} documents, {rate / 1e6:.1f} MB/s, {timedelta(seconds=round(left))} left"
        )

    def _print(self, line: str, end: str) -> None:
        print(f"\r\033[K{line}" if self._terminal else line, end=end, file=sys.stderr, flush=True)


def _rate(done: int, elapsed: float) -> float:
    return done / max(elapsed, 1e-9)
