"""Lowering: from compute actions in order to everything that a step does.

A chain of pure passes over one table of all ranks: cut chunks into units where reductions want it, add sends and
receives, add what runs again, add reductions, updates and what moves to host memory, give receives their slots.
"""

from megapipe.schedules.lowering.lower import lower
from megapipe.schedules.lowering.recompute import Spans

__all__ = ["Spans", "lower"]
