"""Shared parts of command-line tools: parsers with one-line errors, argument types and exit statuses."""

import argparse
import math
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NoReturn

_WRONG_NUMBER = re.compile(r"invalid (?P<kind>\w+) value: (?P<value>.*)")


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser that reports a wrong command line in one line, without its usage, and exits with status 2.

    Flags cannot be abbreviated. Parsers of sub-commands are of this class too.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        problem = re.sub(r"^argument (\S+): is ", r"\1 is ", _WRONG_NUMBER.sub(_wrong_number, message))
        self.exit(2, f"error: {problem} ({self.prog} --help lists the options)\n")


def _wrong_number(match: re.Match[str]) -> str:
    whole = match["kind"] in ("int", "natural", "positive")
    return f"is {match['value']}, but must be a {'whole' if whole else 'finite'} number"


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
        options = {"subsequent_indent": " " * len("usage: "), "break_on_hyphens": False, "break_long_words": False}
        return f"{textwrap.fill(line, self._width, **options)}\n\n"  # type: ignore[arg-type]


def wrapped(text: str, width: int) -> str:
    """Wrap every paragraph of a text to a width in characters. Empty and indented lines stay as they are."""
    lines = []
    for is_prose, group in groupby(text.splitlines(), lambda line: bool(line) and not line.startswith(" ")):
        if is_prose:
            lines += textwrap.wrap(" ".join(group), width, break_on_hyphens=False, break_long_words=False)
        else:
            lines += group
    return "\n".join(lines)


def tool_parser(program: str, description: str, examples: str) -> OneLineParser:
    """Return a parser that prints a description first and examples last, and accepts no abbreviated flags."""
    return OneLineParser(
        prog=program,
        description=description,
        epilog=examples,
        formatter_class=ProseFormatter,
    )


def with_hyphens(argv: Sequence[str]) -> list[str]:
    """Replace underscores in flags, so that --json_keys means --json-keys."""
    return [re.sub(r"^--[^=]+", lambda flag: flag[0].replace("_", "-"), argument) for argument in argv]


def finite(text: str) -> float:
    """Parse a finite number of at least 0; for use as the `type` of an argument."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"is {text}, but must be a finite number of at least 0")
    return number


def natural(text: str) -> int:
    """Parse a whole number of at least 0; for use as the `type` of an argument."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"is {number}, but must be at least 0")
    return number


def positive(text: str) -> int:
    """Parse a whole number of at least 1; for use as the `type` of an argument."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"is {number}, but must be at least 1")
    return number


def exit_status(run: Callable[[], int], is_for_user: Callable[[ValueError], bool], interrupted: str) -> int:
    """Run a tool that reads and writes files, and report its errors on stderr.

    Args:
        run: returns the exit status if there is no error.
        is_for_user: whether an error is a message for the user; any other error is a bug and is raised.
        interrupted: message after Ctrl-C, about what remains on disk.

    Returns:
        The status that `run` returns, 2 for unusable input and refused system calls, 130 after Ctrl-C.
    """
    try:
        return run()
    except ValueError as error:
        if not is_for_user(error):
            raise
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    except OSError as error:
        # Writing to a full disk fails without a file name.
        print(f"error: {error.filename or 'writing the output'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; {interrupted}", file=sys.stderr)
        return 130
