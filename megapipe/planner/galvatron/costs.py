"""Galvatron's cost model: time and memory of a layer under a strategy, and of changing from one to another.

Miao et al. (2022), arXiv 2211.13878, cost estimator. Times are of one micro-batch, memory of one device.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megapipe.planner.checks import require_counts, require_positive
from megapipe.planner.galvatron.dynamic import Floats, Tables
from megapipe.planner.galvatron.strategies import Method, Strategy

STATES = 4
"""Weights, gradients and Adam's two moments, each as large as the weights."""
BACKWARD = 2
"""A backward over a forward in time."""
TENSOR_MESSAGES = 6
"""All-gathers of a layer's input or their like in a tensor-parallel layer; half as many more with recomputation."""


@dataclass(frozen=True)
class LayerProfile:
    """One layer: bytes of weights, and per sequence the seconds of a forward on one device and bytes of activations.

    boundary_bytes: of the activations the layer's input, which tensor parallelism does not split.
    """

    forward_seconds: float
    weight_bytes: float
    activation_bytes: float
    boundary_bytes: float

    def __post_init__(self) -> None:
        require_positive(dict(vars(self)), zero=True)
        if self.boundary_bytes > self.activation_bytes:
            raise ValueError(
                f"boundary_bytes must be at most activation_bytes, got {self.boundary_bytes} of "
                f"{self.activation_bytes}"
            )


@dataclass(frozen=True)
class EqualDevices:
    """Equal devices: bytes of memory, bytes per second inside and between nodes, and how overlap slows both sides.

    slow_down: of compute and of communication while they run side by side, at least 1: measured.
    """

    devices: int
    devices_per_node: int
    memory_bytes: float
    fast: float
    slow: float
    slow_down: float = 1.3

    def __post_init__(self) -> None:
        require_counts({"devices": self.devices, "devices_per_node": self.devices_per_node})
        require_positive({"memory_bytes": self.memory_bytes, "fast": self.fast, "slow": self.slow})
        if not self.slow_down >= 1:
            raise ValueError(f"slow_down must be at least 1, got {self.slow_down}")

    def bandwidth(self, span: int) -> float:
        """Of a group that reaches over so many neighbouring devices."""
        return self.fast if span <= self.devices_per_node else self.slow


def overlapped(compute: float, communication: float, slow_down: float) -> float:
    """Seconds of both side by side: each takes `slow_down` times as long until the shorter ends, then full speed."""
    slowed = min(compute, communication) * slow_down
    return slowed + max(compute, communication) - min(compute, communication)


