"""Write lines to standard output, standard error and files, any of which may fail: a closed terminal, a pipe without a
reader, a full disk."""

import contextlib
import os
import sys
from pathlib import Path
from typing import TextIO


def write_line(line: str, stream: TextIO | None = None) -> None:
    """Write a line to `stream`, by default standard output, and flush it. Raises OSError or ValueError if it is
    closed."""
    stream = sys.stdout if stream is None else stream
    if stream is None:  # the process was started without one
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()


def print_line(line: str) -> None:
    """Print a line on standard output if that still works; raises nothing."""
    with contextlib.suppress(OSError, ValueError):
        write_line(line)


def print_error(line: str) -> None:
    """Print a line on standard error if that still works; raises nothing."""
    with contextlib.suppress(OSError, ValueError):
        write_line(line, sys.stderr)


def leave_output() -> None:
    """Discard what a dead standard output or standard error does not accept. Call this before the process exits.

    Otherwise the interpreter fails to flush it, prints a traceback and changes the exit status to 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)


class LineFile:
    """Appends lines to a file, which the first line opens. A line is written completely or not at all: a line that a
    full disk cut short is removed again, and an incomplete line of a killed process is ended first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def write(self, line: str) -> None:
        """Append a line. Raises OSError."""
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._descriptor).st_size
        half = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        content = (b"\n" if half else b"") + line.encode("utf-8", "backslashreplace") + b"\n"
        try:
            while content:
                content = content[os.write(self._descriptor, content) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, size)
            raise

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)
