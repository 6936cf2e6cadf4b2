"""The flags of ``megapipe plan``: those of a training configuration, and each command's own."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from jsonargparse import ArgumentParser

from megapipe.config.bert import BertPretrainConfig
from megapipe.config.errors import ConfigError
from megapipe.config.kinds import kind_of
from megapipe.config.load import Given, build_parser, parse_given
from megapipe.config.packaged_files import packaged_files
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.hardware.reader import PRESETS, load_hardware
from megapipe.planner.search.findings import Objective
from megapipe.planner.search.space import SearchSpace

MOST_DEVICES = 1_000_000
"""Maximum number of ranks of a plan, above any real machine; the time grows with the number of nodes."""
MEMORY_RESERVE = 0.05
"""Fraction of a device's memory that plans keep free by default; 4 GB of 80 GB, for a CUDA context (0.5 GB), NCCL's
buffers (1 to 2 GB) and fragmentation."""
NO_DATA = "DATA"
"""Placeholder for the data.prefix of a configuration that is written without one."""


DOCUMENTED = frozenset({"-h", "--help", "--help-all", "--help_all"})
"""Arguments whose output includes the help of fields."""


@dataclass(frozen=True)
class Request:
    """One command as it was asked for.

    arguments: as written, without the command's name. config: every field. given: fields that were written. flags:
    the command's own, by name.
    """

    command: str
    arguments: tuple[str, ...]
    kind: type[PretrainConfig]
    config: PretrainConfig
    given: frozenset[str]
    flags: Mapping[str, Any]

    def hardware(self) -> Hardware:
        """The machine that --hardware names, less --memory_reserve. ConfigError without one."""
        if self.flags["hardware"] is None:
            raise ConfigError(f"--hardware is missing; set it to a file or to one of {', '.join(PRESETS)}")
        hardware, reserve = load_hardware(self.flags["hardware"]), self.flags.get("memory_reserve")
        return (
            hardware.with_share(1 - self.default_reserve())
            if reserve is None
            else hardware.with_reserve(reserve * 1e9)
        )

    def default_reserve(self) -> float:
        """Return the fraction of each device's memory to keep free if no flag sets it.

        It is 0 with recompute.method auto, which has its own budget, and for commands that measure.
        """
        given = self.flags.get("memory_reserve") is not None or "memory_reserve" not in self.flags
        return 0.0 if given or self.config.recompute.method == "auto" else MEMORY_RESERVE

    def devices(self) -> int:
        """Ranks: --devices, or what the sizes of the layout make; both must agree where both are given."""
        parallel, devices = self.config.parallel, self.flags["devices"]
        if devices is None:
            if parallel.data is None:
                raise ConfigError("--devices is missing; set it, or set parallel.data and the other sizes")
            return parallel.data * parallel.pipeline * parallel.context * parallel.tensor
        if devices < 1:
            raise ConfigError(f"--devices is {devices}; it must be at least 1")
        if devices > MOST_DEVICES:
            raise ConfigError(f"--devices is {devices:,}; it must be at most {MOST_DEVICES:,}")
        return int(devices)

    def for_file(self, file: str) -> "Request":
        """The same command about the configuration of a file, on top of which the flags are laid."""
        given = parse_given(_parser(self.command, self.kind), self.kind, ["--config", file, *self.arguments])
        return replace(self, config=given.config, given=given.fields)


@dataclass(frozen=True)
class Command:
    """A sub-command. summary: of one line. usage: behind its name. flags: that add its own to a parser."""

    summary: str
    usage: str
    flags: tuple[Callable[[ArgumentParser], None], ...]


def _machine(parser: ArgumentParser) -> None:
    parser.add_argument("--hardware", type=str, help=f"file, or one of {', '.join(PRESETS)}")
    parser.add_argument(
        "--devices", type=int, help=("total number of ranks (default: the product of the sizes of the layout)")
    )
    parser.add_argument(
        "--memory_reserve", type=float, metavar="GB",
        help=(f"memory of every device to keep free for CUDA, NCCL and fragmentation (default {MEMORY_RESERVE:.0%} of "
            "it)"),
    )  # fmt: skip


def _training(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--tokens",
        type=float,
        help=("tokens to train on, such as 300e9; adds the number of steps, the days and the price"),
    )
    parser.add_argument(
        "--price_per_hour",
        type=float,
        help=("price of one node for an hour, in any currency (default: that of the hardware file)"),
    )


def _json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def _pictures(parser: ArgumentParser) -> None:
    parser.add_argument("--html", type=Path, metavar="FILE", help="a report with pictures, in one file")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="the report's pictures, as SVG files")


def _failures(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--mean_time_between_failures", type=float, metavar="HOURS",
        help="mean time between failures of the whole job; with --save_seconds, adds how often to save",
    )  # fmt: skip
    parser.add_argument(
        "--save_seconds", type=float, help="seconds that a save adds to the training time (docs/checkpoints.md)"
    )


def _search(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--objective", choices=get_args(Objective), default="speed",
        help=("speed: most tokens/s. cost: lowest price per token, on --devices or fewer. time: shortest time for "
            "--tokens, on --devices or fewer. size: largest model that fits (default speed)"),
    )  # fmt: skip
    parser.add_argument(
        "--schedules",
        type=str,
        help=(
            "names to try with every division of ranks, separated by commas "
            f"(default {','.join(SearchSpace.schedules)}, and "
            "other schedules with the most promising divisions)"
        ),
    )
    parser.add_argument(
        "--models",
        type=str,
        nargs="+",
        metavar="FILE",
        help=("with --objective size: model files to try (default: --model, scaled)"),
    )
    parser.add_argument(
        "--per_layer",
        action="store_true",
        help=("also print the per-layer plan of Galvatron, which megapipe cannot train"),
    )
    parser.add_argument("--two_buffered", action="store_true", help="also print the plan of PipeDream-2BW's planner")
    parser.add_argument("--top", type=int, default=5, help="number of layouts to list (default 5)")
    parser.add_argument(
        "--write_config", type=Path, metavar="FILE", help="write the best layout as a configuration to train"
    )


def _train_time(parser: ArgumentParser) -> None:
    parser.add_argument("--tokens", type=float, help="tokens that the model is trained on")
    parser.add_argument(
        "--achieved_tflops", type=float, help="TFLOP/s that each device reaches, instead of --hardware: 8 T P / (n X)"
    )
    parser.add_argument("--bounds", action="store_true", help="also print the lower bounds of Lamy-Poirier's analysis")
    parser.add_argument(
        "--parameters", type=float, help=("number of parameters of the model (default: those of --model)")
    )
    parser.add_argument(
        "--least_efficiency",
        type=float,
        default=0.5,
        help=("with --bounds: lowest fraction of the peak FLOP/s (default 0.5)"),
    )


def _files(parser: ArgumentParser) -> None:
    parser.add_argument(
        "files", type=str, nargs="+", help=("configuration files, one per layout; flags override fields of each")
    )


def _file(parser: ArgumentParser) -> None:
    parser.add_argument("file", type=str, help="configuration")


def _profile(parser: ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, required=True, help="hardware file to write")
    parser.add_argument(
        "--ranks", type=int, default=2, help=("number of processes that run at the same time (default 2)")
    )
    parser.add_argument(
        "--tensor_sizes", type=list[int], default=[1], help=("sizes of parallel.tensor to measure, as in [1,2]")
    )
    parser.add_argument(
        "--context_sizes", type=list[int], default=[1], help=("sizes of parallel.context to measure, as in [1,2]")
    )
    parser.add_argument(
        "--micro_sizes", type=list[int], default=[1, 2, 4], help=("micro-batch sizes to measure, as in [1,2]")
    )


def _links(parser: ArgumentParser) -> None:
    parser.add_argument("--hardware", type=str, help=f"file that describes a node, or one of {', '.join(PRESETS)}")
    parser.add_argument("--output", type=Path, required=True, help="hardware file to write, including the links")
    parser.add_argument("--megabytes", type=float, default=64.0, help="size of a message (default 64)")


def _fit(parser: ArgumentParser) -> None:
    from megapipe.planner.fitting.published import TABLES  # imports the cost model, which other commands may not need

    parser.add_argument("--published", choices=tuple(TABLES), help="a table of published rows")
    parser.add_argument("--rows", type=str, metavar="FILE", help="YAML of your own measured runs (docs/cost_model.md)")
    parser.add_argument(
        "--hardware", type=str, help=("with --rows: file or preset of the machine on which the runs were measured")
    )
    parser.add_argument("--output", type=Path, help="hardware file to write, including the fitted efficiency")


COMMANDS: dict[str, Command] = {
    "search": Command(
        "find the best layout of a model on a machine, and print why others are slower",
        "--model FILE --hardware FILE|PRESET --devices N --batch.global_size B [--parallel.tensor 8 ...]",
        (_machine, _search, _training, _failures, _json, _pictures),
    ),
    "predict": Command(
        "predict step time and memory of one layout",
        "--config FILE --hardware FILE|PRESET --devices N [--group.field VALUE ...]",
        (_machine, _training, _failures, _json, _pictures),
    ),
    "explain": Command(
        "predict one layout and print every term with its source",
        "--config FILE --hardware FILE|PRESET --devices N [--group.field VALUE ...]",
        (_machine, _json),
    ),
    "compare": Command(
        "predict several layouts side by side",
        "FILE [FILE ...] --hardware FILE|PRESET --devices N [--group.field VALUE ...]",
        (_files, _machine, _json),
    ),
    "train-time": Command(
        "estimate the days that training on a number of tokens takes",
        "--model FILE --tokens T --devices N --hardware FILE|PRESET | --achieved_tflops X",
        (_machine, _train_time, _json),
    ),
    "profile": Command(
        "measure this machine and write a hardware file",
        "--model FILE --output FILE [--ranks N]",
        (_profile, _json),
    ),
    "links": Command(
        "measure the links between the nodes of a job and write a hardware file",
        "--hardware FILE|PRESET --output FILE, started by torchrun on every node",
        (_links, _json),
    ),
    "fit": Command(
        "fit a machine's efficiency to measured runs, and print the remaining errors",
        "--published NAME | --rows FILE --hardware FILE|PRESET [--output FILE]",
        (_fit, _json),
    ),
    "dry-run": Command(
        "check the rules, schedule, shapes and memory of a run of any size in one process",
        "FILE [--devices N] [--hardware FILE|PRESET] [--group.field VALUE ...]",
        (_file, _machine, _json),
    ),
}
"""Every sub-command by its name."""


def parse_request(command: str, arguments: Sequence[str]) -> Request:
    """Read a command line. Raises ConfigError; --help prints and exits.

    It is of a BERT with --bert, or if a flag or a file sets a field that only BERT runs have, as in `megapipe train`.
    """
    kind = BertPretrainConfig if "--bert" in arguments else kind_of([*arguments, *_positional_files(arguments)])
    parser = _parser(command, kind, documented=not DOCUMENTED.isdisjoint(arguments))
    given: Given[PretrainConfig] = parse_given(parser, kind, arguments)
    return Request(command, tuple(arguments), kind, given.config, given.fields, given.flags)


def _positional_files(arguments: Sequence[str]) -> list[str]:
    """Return flags that read the files among the words of a command line, such as those of `dry-run` and `compare`."""
    packaged = packaged_files("config")
    return [f"--config={word}" for word in arguments if word in packaged or os.path.isfile(word)]


def _parser(command: str, kind: type[PretrainConfig], *, documented: bool = False) -> ArgumentParser:
    """documented: with every field's help, which takes a while to find."""
    about = COMMANDS[command]
    parser = build_parser(f"{about.summary[0].upper()}{about.summary[1:]}.", kind, documented=documented)
    parser.prog = f"megapipe plan {command}"
    parser.usage = f"megapipe plan {command} {about.usage}"
    parser.add_argument(
        "--bert", action="store_true", help="plan a BERT run; this is the default if a BERT field is set"
    )
    for add in about.flags:
        add(parser)
    return parser
