"""How many micro-batches a pipeline rank holds at the least at its fullest, chunk by chunk."""

import numpy as np
import numpy.typing as npt

from megapipe.config.schedule import ScheduleConfig
from megapipe.planner.search.layouts import Shape
from megapipe.schedules.generators.looped import default_group_size

Floats = npt.NDArray[np.float64]

WARMS_UP = {"1f1b", "2bw", "pipedream", "zb_h1", "zb_h2"}
"""Schedules whose rank r runs p - r forwards ahead of its first backward."""
COLLECTS = {"gpipe", "modular"}
"""Schedules that run all forwards ahead of their backwards."""


def held_at_least(schedule: ScheduleConfig, shape: Shape, chunks: int, count: int) -> Floats:
    """Micro-batches of each chunk, shape [pipeline, chunks], at one moment of each rank.

    schedule: what the layout leaves as it is. count: micro-batches of a step. 0 where no formula tells the order of a
    schedule.
    """
    pipeline = shape.pipeline
    ahead = pipeline - np.arange(pipeline)
    if schedule.two_bp and shape.schedule in COLLECTS:
        return np.zeros((pipeline, chunks))
    if shape.schedule in COLLECTS:
        return np.full((pipeline, chunks), float(count))
    if shape.schedule in WARMS_UP:
        return np.minimum(ahead, count).astype(np.float64)[:, None]
    if shape.schedule == "interleaved_1f1b":
        return _interleaved(pipeline, chunks, count, schedule.group_size)
    return np.zeros((pipeline, chunks))


def _interleaved(pipeline: int, chunks: int, count: int, group_size: int | None) -> Floats:
    """Groups of micro-batches pass all chunks one after the other, (v - 1) g + 2 (p - 1 - r) forwards and the one
    behind them ahead of the first backward (`schedules.generators.looped`)."""
    group = min(default_group_size(pipeline, count, chunks) if group_size is None else group_size, count)
    ranks = np.arange(pipeline)[:, None]
    forwards = (chunks - 1) * group + np.minimum(2 * (pipeline - 1 - ranks), 2 * group) + 1
    before = np.arange(chunks)[None] * group
    first = np.maximum(np.minimum(forwards - before, group), 0)
    # A last group that is smaller leaves its places empty.
    second = np.maximum(np.minimum(forwards - chunks * group - before, min(group, count - group)), 0)
    return (first + second).astype(np.float64)
