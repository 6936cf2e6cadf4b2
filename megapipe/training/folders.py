"""The folders that a run writes into: made, and tried, before it starts."""

import tempfile
from pathlib import Path

from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.parallel.launch import LaunchEnvironment


def make_folders(config: PretrainConfig, environment: LaunchEnvironment) -> None:
    """Make training.directory (on rank 0) and profile.trace (on every host).

    Raises:
        ConfigError: one of them cannot be made, or takes no file.
    """
    wanted = {}
    if environment.rank == 0:
        wanted["training.directory"] = config.training.directory
    if environment.local_rank == 0 and config.profile.trace is not None:
        wanted["profile.trace"] = config.profile.trace
    problems = []
    for name, value in wanted.items():
        try:
            Path(value).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=value).close()
        except OSError as error:
            problems.append(f"{name} {value} cannot be written: {error.strerror}; give a folder that takes files")
    if problems:
        raise ConfigError(problems)
