"""What the cost model takes for granted beside the configuration and the machine."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Assumptions:
    """Choices of an implementation that no configuration names; the defaults are this project's own engine.

    slow_down: of compute and of communication while they run side by side, at least 1 (Galvatron, arXiv 2211.13878,
    cost estimator). scattered_sends: each of t tensor ranks sends 1/t of a message between stages, and its node
    gathers it again (Narayanan et al. 2021, arXiv 2104.04473, section 4.1). gathers_beside_forward: weights that an
    update has written in shards (ZeRO 1 and 2) are gathered beside the next step's first forwards, not before them.
    """

    slow_down: float = 1.3
    scattered_sends: bool = False
    gathers_beside_forward: bool = False


ENGINE = Assumptions()
"""Of this project's engine."""
