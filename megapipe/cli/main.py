"""The table of subcommands, and the functions that start one."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from shutil import get_terminal_size
from textwrap import wrap
from typing import TYPE_CHECKING, NoReturn, cast

from megapipe import __version__
from megapipe.config import nearest

if TYPE_CHECKING:
    from megapipe.planner.command.main import Request

SUBCOMMANDS = {
    "train": ("megapipe.cli.train:main", "pretrain a GPT or a BERT on one or many devices"),
    "preprocess": ("megapipe.data.preprocess.command:main", "turn text into data shards; learn a tokenizer from text"),
    "plan": ("megapipe.cli.main:plan", "find the fastest layout for a machine; predict time and memory"),
    "schedule": ("megapipe.schedules.command.main:main", "show, validate, simulate, compare and draw schedules"),
    "data": ("megapipe.cli.data:main", "inspect, check, merge and split data shards; measure waits for data"),
    "convert": ("megapipe.conversion.command:main", "convert, inspect, verify, compare and average checkpoints"),
    "generate": ("megapipe.cli.trained_models:generate", "continue prompts with a trained GPT"),
    "fill-mask": ("megapipe.cli.trained_models:fill_mask", "fill in the gaps of a text with a trained BERT"),
    "evaluate": ("megapipe.cli.trained_models:evaluate", "print loss and perplexity of a trained model on a shard"),
    "runs": ("megapipe.cli.runs:main", "list, show, compare and plot runs from their folders"),
    "doctor": ("megapipe.cli.doctor:main", "print what this host and installation have, and what is wrong"),
    "help": ("megapipe.cli.help:main", "explain a command, or a field such as parallel.tensor"),
}
"""Subcommands by name: the function that takes the arguments and returns the exit status, and a summary."""
ABOUT = "Pretrain GPT and BERT language models across many devices, and plan such runs without them."
MORE = "`megapipe COMMAND --help` lists the options of a command, `megapipe --version` prints the version."


def main(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit status; 2 if there is no such subcommand."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"megapipe {__version__}")
        return 0
    name = arguments[0].replace("_", "-")
    if name not in SUBCOMMANDS:
        print(
            f"error: unknown command {arguments[0]!r}{nearest(name, SUBCOMMANDS)} (megapipe --help lists them)",
            file=sys.stderr,
        )
        return 2
    return subcommand(name)(arguments[1:])


def subcommand(name: str) -> Callable[[Sequence[str]], int]:
    """Import and return the function of a subcommand."""
    module, _, function = SUBCOMMANDS[name][0].partition(":")
    with _importing():
        return cast(Callable[[Sequence[str]], int], getattr(import_module(module), function))


def plan(arguments: Sequence[str]) -> int:
    """Run a command line of `megapipe plan`: commands of the planner, and of calibration, which need torch."""
    from megapipe.planner.command.main import main as run_planner

    return run_planner(arguments, {name: partial(_calibrate, name) for name in ("profile", "links", "dry-run")})


def _calibrate(name: str, request: "Request") -> int:
    # Imported here because torch takes a second, and the planner's own commands should not wait for it.
    from megapipe.calibration.commands import HANDLERS

    return HANDLERS[name](request)


def start(*words: str) -> NoReturn:
    """Run the command line of this process, after `words`, and end. The console script and the programs call this."""
    if not words:
        sys.argv[0] = "megapipe"
    end_after(lambda: main([*words, *sys.argv[1:]]))


def end_after(run: Callable[[], int | None]) -> NoReturn:
    """Call a function and end this process with the status that it returns, None for 0; with 1 if it raises.

    A process that is still in a world of ranks was stopped by an error. It ends at once, because freeing its process
    groups would wait for operations with peers that may be gone.
    """
    try:
        try:
            status = run() or 0
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the program that read the output, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        status = 128 + signal.SIGPIPE
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        end_at_once(status)
    sys.exit(status)


def end_at_once(status: int) -> NoReturn:
    """End this process without its exit handlers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def overview() -> str:
    """Return the help that is printed without a subcommand, in lines that fit the terminal."""
    width, margin = get_terminal_size().columns, max(map(len, SUBCOMMANDS)) + 4
    lines = ["usage: megapipe COMMAND ...", "", *wrap(ABOUT, width), ""]
    for name, (_, summary) in SUBCOMMANDS.items():
        lines += wrap(summary, width, initial_indent=f"  {name}".ljust(margin), subsequent_indent=" " * margin)
    return "\n".join([*lines, "", *wrap(MORE, width)])


@contextmanager
def _importing() -> Iterator[None]:
    """Make the import of a subcommand faster, and print no traceback if Ctrl-C interrupts it."""
    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    gc.disable()  # nearly all objects that imports create are permanent
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if previous is signal.default_int_handler:
            signal.signal(signal.SIGINT, previous)


def _interrupted(number: int, frame: object) -> None:
    """Exit at once: an exception would be raised in the module that is being imported, which may catch it."""
    os.write(2, b"interrupted\n")
    os._exit(128 + signal.SIGINT)
