"""Pipeline schedules as data: generate, lower, validate, simulate, read and write, without torch or triton."""

from megapipe.schedules.actions import COLUMNS, Action, Kind, Rows
from megapipe.schedules.build import build, check_microbatches, order
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.generators.registry import GENERATORS, Options
from megapipe.schedules.generators.weight_halves import Times
from megapipe.schedules.lowering import lower
from megapipe.schedules.offload import Offload
from megapipe.schedules.schedule import Header, Schedule, Sections, StagePlace
from megapipe.schedules.simulation import Costs, Link, Simulation, rank_costs, simulate
from megapipe.schedules.text import dumps, loads
from megapipe.schedules.validation import Report, validate

__all__ = [
    "COLUMNS",
    "GENERATORS",
    "Action",
    "Costs",
    "Header",
    "Kind",
    "Link",
    "Offload",
    "Options",
    "Report",
    "Rows",
    "Schedule",
    "ScheduleError",
    "Sections",
    "Simulation",
    "StagePlace",
    "Times",
    "build",
    "check_microbatches",
    "dumps",
    "loads",
    "lower",
    "order",
    "rank_costs",
    "simulate",
    "validate",
]
