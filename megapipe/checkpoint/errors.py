"""Errors of checkpoints, and functions in which all ranks succeed or all ranks raise the same error."""

import os
from collections.abc import Callable
from typing import TypeVar

from megapipe.parallel.groups import Group


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, read or used. The message names the file or tensor, and how to fix the
    problem."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose bytes differ from those that were saved. Its folder is renamed; an older one may be intact.

    reason: one word for the new folder name, such as `checksum`.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type["DamagedCheckpointError"], tuple[str, str]]:
        return DamagedCheckpointError, (str(self), self.reason)


T = TypeVar("T")


def gathered(world: Group, work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank and return, on every rank, the values of all ranks in rank order.

    Raises CheckpointError, the same on every rank, if `work` failed on any rank. It is a DamagedCheckpointError if
    the lowest failing rank raised one.
    """
    failure: CheckpointError | None = None
    cause: Exception | None = None
    value: T | None = None
    try:
        value = work()
    except Exception as error:  # if one rank raised its error here, the other ranks would wait for it
        failure, cause = as_all_ranks_raise_it(error, world), error
    outcomes: list[tuple[CheckpointError | None, T]] = world.all_gather_object((failure, value))
    for failed, _ in outcomes:
        if failed is not None:
            raise failed from cause
    return [value for _, value in outcomes]


def agreed(world: Group, work: Callable[[], T]) -> T:
    """Run `work` on every rank and return this rank's value after all ranks succeeded. See `gathered` for errors."""
    mine: list[T] = []
    gathered(world, lambda: mine.append(work()))
    return mine[0]


def on_first_rank(world: Group, work: Callable[[], T]) -> T:
    """Run `work` only on rank 0 and return its value, which must be small, on all ranks. See `gathered` for errors."""
    values: list[list[T]] = gathered(world, lambda: [work()] if world.rank == 0 else [])
    return values[0][0]


def as_all_ranks_raise_it(error: BaseException, world: Group) -> CheckpointError:
    """Return this rank's error in the form that every rank raises: with the rank and its host if there are several
    ranks."""
    message = str(error) if world.size == 1 else f"{error} (rank {world.rank}, on {os.uname().nodename})"
    if isinstance(error, DamagedCheckpointError):
        return DamagedCheckpointError(message, error.reason)
    if isinstance(error, CheckpointError):
        return CheckpointError(message)
    return CheckpointError(f"{type(error).__name__}: {message}")
