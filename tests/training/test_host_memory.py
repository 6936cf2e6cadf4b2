"""Freed host memory: page faults of a process that allocates the same blocks again and again."""

import subprocess
import sys

import pytest

from megapipe.training.host_memory import CHOSEN_BY_USER, keep_freed_memory

ROUNDS = 20
PAGES = 4 * 8192
"""Of the blocks of one round: four of 32 MiB."""

PROGRAM = f"""
import resource, torch
from megapipe.training.host_memory import keep_freed_memory
keep = KEEP
assert not keep or keep_freed_memory({{}})

def round_():
    blocks = [torch.empty(2**23).fill_(1.0) for _ in range(4)]

for _ in range({ROUNDS}):
    round_()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({ROUNDS}):
    round_()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep: bool) -> int:
    """Page faults of all rounds."""
    program = PROGRAM.replace("KEEP", str(keep))
    return int(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout)


def test_blocks_that_are_wanted_again_are_there() -> None:
    assert faults(keep=True) < PAGES


def test_without_it_their_pages_are_cleared_in_every_round() -> None:
    assert faults(keep=False) > 5 * PAGES


@pytest.mark.parametrize("name", CHOSEN_BY_USER)
def test_what_the_user_has_chosen_stays(name: str) -> None:
    assert not keep_freed_memory({name: "1"})
