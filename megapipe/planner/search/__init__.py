"""Search for the layout of a model that fits a machine and is fastest or cheapest, and reasons why others are not."""

from typing import Literal

Objective = Literal["speed", "cost", "time", "size"]
"""speed: most tokens per second on all devices. cost: lowest price per token, on all devices or fewer. time: shortest
training time for a number of tokens, on all devices or fewer. size: largest fitting model of a family, then speed."""
