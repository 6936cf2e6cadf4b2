"""Pipeline schedules as data: generate, lower, validate, simulate, read and write, without torch or triton."""

from megapipe.schedules.actions import COLUMNS, Action, Kind, Rows, rows_of
from megapipe.schedules.build import build, check_microbatches, order
from megapipe.schedules.building_blocks import Policy, StagePlacement, Times, alternate, linear, round_robin, v_shape
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.lowering import lower
from megapipe.schedules.memory import Offload
from megapipe.schedules.registry import GENERATORS, Generator, Options, schedule
from megapipe.schedules.schedule import Header, Schedule, Sections, StagePlace
from megapipe.schedules.simulation import Costs, Link, Simulation, rank_costs, simulate
from megapipe.schedules.text import dumps, loads
from megapipe.schedules.validation import Report, validate

__all__ = [
    "COLUMNS",
    "GENERATORS",
    "Action",
    "Costs",
    "Generator",
    "Header",
    "Kind",
    "Link",
    "Offload",
    "Options",
    "Policy",
    "Report",
    "Rows",
    "Schedule",
    "ScheduleError",
    "Sections",
    "Simulation",
    "StagePlace",
    "StagePlacement",
    "Times",
    "alternate",
    "build",
    "check_microbatches",
    "dumps",
    "linear",
    "loads",
    "lower",
    "order",
    "rank_costs",
    "round_robin",
    "rows_of",
    "schedule",
    "simulate",
    "v_shape",
    "validate",
]