@dataclass(frozen=True)
class StrategyCosts:
    """Costs of the layers of one stage for a micro-batch of so many sequences.

    in_flight: micro-batches whose activations the stage holds. microbatches: of an iteration, over which the
    reduction of gradients, once an iteration, is spread. last: no stage follows.
    """

    machine: EqualDevices
    layers: tuple[LayerProfile, ...]
    options: tuple[Strategy, ...]
    micro_size: int
    in_flight: int
    microbatches: int
    last: bool

    def tables(self) -> Tables:
        """What the dynamic programming chooses from."""
        shape = len(self.layers), len(self.options)
        seconds, kept, working = (np.zeros(shape) for _ in range(3))
        rows: dict[LayerProfile, list[int]] = {}
        for row, layer in enumerate(self.layers):
            rows.setdefault(layer, []).append(row)
        for layer, alike in rows.items():
            for column, strategy in enumerate(self.options):
                steady = self.steady_seconds(layer, strategy)
                seconds[alike, column] = steady + self.extra_seconds(layer, strategy) / self.microbatches
                kept[alike, column], working[alike, column] = self.memory(layer, strategy)
        if not self.last:
            seconds[-1] += [self._sends(strategy) for strategy in self.options]
        return Tables(seconds, kept, working, self._transitions())

    def steady_seconds(self, layer: LayerProfile, strategy: Strategy) -> float:
        """Forward and backward of a micro-batch without gradients' reduction; endless where it does not split."""
        if self.micro_size % strategy.replicas:
            return float("inf")
        own, tensor = self._own(strategy), strategy.degree("tensor")
        forward = layer.forward_seconds * own / tensor
        compute = forward * (1 + BACKWARD + strategy.recompute)
        messages = TENSOR_MESSAGES * (1.5 if strategy.recompute else 1)
        gathered = messages * (tensor - 1) / tensor * layer.boundary_bytes * own / self._bandwidth(strategy, "tensor")
        # Restores of a sharded layer, before its forward and before its backward, each half of a reduction.
        sharded = strategy.degree("sharded")
        restores = 2 * (sharded - 1) / sharded * layer.weight_bytes / tensor / self._bandwidth(strategy, "sharded")
        return compute + gathered + restores

    def extra_seconds(self, layer: LayerProfile, strategy: Strategy) -> float:
        """What the reduction beside the last micro-batch's backward adds to an iteration.

        An all-reduce moves 2 (d - 1) / d of the gradients, a reduce-scatter of sharded ones half of that.
        """
        if self.micro_size % strategy.replicas:
            return float("inf")
        tensor = strategy.degree("tensor")
        backward = layer.forward_seconds * self._own(strategy) / tensor * (BACKWARD + strategy.recompute)
        reduction = 0.0
        methods: tuple[tuple[Method, int], ...] = (("data", 2), ("sharded", 1))
        for method, passes in methods:
            degree = strategy.degree(method)
            moved = passes * (degree - 1) / degree * layer.weight_bytes / tensor
            reduction += moved / self._bandwidth(strategy, method)
        return overlapped(backward, reduction, self.machine.slow_down) - backward

    def memory(self, layer: LayerProfile, strategy: Strategy) -> tuple[float, float]:
        """Bytes that a layer keeps for the whole iteration, and those that it needs only while it runs."""
        tensor, sharded, own = strategy.degree("tensor"), strategy.degree("sharded"), self._own(strategy)
        activations = own * (layer.boundary_bytes + (layer.activation_bytes - layer.boundary_bytes) / tensor)
        kept = self.in_flight * (own * layer.boundary_bytes if strategy.recompute else activations)
        working = activations if strategy.recompute else 0.0
        if sharded > 1:  # whole weights and gradients of the layer at hand
            working += 2 * layer.weight_bytes / tensor
        return STATES * layer.weight_bytes / tensor / sharded + kept, working

    def transition_seconds(self, before: Strategy, after: Strategy) -> float:
        """Of moving activations, then their gradients back, between two splits of a micro-batch over devices."""
        return float(_missing((before, after), self.machine.devices)[0, 1]) * self._moved()

    def _transitions(self) -> Floats:
        return _missing(self.options, self.machine.devices) * self._moved()

    def _moved(self) -> float:
        """Seconds of moving a whole micro-batch between layers."""
        boundary = max(layer.boundary_bytes for layer in self.layers)
        group = self.machine.devices // self.options[0].pipeline
        return self.micro_size * boundary / self.machine.bandwidth(group)

    def _sends(self, strategy: Strategy) -> float:
        """Of the stage's output and its gradient to and from the next stage."""
        return 2 * self.layers[-1].boundary_bytes * self._own(strategy) / self.machine.bandwidth(self.machine.devices)

    def _own(self, strategy: Strategy) -> float:
        """Sequences of a micro-batch on one device."""
        return self.micro_size / strategy.replicas

    def _bandwidth(self, strategy: Strategy, method: Method) -> float:
        return self.machine.bandwidth(strategy.span(method))


@lru_cache(maxsize=64)
def _missing(options: tuple[Strategy, ...], devices: int) -> Floats:
    """Of a micro-batch the most that any device of a stage gets and gives away, from each strategy to each;
    [strategies, strategies]. options: of one pipeline degree."""
    numbers = range(devices // options[0].pipeline)
    replicas = np.array([each.replicas for each in options], dtype=np.float64)
    start = np.array([[each.block(device) for device in numbers] for each in options]) / replicas[:, None]
    stop = start + 1 / replicas[:, None]
    common = np.minimum(stop[:, None], stop[None]) - np.maximum(start[:, None], start[None])
    both = 1 / replicas[:, None] + 1 / replicas[None]
    missing = np.maximum(0.0, both[..., None] - 2 * np.maximum(0.0, common)).max(axis=2)
    # A device with the whole micro-batch before and after has nothing to move, which rounding does not know.
    return np.where((replicas[:, None] == 1) & (replicas[None] == 1), 0.0, missing)
