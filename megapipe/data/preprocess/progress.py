"""What preprocessing shows while it runs."""

import sys
import time

from megapipe.data.index_writer import ShardWriter
from megapipe.data.preprocess.tokenize_part import TokenizedPart

SHOWN_SKIPS = 10


class Progress:
    """One line on stderr: redrawn in a terminal, else a new one every ten seconds."""

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._done = self._skipped = 0
        self._start = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._next = 0.0 if self._terminal else 10.0

    def show(self, part: TokenizedPart, writer: ShardWriter) -> None:
        for reason in part.skipped[: max(0, SHOWN_SKIPS - self._skipped)]:
            print(f"skipped: {reason}", file=sys.stderr)
        self._skipped += len(part.skipped)
        self._done += part.input_bytes
        elapsed = time.monotonic() - self._start
        if elapsed >= self._next:
            self._next = elapsed + (0.1 if self._terminal else 10.0)
            rate = self._done / max(elapsed, 1e-9)
            line = (
                f"{self._done / 1e6:,.1f} of {self._total / 1e6:,.1f} MB, {writer.num_documents:,} documents, "
                f"{rate / 1e6:.1f} MB/s, {(self._total - self._done) / max(rate, 1e-9):.0f} s left"
            )
            print(f"\r\033[K{line}" if self._terminal else line, end="" if self._terminal else "\n", file=sys.stderr)

    def finish(self) -> None:
        elapsed = time.monotonic() - self._start
        skipped = f", {self._skipped:,} documents skipped" if self._skipped else ""
        line = (
            f"{self._done / 1e6:,.1f} MB in {elapsed:.1f} s, {self._done / 1e6 / max(elapsed, 1e-9):.1f} MB/s{skipped}"
        )
        print(f"\r\033[K{line}" if self._terminal else line, file=sys.stderr)
