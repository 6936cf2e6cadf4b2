"""What the tools that run a trained model share: their errors in one line each, and their exit status."""

import sys
from collections.abc import Callable

from megapipe.config.errors import ConfigError
from megapipe.data.errors import DataError


def status_of(run: Callable[[], None]) -> int:
    """Run a tool. Exit status: 0, 2 for unusable input, 130 for Ctrl-C."""
    # Importing torch takes a second, which --help and a misspelt flag need not wait for.
    from megapipe.checkpoint.errors import CheckpointError
    from megapipe.parallel.errors import LaunchError
    from megapipe.training.generation_request import PromptError

    try:
        run()
    except (CheckpointError, ConfigError, DataError, LaunchError, PromptError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
