"""What a budget of tokens takes at the speed of a plan: steps, days, and money where nodes have prices."""

import math
from dataclasses import replace
from typing import Any

from megapipe.config.errors import ConfigError
from megapipe.config.words import DAY, HOUR, count_told, duration_told
from megapipe.layout.hardware.description import Hardware
from megapipe.planner.command.arguments import Request
from megapipe.planner.cost.estimate import Estimate


def priced(hardware: Hardware, price: float | None) -> Hardware:
    """The machine with --price_per_hour for each node, where that is given; 0 is a machine of one's own.

    Raises ConfigError for a price that is none, or of a machine with nodes of several kinds.
    """
    if price is None:
        return hardware
    if not (math.isfinite(price) and price >= 0):
        raise ConfigError(
            f"--price_per_hour is {price:g}; it is the price of one node and must be a finite number of at least 0"
        )
    if len(hardware.groups) > 1:
        raise ConfigError(
            f"--price_per_hour sets one price, but hardware {hardware.name!r} has {len(hardware.groups)} kinds of "
            "nodes; write price_per_hour into each group of the hardware file"
        )
    return replace(hardware, groups=(replace(hardware.groups[0], price_per_hour=price),))


def check_tokens(tokens: float | None) -> None:
    """Raise ConfigError for a budget that is none."""
    if tokens is not None and not (math.isfinite(tokens) and tokens > 0):
        raise ConfigError(f"--tokens is {tokens:g}; it must be a finite number above 0, such as 300e9")


def training_facts(request: Request, answer: Estimate, hardware: Hardware) -> dict[str, Any] | None:
    """Steps and days of --tokens at an estimate's speed, without evaluation, saves and restarts; None without them.

    cost: of all nodes that are occupied, in the currency of their prices, None where one has none.
    """
    tokens = request.flags["tokens"]
    if tokens is None:
        return None
    config = answer.config
    steps = math.ceil(tokens / (config.batch.global_size * config.data.sequence_length))
    seconds = steps * answer.step_seconds
    price = hardware.price_per_hour(answer.world_size)
    return {
        "tokens": tokens,
        "steps": steps,
        "days": seconds / DAY,
        "cost": None if price is None else seconds / HOUR * price,
    }


def training_told(facts: dict[str, Any]) -> str:
    """The same in a line."""
    cost = "" if facts["cost"] is None else f", price {facts['cost']:,.0f}"
    return (
        f"{count_told(facts['tokens'])} tokens: {facts['steps']:,} steps (--training.steps {facts['steps']}), "
        f"{duration_told(facts['days'] * DAY)}{cost}; evaluation, saves and restarts not counted"
    )
