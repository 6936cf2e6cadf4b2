"""What the pretraining programs share: parse, check, train, and tell of a wrong input in one line a problem."""

import os
import sys
import time

from megapipe.config.errors import ConfigError
from megapipe.config.load import parse_or_exit
from megapipe.config.run import PretrainConfig


def run_program(kind: type[PretrainConfig], description: str, hint: str) -> int:
    """Train what the command line configures; the exit status: 2 for a wrong input, 1 for too little memory or
    gradients out of range.

    kind: of configuration. hint: printed where there are no arguments.
    """
    config = parse_or_exit(kind, description, hint)

    # Importing torch takes a second, which --help and a misspelt key need not wait for.
    from megapipe.checkpoint.errors import CheckpointError
    from megapipe.data.errors import DataError
    from megapipe.optim.loss_scale import LossScaleError
    from megapipe.parallel.errors import LaunchError
    from megapipe.parallel.launch import LaunchEnvironment
    from megapipe.training.memory_report import OutOfMemory
    from megapipe.training.pretrain import pretrain

    try:
        return pretrain(config, LaunchEnvironment.read(os.environ))
    except (ConfigError, DataError, LaunchError, CheckpointError) as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # The ranks of a host make the same mistake: one tells of it, before torchrun ends it for another's exit.
            time.sleep(3)
            return 2
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    except LossScaleError as error:
        if os.environ.get("RANK", "0") == "0":  # all ranks end alike
            print(f"error: {error}", file=sys.stderr)
        return 1
    except OutOfMemory as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
