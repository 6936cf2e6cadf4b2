"""Which pipeline rank holds which stage, and the order in which a micro-batch visits them."""

from collections.abc import Iterable
from typing import NamedTuple

from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.schedule import StagePlace


class StagePlacement(NamedTuple):
    """Stages in the order of their ids, and the routes over them."""

    stages: tuple[StagePlace, ...]
    routes: tuple[tuple[int, ...], ...]


def linear(num_ranks: int, chunks: int) -> StagePlacement:
    """One stage a rank: stage s on rank s."""
    _require_chunks("linear", chunks, 1)
    return _single_route(range(num_ranks))


def round_robin(num_ranks: int, chunks: int) -> StagePlacement:
    """``chunks`` stages a rank: stage s on rank ``s % num_ranks``."""
    return _single_route(stage % num_ranks for stage in range(num_ranks * chunks))


def v_shape(num_ranks: int, chunks: int) -> StagePlacement:
    """Two stages a rank, down the ranks and back up: rank r holds stages r and ``2 * num_ranks - 1 - r``."""
    _require_chunks("v_shape", chunks, 2)
    return _single_route([*range(num_ranks), *reversed(range(num_ranks))])


def _require_chunks(name: str, chunks: int, wanted: int) -> None:
    if chunks != wanted:
        raise ScheduleError(f"placement {name} puts {wanted} chunk{'s' * (wanted > 1)} on each rank, not {chunks}")


def _single_route(ranks: Iterable[int]) -> StagePlacement:
    stages = tuple(StagePlace(part, 0, rank) for part, rank in enumerate(ranks))
    return StagePlacement(stages, (tuple(range(len(stages))),))
