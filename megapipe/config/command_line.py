"""What the command lines of tools share: spelling of flags, arguments that count, errors in one line each."""

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

_WRONG_NUMBER = re.compile(r"invalid (?P<kind>\w+) value: (?P<value>.*)")


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser that tells a wrong command line in one line, without the usage before it; status 2.

    No flag may be shortened, of sub-commands neither: a parser makes theirs of its own class.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        told = re.sub(r"^argument (\S+): is ", r"\1 is ", _WRONG_NUMBER.sub(_number_told, message))
        self.exit(2, f"error: {told} ({self.prog} --help tells more)\n")


def _number_told(match: re.Match[str]) -> str:
    whole = match["kind"] in ("int", "natural", "positive")
    return f"is {match['value']}, but must be a {'whole' if whole else 'finite'} number"


def tool_parser(program: str, description: str, examples: str) -> OneLineParser:
    """The parser of a tool: texts are shown as they are written, examples last, and no flag may be shortened."""
    return OneLineParser(
        prog=program,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def with_hyphens(argv: Sequence[str]) -> list[str]:
    """--json_keys means --json-keys."""
    return [re.sub(r"^--[^=]+", lambda flag: flag[0].replace("_", "-"), argument) for argument in argv]


def finite(text: str) -> float:
    """An argument that is a number, neither NaN nor infinite and at least 0; to be the `type` of an argument."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"is {text}, but must be a finite number of at least 0")
    return number


def natural(text: str) -> int:
    """An argument that counts something of which there may be none; to be the `type` of an argument."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"is {number}, but must be at least 0")
    return number


def positive(text: str) -> int:
    """An argument that counts something; to be the `type` of an argument."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"is {number}, but must be at least 1")
    return number


def exit_status(run: Callable[[], int], is_told: Callable[[ValueError], bool], interrupted: str) -> int:
    """Run a tool that reads and writes files, and tell of what goes wrong on stderr.

    Args:
        run: returns the exit status where nothing does.
        is_told: whether an error was raised for the user to read; any other is a fault in the program, and passes.
        interrupted: what Ctrl-C left behind, in words.

    Returns:
        The exit status: that of `run`, 2 for unusable input and what the system refuses, 130 for Ctrl-C.
    """
    try:
        return run()
    except ValueError as error:
        if not is_told(error):
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
