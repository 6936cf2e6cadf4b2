"""Freed host memory: page faults of a process that allocates the same blocks again and again."""

import subprocess
import sys

import pytest

from megapipe.training.device import CHOSEN_BY_USER, keep_freed_memory

ROUNDS = 3
PAGES = 4 * 8192
"""Pages of the blocks of one round: four of 32 MiB."""

PROGRAM = f"""
import resource, torch
from megapipe.training.device import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({ROUNDS}):
        blocks = [torch.empty(2**23).fill_(1.0) for _ in range(4)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
assert keep_freed_memory({{}})
faults()
print(faults())
"""


def test_freed_pages_are_cleared_again_unless_they_are_kept() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    freed, kept = map(int, done.stdout.split())
    assert kept < PAGES
    assert freed > 2 * PAGES


@pytest.mark.parametrize("name", CHOSEN_BY_USER)
def test_what_the_user_has_chosen_stays(name: str) -> None:
    assert not keep_freed_memory({name: "1"})
