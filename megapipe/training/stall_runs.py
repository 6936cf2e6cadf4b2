"""Three runs over the same steps: batches at hand, files in memory, files on storage. Their differences are stalls."""

import itertools
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from megapipe.training.loader import Loader, StepBatch
from megapipe.training.stall_rates import Measurement, StepTime

Item = TypeVar("Item")
Clock = Callable[[], float]

READ_AHEAD = 4
"""Steps behind the last one that a prefetching loader may begin, at most."""


def measure(
    open_loader: Callable[[], Loader],
    train: Callable[[StepBatch], object],
    make_cold: Callable[[], bool],
    *,
    num_steps: int,
    warm_up: int,
    clock: Clock = time.perf_counter,
) -> Measurement:
    """Measures a run's first steps. Each run opens its files anew, since mapped files cannot be made cold.

    train: trains on a batch and returns when that is done. make_cold: leaves nothing of the files in memory, or
    answers False. warm_up: steps of each run that are not counted.
    """

    def training() -> StepTime:
        with open_loader().steps(0) as batches:
            return seconds_a_step(batches, train, num_steps, warm_up, clock)

    def loading(more: int = 0) -> StepTime:
        return seconds_a_step(open_loader().each(0), _ignore, num_steps + more, warm_up, clock)

    def cold(run: Callable[[], StepTime]) -> StepTime | None:
        return run() if make_cold() else None

    loading_cold, training_cold = cold(loading), cold(training)
    loading(READ_AHEAD)  # brings what the steps read into memory
    loading_cached, training_cached = loading(), training()
    batch = open_loader().load(0)
    resident = seconds_a_step(itertools.repeat(batch), train, num_steps, warm_up, clock)
    return Measurement(resident, training_cached, training_cold, loading_cached, loading_cold)


def seconds_a_step(
    batches: Iterable[Item], train: Callable[[Item], object], num_steps: int, warm_up: int, clock: Clock
) -> StepTime:
    """Time the steps behind the first `warm_up` ones."""
    steps = iter(batches)
    for batch in itertools.islice(steps, warm_up):
        train(batch)
    start, waited = clock(), 0.0
    for _ in range(num_steps):
        begin = clock()
        batch = next(steps)
        waited += clock() - begin
        train(batch)
    return StepTime((clock() - start) / num_steps, waited / num_steps)


def _ignore(batch: object) -> None:
    """Trains on nothing."""
