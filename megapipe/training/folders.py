"""Create, lock and test the folders that a run writes to, before it starts."""

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megapipe.checkpoint.lock import DirectoryLock, word_in
from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.parallel.launch import LaunchEnvironment
from megapipe.parallel.rendezvous import Start

PATIENCE_SECONDS = 30.0
"""Time that another host may need to see a file that rank 0 has written, because network file systems cache names."""


@contextmanager
def locked_folder(
    config: PretrainConfig, environment: LaunchEnvironment, start: Start | None
) -> Iterator[DirectoryLock | None]:
    """Hold training.directory for this run, before any file in it is touched. All ranks call this.

    Rank 0 locks the folder, and every other rank checks that it finds this lock. Yields the lock on rank 0, else None.

    Raises:
        CheckpointError: another job uses the folder, or it cannot be written.
        ConfigError: this rank reaches another folder than rank 0 does.
    """
    directory = Path(config.training.directory)
    lock = DirectoryLock(directory) if environment.rank == 0 else None
    try:
        if start is not None:
            host = os.uname().nodename
            mine = "" if lock is None else json.dumps([lock.word, host, str(directory.absolute())])
            word, first_host, theirs = json.loads(start.exchange(mine, lambda all_words: all_words[0]))
            deadline = time.monotonic() + (0.0 if host == first_host else PATIENCE_SECONDS)
            while word_in(directory) != word:
                if time.monotonic() >= deadline:
                    raise ConfigError(
                        f"training.directory {directory} is not the folder {theirs} of rank 0 on {first_host}; give "
                        "all ranks the same folder, which all hosts must see"
                    )
                time.sleep(0.2)
        yield lock
    finally:
        if lock is not None:
            lock.release()


def make_folders(config: PretrainConfig, environment: LaunchEnvironment) -> None:
    """Create the folders that this rank writes to, and test that they can be written: profile.trace on the first rank
    of every host, training.directory on rank 0.

    Raises:
        ConfigError: one of them cannot be created or written to.
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
            problems.append(f"{name} {value} cannot be written: {error.strerror}; name a folder that you can write to")
    if problems:
        raise ConfigError(problems)
