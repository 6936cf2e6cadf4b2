"""What ``megapipe plan`` does: reads a command, runs it, tells of a wrong input in one line a problem."""

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from megapipe.config.errors import ConfigError, nearest
from megapipe.planner.command.arguments import COMMANDS, Request, parse_request
from megapipe.schedules.errors import ScheduleError

Handler = Callable[[Request], int]
"""Runs a command and gives the exit status. Raises ConfigError or ScheduleError for what the user can mend."""

HANDLERS = {
    "search": ("search", "run_search"),
    "predict": ("layouts", "run_predict"),
    "explain": ("layouts", "run_explain"),
    "compare": ("layouts", "run_compare"),
    "train-time": ("train_time", "run_train_time"),
    "fit": ("fit", "run_fit"),
}
"""Commands that need no torch: the module beside this one and its function. A module is imported once its command is
asked for, as most commands need little of what the others do."""


def main(arguments: Sequence[str], others: Mapping[str, Handler]) -> int:
    """Run a command line; 0 on success, 2 on an error that the user can mend.

    others: handlers of the commands that need torch, which this room may not import.
    """
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(overview(), file=sys.stdout if arguments else sys.stderr, flush=True)
            return 0 if arguments else 2
        name = arguments[0].replace("_", "-")
        if name not in COMMANDS:
            raise ConfigError(f"unknown command {arguments[0]!r}{nearest(name, COMMANDS)} (--help lists them)")
        request = parse_request(name, arguments[1:])
        status = (others[name] if name in others else _handler(name))(request)
        # A full disk behind a redirection shows at a flush, and the interpreter's own comes too late to be told.
        sys.stdout.flush()
        return status
    except ConfigError as error:
        return _refused(error.problems)
    except ScheduleError as error:
        return _refused([str(error)])
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        print("error: stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT
    except OSError as error:
        return _refused([f"{error.filename or 'the output'} cannot be used: {error.strerror or error}"])


def _handler(name: str) -> Handler:
    module, function = HANDLERS[name]
    found: Handler = getattr(import_module(f"megapipe.planner.command.{module}"), function)
    return found


def overview() -> str:
    """Help without a command."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: megapipe plan COMMAND [--group.field VALUE ...]",
            "",
            "Find which layout of a model fits a machine, how fast it is, and why.",
            "",
            *lines,
            "",
            "`megapipe plan COMMAND --help` lists the flags of a command and the common fields of a training "
            "configuration, `--help-all` every field.",
        ]
    )


def _refused(problems: Sequence[str]) -> int:
    for problem in problems:
        print(f"error: {' '.join(problem.split())}", file=sys.stderr)
    return 2
