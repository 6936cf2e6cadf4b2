"""Shared parts of command-line tools: parsers with one-line errors, argument types, exit statuses, numbers as people
read them, and the progress bar of slow commands."""

import argparse
import errno
import os
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from megapipe.config import ConfigError, InputError
from megapipe.config.field_types import real_number, whole_number

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from rich.progress import Progress

_WRONG_NUMBER = re.compile(r"invalid (?P<kind>\w+) value: (?P<value>.*)")
_NO_VALUE = re.compile(r"^argument (?:\S+/)?(--\S+): expected .* argument$")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WHOLE_WORDS: dict[str, Any] = {"break_on_hyphens": False, "break_long_words": False}


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser that reports a wrong command line in one line, without its usage, and exits with status 2.

    Flags cannot be abbreviated. Parsers of sub-commands are of this class too.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})
        # -1,2 and -1e3 are values too, not flags.
        self._negative_number_matcher = re.compile(r"-\.?[0-9]")

    def error(self, message: str) -> NoReturn:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and message.endswith(
                f"required: {action.metavar or action.dest}"
            ):
                message = f"a command is missing; write one of {', '.join(action.choices)} after {self.prog}"
        problem = re.sub(r"^argument (\S+): is ", r"\1 is ", _WRONG_NUMBER.sub(_wrong_number, message))
        problem = _NO_VALUE.sub(r"\1 needs a value; write one that starts with a hyphen as \1=VALUE", problem)
        self.exit(2, f"error: {problem} ({self.prog} --help lists the options)\n")


def _wrong_number(match: re.Match[str]) -> str:
    whole = match["kind"] in ("int", "whole_number", "natural", "positive")
    digits = "" if match["value"].isascii() else " in the digits 0 to 9"
    return f"is {match['value']}, but must be a {'whole' if whole else 'finite'} number{digits}"


class ProseFormatter(argparse.HelpFormatter):
    """Wraps usage lines, headings and paragraphs to the width of the terminal. Indented lines stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return f"{wrapped(text, width)}\n"

    def start_section(self, heading: str | None) -> None:
        super().start_section(heading and wrapped(heading, self._width - 1))

    def _format_usage(self, usage: str | None, *others: Any) -> str:
        if usage is None:
            return super()._format_usage(usage, *others)
        line = f"usage: {usage % {'prog': self._prog}}"
        options = {"subsequent_indent": " " * len("usage: "), **_WHOLE_WORDS}
        return f"{textwrap.fill(line, self._width, **options)}\n\n"


def wrapped(text: str, width: int) -> str:
    """Wrap every paragraph of a text to a width in characters. Empty and indented lines stay as they are."""
    lines = []
    for is_prose, group in groupby(text.splitlines(), lambda line: line[:1] not in ("", " ")):
        if is_prose:
            lines += textwrap.wrap(" ".join(group), width, **_WHOLE_WORDS)
        else:
            lines += group
    return "\n".join(lines)


def tool_parser(program: str, description: str, examples: str) -> OneLineParser:
    """Return a parser that prints a description first and examples last, and accepts no abbreviated flags."""
    return OneLineParser(prog=program, description=description, epilog=examples, formatter_class=ProseFormatter)


def with_hyphens(argv: Sequence[str]) -> list[str]:
    """Replace underscores in flags, so that --json_keys means --json-keys."""
    return [re.sub(r"^--[^=]+", lambda flag: flag[0].replace("_", "-"), each) for each in argv]


def finite(text: str) -> float:
    """Parse a number from 0 to 1e100, whose sums and products are finite; for use as the `type` of an argument."""
    number = real_number(text)
    if not 0 <= number <= 1e100:
        raise argparse.ArgumentTypeError(f"is {text}, but must be a finite number of at least 0 and at most 1e100")
    return number


def natural(text: str, least: int = 0) -> int:
    """Parse a whole number of at least 0, or another limit; for use as the `type` of an argument."""
    number = whole_number(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"is {number}, but must be at least {least}")
    return number


def positive(text: str) -> int:
    """Parse a whole number of at least 1; for use as the `type` of an argument."""
    return natural(text, least=1)


def not_empty(text: str) -> str:
    """Return the text, unless it is empty; for use as the `type` of an argument."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; give a name")
    return text


def end_with_parent() -> None:
    """End this process when the process that started it with multiprocessing ends, because nothing else ends it if
    that process is killed. In a process that multiprocessing did not start, do nothing."""
    from multiprocessing import parent_process  # help does not need its imports

    if (parent := parent_process()) is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: "BaseProcess") -> None:
    parent.join()
    os._exit(1)


def exit_status(run: Callable[[], int | None], interrupted: str = "") -> int:
    """Run a tool that reads and writes files, and report errors in its input on stderr. Any other exception is a bug,
    and is raised.

    Args:
        run: returns the exit status after success, None for 0.
        interrupted: message after Ctrl-C, about what remains on disk.

    Returns:
        The status that `run` returns, 2 for unusable input and refused system calls, 130 after Ctrl-C.
    """
    try:
        return run() or 0
    except OSError as error:
        # Writing to a full disk fails without a file name.
        place, remedy = error.filename or "writing the output", "choose another path, or change its permissions"
        remedy = "free some space, or choose another disk" if error.errno in _NO_SPACE else remedy
        print(f"error: {place}: {error.strerror or error}; {remedy}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted{interrupted and f'; {interrupted}'}", file=sys.stderr)
        return 130
    except InputError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2


