"""The command ``megapipe plan``: it reads a command line, runs it, and reports each wrong input in one line."""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

from jsonargparse import ArgumentParser

from megapipe.config import ConfigError, nearest
from megapipe.config.bert import BertPretrainConfig
from megapipe.config.field_types import Bound, NaturalFloat, PositiveFloat, PositiveInt, Probability, Size, outside
from megapipe.config.help_format import packaged_files
from megapipe.config.load import Given, asks_for_help, build_parser, kind_of, parse_given
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import PRESETS, Hardware, load_hardware
from megapipe.planner.search import Objective
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.registry import GENERATORS, searched
from megapipe.spec.model_folder import with_model_folders

Devices = Annotated[int, Bound(1, 1_000_000, words="at least 1 and at most 1,000,000")]
"""Ranks of a plan. The limit is above any real machine; the time of planning grows with the number of nodes."""
Ranks = Annotated[int, Bound(1, 1024)]
"""Processes that measure at the same time on one machine."""
Megabytes = Annotated[float, Bound(1e-6, 1e6, words="from 0.000001, a byte, to 1,000,000")]
Duration = Annotated[float, Bound(1e-9, 1e12, words="from 1e-9 to 1e12")]
"""A time between failures, or of a save. With these limits, the time between saves neither overflows nor becomes 0."""
Amount = Annotated[float, Bound(1, 1e18, words="from 1 to 1e18")]
"""Number of tokens or parameters."""
MEMORY_RESERVE = 0.05
"""Fraction of a device's memory that plans keep free by default; 4 GB of 80 GB, for a CUDA context (0.5 GB), NCCL's
buffers (1 to 2 GB) and fragmentation."""
NO_DATA = "DATA"
"""Placeholder for the data.prefix of a configuration that is written without one."""


@dataclass(frozen=True)
class Request:
    """A parsed command line. arguments: without the command's name. kind: type of the configuration. config: its
    values. given: fields that a flag or a file sets. flags: values of the flags of this command, by name."""

    command: str
    arguments: tuple[str, ...]
    kind: type[PretrainConfig]
    config: PretrainConfig
    given: frozenset[str]
    flags: Mapping[str, Any]

    def hardware(self) -> Hardware:
        """Return the machine of --hardware without reserved memory. Raises ConfigError if --hardware is missing."""
        if self.flags["hardware"] is None:
            raise ConfigError(f"--hardware is missing; set it to a file or to one of {', '.join(PRESETS)}")
        hardware = load_hardware(self.flags["hardware"])
        if (reserve := self.flags.get("memory_reserve")) is not None:
            return hardware.with_reserve(reserve * 1e9)
        return hardware.with_share(1 - self.default_reserve())

    def default_reserve(self) -> float:
        """Return the fraction of each device's memory to keep free if no flag sets it: 0 with recompute.method auto,
        which has its own budget, and for commands that measure."""
        given = self.flags.get("memory_reserve", 0.0) is not None
        return 0.0 if given or self.config.recompute.method == "auto" else MEMORY_RESERVE

    def devices(self) -> int:
        """Return the number of ranks: --devices, or the product of the sizes of the layout."""
        parallel = self.config.parallel
        if self.flags["devices"] is not None:
            return int(self.flags["devices"])
        if parallel.data is None:
            raise ConfigError("--devices is missing; set it, or set parallel.data and the other sizes")
        return parallel.data * parallel.pipeline * parallel.context * parallel.tensor

    def for_file(self, file: str) -> "Request":
        """Return the same request for the configuration of a file; flags override fields of the file.

        Raises ConfigError, in which each problem names the file.
        """
        words = ["--config", file, *self.arguments]
        try:
            kind = _kind(words)
            given = parse_given(_parser(self.command, kind), kind, words)
        except ConfigError as error:
            if _is_hardware(file):
                raise ConfigError(f"{file} is a hardware file; write --hardware {file} and a configuration") from None
            raise ConfigError(with_name(file, error.problems)) from None
        return replace(self, kind=kind, config=given.config, given=given.fields)


Flag = tuple[str, dict[str, Any]]
"""Name and keyword arguments of `ArgumentParser.add_argument`; `type` may be one of `config.field_types`."""


class Command(NamedTuple):
    """A subcommand. summary: one line. usage: the arguments after its name. flags: flags of this command only."""

    summary: str
    usage: str
    flags: tuple[Flag, ...]


def _flag(name: str, about: str, type: Any = str, **more: Any) -> Flag:
    kind = {"action": "store_true"} if type is bool else {"type": type}
    return name, {**kind, "help": about, **more}


