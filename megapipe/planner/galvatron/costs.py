"""Galvatron's cost model: time and memory of a layer under a strategy, and of changing from one to another.

Miao et al. (2022), arXiv 2211.13878, cost estimator. Times are of one micro-batch, memory of one device.
"""

from dataclasses import dataclass

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
                f"boundary_bytes is a part of activation_bytes, got {self.boundary_bytes} of {self.activation_bytes}"
            )


@dataclass(frozen=True)
class Machine:
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
class StageCosts:
    """Costs of the layers of one stage for a micro-batch of so many sequences.

    in_flight: micro-batches whose activations the stage holds. microbatches: of an iteration, over which the
    reduction of gradients, once an iteration, is spread. last: no stage follows.
    """

    machine: Machine
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
        for row, layer in enumerate(self.layers):
            for column, strategy in enumerate(self.options):
                steady = self.steady_seconds(layer, strategy)
                seconds[row, column] = steady + self.extra_seconds(layer, strategy) / self.microbatches
                kept[row, column], working[row, column] = self.memory(layer, strategy)
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
        if before.replicas == 1 == after.replicas:
            return 0.0
        group = self.machine.devices // after.pipeline
        missing = 0.0
        for device in range(group):
            start = before.block(device) / before.replicas, after.block(device) / after.replicas
            stop = start[0] + 1 / before.replicas, start[1] + 1 / after.replicas
            common = max(0.0, min(stop) - max(start))
            missing = max(missing, 1 / before.replicas + 1 / after.replicas - 2 * common)
        boundary = max(layer.boundary_bytes for layer in self.layers)
        return missing * self.micro_size * boundary / self.machine.bandwidth(group)

    def _transitions(self) -> Floats:
        return np.array([[self.transition_seconds(one, other) for other in self.options] for one in self.options])

    def _sends(self, strategy: Strategy) -> float:
        """Of the stage's output and its gradient to and from the next stage."""
        return 2 * self.layers[-1].boundary_bytes * self._own(strategy) / self.machine.bandwidth(self.machine.devices)

    def _own(self, strategy: Strategy) -> float:
        """Sequences of a micro-batch on one device."""
        return self.micro_size / strategy.replicas

    def _bandwidth(self, strategy: Strategy, method: Method) -> float:
        return self.machine.bandwidth(strategy.span(method))
