"""What the pretraining programs share: parse, plan, check, train, and tell of a wrong input in one line a problem."""

import os

from megapipe.config.load import Given, build_parser, parse_given_or_exit
from megapipe.config.run import PretrainConfig
from megapipe.training.launcher_death import end_with_launcher
from megapipe.training.output import print_line
from megapipe.training.signals import before_training, behind_training

PLAN_HELP = (
    "auto, or a hardware file or preset: take the fastest layout that fits, by prediction, for the ranks of this "
    "start; fields that are given stay as they are"
)


def run_program(kind: type[PretrainConfig], description: str, hint: str) -> int:
    """Train what the command line configures; the exit status, one of `ExitCode`.

    kind: of configuration. hint: printed where there are no arguments.
    """
    before_training()
    parser = build_parser(description, kind)
    parser.usage = "%(prog)s --config FILE [--plan auto|FILE|PRESET] [--group.field VALUE ...]"
    parser.add_argument("--plan", type=str, help=PLAN_HELP)
    given: Given[PretrainConfig] = parse_given_or_exit(parser, kind, hint)

    end_with_launcher()

    # Importing torch takes a second, which --help and a misspelt key need not wait for.
    from megapipe.parallel.launch import LaunchEnvironment
    from megapipe.training.failures import status_of
    from megapipe.training.planning import planned
    from megapipe.training.pretrain import pretrain

    try:
        environment, config = LaunchEnvironment.read(os.environ), given.config
        if given.flags["plan"] is not None:
            config, told = planned(given, given.flags["plan"], os.environ, environment.world_size)
            if environment.rank == 0:
                print_line(told)
        status = pretrain(config, environment)
    except Exception as error:
        failure = status_of(error)
        if failure is None:
            raise
        status = failure
    behind_training()
    return status
