"""Which pipeline rank holds which stage, and the order in which a micro-batch visits them."""

from typing import NamedTuple

from megapipe.schedules.schedule import StagePlace


class Placement(NamedTuple):
    """Stages in the order of their ids, and the routes over them."""

    stages: tuple[StagePlace, ...]
    routes: tuple[tuple[int, ...], ...]


def linear(num_ranks: int) -> Placement:
    """One stage a rank: stage s on rank s."""
    return _single_route(range(num_ranks))


def _single_route(ranks: range) -> Placement:
    stages = tuple(StagePlace(part, 0, rank) for part, rank in enumerate(ranks))
    return Placement(stages, (tuple(range(len(stages))),))
