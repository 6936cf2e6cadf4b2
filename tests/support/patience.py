"""Waiting for what happens rather than for a time, and measuring again what a busy machine has spoilt."""

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

LIMIT_SECONDS = 60.0
TRIES = 5


def wait_until(condition: Callable[[], object], seconds: float = LIMIT_SECONDS) -> None:
    """Return once the condition holds. Fails where it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {condition}"
        time.sleep(0.01)


def undisturbed(measure: Callable[[], Found], fits: Callable[[Found], bool]) -> Found:
    """Measure, and measure again if the result does not fit: a pause of the machine spoils one measurement, and not
    all of `TRIES`. The last one is returned as it is, for the caller to judge."""
    for _ in range(TRIES - 1):
        result = measure()
        if fits(result):
            return result
    return measure()
