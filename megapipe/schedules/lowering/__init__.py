"""Lowering adds to ordered compute actions everything else that a step does.

A chain of pure passes over one table of all ranks: cut chunks into units where reductions need it, add sends and
receives, add recomputation, add reductions, updates and copies to host memory, give receives their slots.
"""

from megapipe.schedules.lowering.insertion import Spans
from megapipe.schedules.lowering.lower import lower

__all__ = ["Spans", "lower"]
