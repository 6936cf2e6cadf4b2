"""Plan a training: search, predict, explain, compare, train-time, profile, fit, dry-run; see --help."""

import sys
from functools import partial

from megapipe.planner.command.arguments import Request
from megapipe.planner.command.main import main


def with_torch(name: str, request: Request) -> int:
    """Run a command of training/; importing torch takes a second, which the others need not wait for."""
    from megapipe.training import plan_commands

    handler = {"profile": plan_commands.run_profile, "dry-run": plan_commands.run_dry_run}[name]
    return handler(request)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], {name: partial(with_torch, name) for name in ("profile", "dry-run")}))