def aligned(rows: Iterable[Sequence[str]], is_right: Callable[[Sequence[str]], bool]) -> list[str]:
    """Return the lines of a table. is_right: whether a column is aligned to the right, by its cells below the
    heading."""
    columns = []
    for cells in zip(*rows, strict=True):
        width, side = max(map(len, cells)), ">" if is_right(cells[1:]) else "<"
        columns.append([f"{cell:{side}{width}}" for cell in cells])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]


HOUR = 3600.0
DAY = 86400.0


def check_folders(*paths: Path | None, folder: Path | None = None) -> None:
    """Raise ConfigError if one of the files, or a file in the folder, could not be written, so that no work is lost
    later. The folder need not exist."""
    files = [path for path in paths if path is not None]
    problems = [
        f"{path} cannot be written because the folder {path.parent} does not exist; create it, or choose another file"
        for path in files
        if not path.parent.is_dir()
    ]
    problems += [f"{path} is a folder; choose a file name" for path in files if path.is_dir()]
    problems += [
        f"{path} cannot be written: {reason}; choose a file in a writable folder"
        for path in files
        if path.parent.is_dir() and (reason := unwritable(path.parent)) is not None
    ]
    if folder is not None:
        existing = next(each for each in (folder, *folder.absolute().parents) if os.path.lexists(each))
        if (reason := unwritable(existing)) is not None:
            problems.append(f"{folder} cannot be written: {existing}: {reason}; choose another folder")
    if problems:
        raise ConfigError(problems)


def unwritable(folder: Path) -> str | None:
    """Return why no file can be created in a folder, after an attempt that leaves nothing behind; None if one can."""
    from tempfile import TemporaryFile  # most commands do not need it

    try:
        with TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror


def write_text(path: Path, text: str) -> None:
    """Write the whole text to a file that a flag names; if that fails, an earlier file stays as it is.

    Raises ConfigError if the file cannot be written.
    """
    from megapipe.config.files import write_whole  # help does not need its imports

    try:
        if path.exists() and not path.is_file():  # a pipe or a device, such as /dev/stdout
            path.write_text(text, encoding="utf-8")
        else:
            write_whole(path.resolve(), text.encode())  # resolved, so that a link stays one
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose a file in a writable folder") from None


def bytes_text(count: float) -> str:
    """Return a number of bytes as text, such as `18.3 GB`, in powers of 1000."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def count_text(count: float) -> str:
    """Return a number as text, such as `20.3B` or `124M`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.3g}{unit}" if count < 1000 * size else f"{count / size:,.0f}{unit}"
    return f"{count:,.0f}"


def seconds_text(seconds: float) -> str:
    """Return seconds as text with three figures, such as `2.31 s`, `41.0 ms` or `180 us`."""
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:#.3g}".rstrip(".") + f" {unit}"
    return "0" if seconds == 0 else f"{seconds * 1e6:.2g} us"


def duration_text(seconds: float) -> str:
    """Return seconds as text: `34.0 days`, `2.5 hours`, `41 minutes`, or seconds."""
    for unit, size in (("days", DAY), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return seconds_text(seconds)


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


def quiet(_: object) -> None:
    """Report nothing."""


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
        self._drawing = threading.Lock()

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
            with self._drawing:
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
            self._bar.add_task(self._task, total=None, amount="")  # a pulsing bar until work is done
            self._bar.start()
        (task,) = self._bar.task_ids
        self._bar.update(
            task, total=self._total if self._done else None, completed=self._done, amount=self._amount(elapsed)
        )

    def _amount(self, elapsed: float) -> str:
        done, total, unit = self._done, self._total, self._unit
        if not unit:
            return f"{done / total:.0%}" if done else ""
        if unit == "bytes":
            return f"{done / 1e9:,.1f} of {total / 1e9:,.1f} GB"
        return f"{done:,.0f} of {total:,.0f} {unit}, {done / elapsed:,.1f} {unit}/s"


@contextmanager
def progress_bar(task: str) -> Iterator[Report]:
    """Within the block, calls of the yielded function update a bar, which appears in time even without a call."""
    with closing(ProgressBar(task)) as bar:
        timer = threading.Timer(SHOWN_AFTER, bar.advance, (0.0,))
        timer.daemon = True
        timer.start()
        try:
            yield bar.update
        finally:
            timer.cancel()
            timer.join()


@contextmanager
def tracked(items: Sequence[Item], task: str) -> Iterator[Iterator[Item]]:
    """Within the block, yield an iterator over items that counts each as done once the next one is requested."""
    with closing(ProgressBar(task, sum(item.num_bytes for item in items), "bytes")) as bar:

        def count() -> Iterator[Item]:
            for item in items:
                yield item
                bar.advance(item.num_bytes)

        yield count()
