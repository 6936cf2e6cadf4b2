"""A rank of `megapipe train`: parse, plan, check, train, and report each wrong input in one line."""

import os
import sys
import threading
from collections.abc import Sequence

from jsonargparse import ArgumentParser

from megapipe.config.bert import BertPretrainConfig
from megapipe.config.errors import ConfigError
from megapipe.config.load import Given, build_parser, parse_given
from megapipe.config.parallel import ParallelConfig
from megapipe.config.run import PretrainConfig
from megapipe.training.exit_codes import ExitCode
from megapipe.training.launcher_death import end_with_launcher
from megapipe.training.output import print_line
from megapipe.training.signals import after_training, before_training

PLAN_HELP = (
    "auto, a hardware file, or a preset: use the layout that is predicted to be the fastest of those that fit on "
    "the ranks of this start; fields that are given do not change"
)


def run_parser(kind: type[PretrainConfig]) -> ArgumentParser:
    """Return the parser of `megapipe train` for a kind of configuration."""
    name = "BERT" if issubclass(kind, BertPretrainConfig) else "GPT"
    parser = build_parser(f"Pretrain a {name}.", kind)
    parser.prog = "megapipe train"
    parser.usage = "%(prog)s [-n RANKS] --config FILE [--plan auto|FILE|PRESET] [--group.field VALUE ...]"
    parser.add_argument("--plan", type=str, help=PLAN_HELP)
    return parser


def run_program(kind: type[PretrainConfig], arguments: Sequence[str], parser: ArgumentParser | None = None) -> int:
    """Train as a command line configures, and return the exit status, one of `ExitCode`.

    kind: type of the configuration. parser: `run_parser(kind)`, to which flags may have been added for `--help`.
    """
    before_training()
    parser = parser or run_parser(kind)
    parsed: Given[PretrainConfig] | ConfigError
    try:
        parsed = parse_given(parser, kind, arguments)
    except ConfigError as error:
        if "WORLD_SIZE" not in os.environ:
            for problem in error.problems:
                print(f"error: {problem}", file=sys.stderr)
            return ExitCode.WRONG_INPUT
        parsed = error  # the other ranks wait for this one, and end with the same error

    end_with_launcher()

    # Importing torch takes a second, which --help and a misspelt key need not wait for.
    from megapipe.calibration.planning import planned
    from megapipe.calibration.recompute_choice import with_recompute
    from megapipe.parallel.launch import LaunchEnvironment
    from megapipe.training.failures import status_of
    from megapipe.training.listeners import any_abandoned
    from megapipe.training.pretrain import pretrain

    start, failure = None, None
    try:
        environment = LaunchEnvironment.read(os.environ)
        start = environment.meet(_start_timeout(parsed))
        if start is not None:
            start.wait_for_all()
        if isinstance(parsed, ConfigError):
            raise parsed
        config = parsed.config
        if parsed.flags["plan"] is not None:
            config, plan_line = planned(parsed, parsed.flags["plan"], os.environ, environment.world_size)
            if environment.rank == 0:
                print_line(plan_line)
        status = pretrain(config, environment, start, with_recompute)
    except Exception as error:
        failure = error  # kept, because its frames hold process groups
        status = status_of(error, start)
    after_training()
    # Weights & Biases' exit handler would wait for the server for another minute or more. Process groups that are
    # freed wait for operations with peers that may be gone, for as long as a collective may take.
    lost = failure is not None and start is not None and status != ExitCode.WRONG_INPUT
    if any_abandoned() or lost:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _start_timeout(parsed: Given[PretrainConfig] | ConfigError) -> float:
    """Return the seconds to wait for other ranks: the default if the configuration, which is not checked yet, has no
    usable number."""
    default = ParallelConfig().timeout_seconds
    given = default if isinstance(parsed, ConfigError) else parsed.config.parallel.timeout_seconds
    return given if 0 < given < threading.TIMEOUT_MAX else default
