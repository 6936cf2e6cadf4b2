"""Plan a training: search, predict, explain, compare, train-time, profile, links, fit, dry-run; see --help."""

import gc
import sys
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megapipe.planner.command.arguments import Request


def with_torch(name: str, request: "Request") -> int:
    """Run a command of training/; importing torch takes a second, which the others need not wait for."""
    from megapipe.training import plan_commands

    return plan_commands.HANDLERS[name](request)


def start() -> int:
    """Import what commands share and run one. What imports make stays: the collector of garbage need not look through
    it, neither while it grows nor later."""
    gc.disable()
    from megapipe.planner.command.main import main

    gc.freeze()
    gc.enable()
    return main(sys.argv[1:], {name: partial(with_torch, name) for name in ("profile", "links", "dry-run")})


if __name__ == "__main__":
    sys.exit(start())
