"""kill -9 while a save is written beside training, at any operation of the disk or any moment: as in a save between
steps the newest checkpoint is whole, and the run goes on as if nothing had been.
"""

from functools import partial
from pathlib import Path

import pytest

from megapipe.training import saving
from tests.faults.kill_loop import DeadlyDisk, survives


def save_on(disk: DeadlyDisk) -> None:
    saving.BackgroundSaver = partial(saving.BackgroundSaver, storage=disk)  # type: ignore[misc]


@pytest.mark.slow
def test_killed_at_ten_random_moments(tmp_path: Path) -> None:
    survives(tmp_path, kills=10, seed=2, asynchronous=True, save_on=save_on)
