"""What the command lines of tools share: spelling of flags, arguments that count, errors in one line each."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence


def tool_parser(program: str, description: str, examples: str) -> argparse.ArgumentParser:
    """The parser of a tool: texts are shown as they are written, examples last, and no flag may be shortened."""
    return argparse.ArgumentParser(
        prog=program,
        description=description,
        epilog=examples,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def with_hyphens(argv: Sequence[str]) -> list[str]:
    """--json_keys means --json-keys."""
    return [re.sub(r"^--[^=]+", lambda flag: flag[0].replace("_", "-"), argument) for argument in argv]


def positive(text: str) -> int:
    """An argument that counts something; to be the `type` of an argument."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def exit_status(run: Callable[[], int], is_told: Callable[[ValueError], bool], interrupted: str) -> int:
    """Run a tool that reads and writes files, and tell of what goes wrong on stderr.

    Args:
        run: returns the exit status where nothing does.
        is_told: whether an error was raised for the user to read; any other is a fault in the program, and passes.
        interrupted: what Ctrl-C left behind, in words.

    Returns:
        The exit status: that of `run`, 1 for unusable input and what the system refuses, 130 for Ctrl-C.
    """
    try:
        return run()
    except ValueError as error:
        if not is_told(error):
            raise
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 1
    except OSError as error:
        # Writing to a full disk fails without a file name.
        print(f"error: {error.filename or 'writing the output'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted; {interrupted}", file=sys.stderr)
        return 130