_HARDWARE = _flag(
    "--hardware",
    f"YAML file of a machine (docs/hardware.md), or one of {', '.join(PRESETS)}",
    metavar="FILE|PRESET",
)
_MACHINE = (
    _HARDWARE,
    _flag("--devices", "total number of ranks (default: the product of the sizes of the layout)", Devices),
    _flag(
        "--memory_reserve",
        f"memory to keep free on each device for CUDA, NCCL and fragmentation (default {MEMORY_RESERVE:.0%} of it)",
        float,
        metavar="GB",
    ),
)
_TRAINING = (
    _flag("--tokens", "tokens to train on, such as 300e9; also prints steps, days and price", Amount),
    _flag("--price_per_hour", "price of a node-hour, in any currency (default: from the hardware file)", NaturalFloat),
    _flag(
        "--mean_time_between_failures",
        "mean time between failures of the job; with --save_seconds, prints how often to save",
        Duration,
        metavar="HOURS",
    ),
    _flag("--save_seconds", "seconds that a save adds (docs/checkpoints.md)", Duration),
)
_JSON = _flag("--json", "machine-readable output", bool)
_PICTURES = (
    _flag("--html", "write a report with pictures to one HTML file", Path, metavar="FILE"),
    _flag("--pictures", "write the report's pictures as SVG files", Path, metavar="FOLDER"),
)
_SEARCH = (
    _flag(
        "--objective",
        "speed: most tokens/s. cost: lowest price per token, on --devices or fewer. time: shortest time for "
        "--tokens, on --devices or fewer. size: largest model that fits (default speed)",
        choices=get_args(Objective),
        default="speed",
    ),
    _flag(
        "--schedules",
        "schedules to try with every layout of the ranks, separated by commas "
        f"(default {','.join(searched('all', GENERATORS.registered()))}, and "
        "other schedules with the most promising layouts)",
    ),
    _flag("--models", "with --objective size: model files (default: --model, scaled)", nargs="+", metavar="FILE"),
    _flag("--per_layer", "also print Galvatron's per-layer plan (not always trainable)", bool),
    _flag("--two_buffered", "also print the plan of PipeDream-2BW's planner", bool),
    _flag("--partition", "also print the stages of PipeDream's partitioner", bool),
    _flag("--top", "number of layouts to list (default 5)", PositiveInt, default=5),
    _flag("--write_config", "write the best layout as a configuration", Path, metavar="FILE"),
)
_TRAIN_TIME = (
    _flag("--tokens", "tokens that the model is trained on", Amount),
    _flag("--achieved_tflops", "measured TFLOP/s of each device, instead of --hardware: 8 T P / (n X)", PositiveFloat),
    _flag("--bounds", "also print the lower bounds of Lamy-Poirier's analysis", bool),
    _flag("--parameters", "number of parameters (default: those of --model)", Amount),
    _flag("--least_efficiency", "with --bounds: minimum share of peak FLOP/s (default 0.5)", Probability, default=0.5),
)
_FILES = _flag("files", "configuration files, one per layout; flags override them", nargs="*")
_DRY_RUN = (
    _flag("file", "configuration file; without it, only flags describe the run", nargs="?"),
    _flag("--write_layout", "file to write, with stages and the strategy of each layer", Path),
)
_PROFILE = (
    _flag("--output", "hardware file to write", Path, required=True),
    _flag("--ranks", "number of processes that run at once (default 2)", Ranks, default=2),
    _flag("--tensor_sizes", "parallel.tensor sizes, such as [1,2]", list[Size], default=[1]),
    _flag("--context_sizes", "parallel.context sizes, such as [1,2]", list[Size], default=[1]),
    _flag("--micro_sizes", "micro-batch sizes, such as [1,2]", list[Size], default=[1, 2, 4]),
)
_LINKS = (
    _HARDWARE,
    _flag("--output", "hardware file to write, including the links", Path, required=True),
    _flag("--megabytes", "size of a message (default 64)", Megabytes, default=64.0),
)
_FIT = (
    _flag("--published", "name of a table of published rows"),
    _flag("--rows", "YAML file of your measured runs (docs/cost_model.md)", metavar="FILE"),
    _HARDWARE,
    _flag("--output", "hardware file to write, including the fitted efficiency", Path),
)

_ONE = "--config FILE --hardware FILE|PRESET --devices N [--group.field VALUE ...]"
"""Usage of commands for one layout."""

COMMANDS: dict[str, Command] = {
    "search": Command(
        "find the best layout of a model on a machine, and print why others are slower",
        "--model FILE --hardware FILE|PRESET --devices N --batch.global_size B [--parallel.tensor 8 ...]",
        (*_MACHINE, *_SEARCH, *_TRAINING, _JSON, *_PICTURES),
    ),
    "predict": Command("predict step time and memory of one layout", _ONE, (*_MACHINE, *_TRAINING, _JSON, *_PICTURES)),
    "explain": Command("predict one layout and print every term with its source", _ONE, (*_MACHINE, _JSON)),
    "compare": Command(
        "predict several layouts side by side",
        "FILE [FILE ...] --hardware FILE|PRESET --devices N [--group.field VALUE ...]",
        (_FILES, *_MACHINE, _JSON),
    ),
    "train-time": Command(
        "estimate how many days it takes to train on a number of tokens",
        "--model FILE --tokens T --devices N --hardware FILE|PRESET | --achieved_tflops X",
        (*_MACHINE, *_TRAIN_TIME, _JSON),
    ),
    "profile": Command(
        "measure this machine and write a hardware file", "--model FILE --output FILE [--ranks N]", (*_PROFILE, _JSON)
    ),
    "links": Command(
        "measure the links between the nodes of a job and write a hardware file",
        "--hardware FILE|PRESET --output FILE, started by torchrun on every node",
        (*_LINKS, _JSON),
    ),
    "fit": Command(
        "fit a machine's efficiency to measured runs, and print the remaining errors",
        "--published NAME | --rows FILE --hardware FILE|PRESET [--output FILE]",
        (*_FIT, _JSON),
    ),
    "dry-run": Command(
        "check the rules, schedule, shapes and memory of a run of any size in one process",
        "[FILE] [--devices N] [--hardware FILE|PRESET] [--group.field VALUE ...]",
        (*_DRY_RUN, *_MACHINE, _JSON),
    ),
}
"""Every subcommand by its name."""


