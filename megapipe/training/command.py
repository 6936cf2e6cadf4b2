"""What the pretraining programs share: parse, check, train, and tell of a wrong input in one line a problem."""

import os

from megapipe.config.load import parse_or_exit
from megapipe.config.run import PretrainConfig
from megapipe.training.launcher_death import end_with_launcher
from megapipe.training.signals import before_training, behind_training


def run_program(kind: type[PretrainConfig], description: str, hint: str) -> int:
    """Train what the command line configures; the exit status, one of `ExitCode`.

    kind: of configuration. hint: printed where there are no arguments.
    """
    before_training()
    config = parse_or_exit(kind, description, hint)

    end_with_launcher()

    # Importing torch takes a second, which --help and a misspelt key need not wait for.
    from megapipe.parallel.launch import LaunchEnvironment
    from megapipe.training.failures import status_of
    from megapipe.training.pretrain import pretrain

    try:
        status = pretrain(config, LaunchEnvironment.read(os.environ))
    except Exception as error:
        failure = status_of(error)
        if failure is None:
            raise
        status = failure
    behind_training()
    return status
