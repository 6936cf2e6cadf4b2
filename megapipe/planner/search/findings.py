"""What a search answers."""

from dataclasses import dataclass
from typing import Any, Literal

from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.planner.cost.estimate import Estimate

Objective = Literal["speed", "cost", "time", "size"]
"""speed: most tokens per second on all devices. cost: least money a token, on as many devices or fewer. time: soonest
through a budget of tokens, on as many devices or fewer. size: the largest model of a family that fits, then speed."""


@dataclass(frozen=True)
class Found:
    """A layout that was looked at.

    estimate: its cost; `estimate.config` is the whole configuration, parallel.data filled in. simulated: its numbers
    come from its lowered schedule, run by the simulator, and not from estimates. node_order: of the machine, where
    measured links between nodes make another one than theirs faster. price: of a million tokens in the hardware
    file's currency, None where a node has no price.
    """

    estimate: Estimate
    simulated: bool = False
    node_order: tuple[int, ...] | None = None
    price: float | None = None

    @property
    def config(self) -> PretrainConfig:
        """Ready to run."""
        return self.estimate.config

    def as_json(self) -> dict[str, Any]:
        """The estimate's keys, and where they come from."""
        order = None if self.node_order is None else list(self.node_order)
        return self.estimate.as_json() | {
            "simulated": self.simulated,
            "node_order": order,
            "price_per_million_tokens": self.price,
        }


@dataclass(frozen=True)
class Alternative:
    """What someone would have tried first, or a part of the best layout left out, and why it loses.

    name: in words. estimate: of the best layout of this kind, of the one nearest to fitting where none fits; None
    where no layout of the kind can run at all. reason: a sentence: out of memory by how much, or slower by how much
    and in which terms, or the rule that keeps it from running, or that it is the best itself.
    """

    name: str
    estimate: Estimate | None
    reason: str

    def as_json(self) -> dict[str, Any]:
        """Name, reason, and the estimate's keys or null."""
        estimate = None if self.estimate is None else self.estimate.as_json()
        return {"name": self.name, "reason": self.reason, "estimate": estimate}


@dataclass(frozen=True)
class Trial:
    """One number of devices, or one model, of an objective that compares several.

    name: such as `64 devices` or a model's. found: the best there; None where nothing fits. value: what is compared:
    money a million tokens, days, or parameters.
    """

    name: str
    found: Found | None
    value: float | None


@dataclass(frozen=True)
class Findings:
    """The answers of one search.

    ranked: layouts that fit, the best first. pareto: of speed against memory, the fastest first: no other layout that
    fits is as fast with less memory. alternatives: see there. trials: where the objective compares several numbers of
    devices or models. hints: similar requests that are much faster, as sentences. not_searched: what the search
    leaves out, as phrases. examined: number of estimated layouts. pruned: rule -> number of layouts that it ruled out
    without an estimate. layouts: number of valid layouts in the space. seconds: duration of the search.
    """

    objective: Objective
    devices: int
    ranked: tuple[Found, ...]
    pareto: tuple[Found, ...]
    alternatives: tuple[Alternative, ...]
    trials: tuple[Trial, ...]
    hints: tuple[str, ...]
    not_searched: tuple[str, ...]
    examined: int
    pruned: dict[str, int]
    layouts: int
    seconds: float

    @property
    def best(self) -> Found:
        """The answer."""
        return self.ranked[0]

    def as_json(self) -> dict[str, Any]:
        """All of it, as `megapipe plan search --json` prints it."""
        return {
            "objective": self.objective,
            "devices": self.devices,
            "best": self.best.as_json(),
            "ranked": [each.as_json() for each in self.ranked],
            "pareto": [each.as_json() for each in self.pareto],
            "alternatives": [each.as_json() for each in self.alternatives],
            "trials": [{"name": each.name, "value": each.value} for each in self.trials],
            "hints": list(self.hints),
            "not_searched": list(self.not_searched),
            "examined": self.examined,
            "pruned": self.pruned,
            "layouts": self.layouts,
            "seconds": self.seconds,
        }


class NothingFits(ConfigError):
    """No layout fits the devices. nearest: the one that misses by the fewest bytes."""

    def __init__(self, problem: str, nearest: Estimate) -> None:
        super().__init__(problem)
        self.nearest = nearest