def parse_request(command: str, arguments: Sequence[str]) -> Request:
    """Parse a command line. Raises ConfigError; --help prints the help and exits.

    The run is a BERT with --bert, or if a flag or file sets a field that only BERT runs have, as in `megapipe train`.
    """
    arguments = with_model_folders(arguments)
    known = packaged_files("config")
    # `dry-run` and `compare` have files as positional arguments.
    files = [f"--config={word}" for word in arguments if word in known or os.path.isfile(word)]
    kind = _kind([*arguments, *files])
    parser = _parser(command, kind, documented=asks_for_help(arguments))
    given: Given[PretrainConfig] = parse_given(parser, kind, arguments)
    problems = [
        f"{place} is {number:,.15g}; it must be {rule}"
        for name, more in COMMANDS[command].flags
        if "nargs" not in more  # those are names of files
        for place, number, rule in outside(more.get("type"), given.flags[name.removeprefix("--")], name)
    ]
    if problems:
        raise ConfigError(problems)
    return Request(command, tuple(arguments), kind, given.config, given.fields, given.flags)


def _kind(arguments: Sequence[str]) -> type[PretrainConfig]:
    return BertPretrainConfig if "--bert" in arguments else kind_of(arguments)


def with_name(file: str, problems: Iterable[str]) -> list[str]:
    """Return the problems of a file, each of which names it."""
    return [problem if file in problem else f"{file}: {problem}" for problem in problems]


def _is_hardware(file: str) -> bool:
    try:
        load_hardware(file)
    except ConfigError:
        return False
    return True


def _parser(command: str, kind: type[PretrainConfig], *, documented: bool = False) -> ArgumentParser:
    """Return the parser of a command. documented: include the help of every field."""
    about = COMMANDS[command]
    parser = build_parser(f"{about.summary[0].upper()}{about.summary[1:]}.", kind, documented=documented)
    parser.prog = f"megapipe plan {command}"
    parser.usage = f"megapipe plan {command} {about.usage}"
    parser.add_argument("--bert", action="store_true", help="plan a BERT run, the default if a BERT field is set")
    for name, arguments in about.flags:
        if name == "--published":
            from megapipe.planner.fitting import TABLES  # imports the cost model, which most commands do not need

            arguments = {**arguments, "choices": tuple(TABLES)}
        parser.add_argument(name, **arguments)
    return parser


Handler = Callable[[Request], int | None]
"""Runs a command; returns its exit status, None for 0. Raises ConfigError or ScheduleError for wrong input."""

HANDLERS = {
    "search": ("layouts", "run_search"),
    "predict": ("layouts", "run_predict"),
    "explain": ("layouts", "run_explain"),
    "compare": ("layouts", "run_compare"),
    "train-time": ("train_time", "run_train_time"),
    "fit": ("layouts", "run_fit"),
}
"""Module in this package and function of each command that does not need torch. A module is imported when its command
runs, because commands need different imports."""


def main(arguments: Sequence[str], others: Mapping[str, Handler]) -> int:
    """Run a command line and return its exit status: 0 on success, 2 if the input is wrong.

    others: handlers of the commands that need torch, which this package may not import.
    """
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(overview(), file=sys.stdout if arguments else sys.stderr, flush=True)
            return 0 if arguments else 2
        name = arguments[0].replace("_", "-")
        if name not in COMMANDS:
            raise ConfigError(f"unknown command {arguments[0]!r}{nearest(name, COMMANDS)} (--help lists them)")
        request = parse_request(name, arguments[1:])
        handler = others.get(name)
        if handler is None:
            module, function = HANDLERS[name]
            handler = getattr(import_module(f"megapipe.planner.command.{module}"), function)
        status = handler(request) or 0
        # If output goes to a file, a full disk raises at a flush. The interpreter's flush at exit cannot report it.
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


def overview() -> str:
    """Return the help that is printed if no command is given."""
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: megapipe plan COMMAND [--group.field VALUE ...]\n",
            "Find which layout of a model fits a machine, how fast it is, and why.\n",
            *(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()),
            "\n`megapipe plan COMMAND --help` lists the flags of a command and the "
            "common fields of a training configuration, `--help-all` every field.",
        ]
    )


def _refused(problems: Sequence[str]) -> int:
    for problem in problems:
        print(f"error: {' '.join(problem.split())}", file=sys.stderr)
    return 2
