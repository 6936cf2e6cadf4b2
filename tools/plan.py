"""Plan a training: search, predict, explain, compare, train-time, profile, links, fit, dry-run; see --help."""

import sys
from functools import partial

from megapipe.planner.command.arguments import Request
from megapipe.planner.command.main import main


def with_torch(name: str, request: Request) -> int:
    """Run a command of training/; importing torch takes a second, which the others need not wait for."""
    from megapipe.training import plan_commands

    return plan_commands.HANDLERS[name](request)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], {name: partial(with_torch, name) for name in ("profile", "links", "dry-run")}))
