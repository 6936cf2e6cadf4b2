"""`megapipe plan`: the planner's commands, and those that measure or build shapes with torch."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from megapipe.planner.command.main import main as run_planner

if TYPE_CHECKING:
    from megapipe.planner.command.arguments import Request


def main(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit status."""
    return run_planner(arguments, {name: partial(_with_torch, name) for name in ("profile", "links", "dry-run")})


def _with_torch(name: str, request: "Request") -> int:
    # Importing torch takes a second, which the other commands need not wait for.
    from megapipe.calibration import commands as plan_commands

    return plan_commands.HANDLERS[name](request)
