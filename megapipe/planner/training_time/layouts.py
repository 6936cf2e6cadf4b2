"""Training time of a layout, and the shortest over layouts, after Lamy-Poirier (2021), arXiv 2106.02679.

The terms are those of `intensity`; nothing is taken from the paper's tables.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from megapipe.planner.checks import require_counts, require_positive
from megapipe.planner.training_time.intensity import (
    Transformer,
    data_intensity,
    link_threshold,
    partitioned_intensity,
    pipeline_intensity,
    tensor_intensity,
)

Method = Literal["3d", "sharded", "layered", "modular"]
"""3d: replicated state, contiguous pipeline, usual accumulation. sharded: the same with a partitioned state. layered:
partitioned state, layered accumulation, no pipeline. modular: partitioned state, layered accumulation, modular
pipeline of one layer a chunk."""

STATE_BYTES = 12
"""Of a parameter that are partitioned: its fp32 weight and Adam's two moments."""
WORKING_BYTES = 4
"""Of a parameter in use: its 16-bit weight and gradient."""
BUFFERED_LAYERS = 2
"""Layers whose whole weights and gradients a rank of a partitioned state holds at once."""
BACKWARD_SHARE = 6 / 8
"""Of a step's FLOPs, with recomputation."""


@dataclass(frozen=True)
class Cluster:
    """Equal devices: FLOP/s at peak and bytes of memory of one, bytes per second of a device's links.

    tensor_link: inside a node. link: between nodes, for data and pipeline traffic. node_size: devices that tensor
    parallelism may span. Raises ValueError when a field is not above 0.
    """

    peak_flops: float
    memory_bytes: float
    tensor_link: float
    link: float
    node_size: int

    def __post_init__(self) -> None:
        require_positive(dict(vars(self)))
        require_counts({"node_size": self.node_size})


@dataclass(frozen=True)
class MethodLayout:
    """Who does what: n_b replicas (`data`), n_l stages (`pipeline`), n_a devices that share layers (`tensor`).

    micro_size: b, sequences. microbatches: m of a replica and step.
    Raises ValueError for an unknown method, a value below 1, or a pipeline under `layered`.
    """

    method: Method
    data: int
    pipeline: int
    tensor: int
    micro_size: int
    microbatches: int

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {self.method!r}")
        require_counts({name: value for name, value in vars(self).items() if name != "method"})
        if self.method == "layered" and self.pipeline > 1:
            raise ValueError(f"layered accumulation has no pipeline, got {self.pipeline} stages; use modular")

    @property
    def devices(self) -> int:
        """n_b n_l n_a."""
        return self.data * self.pipeline * self.tensor

    @property
    def batch_size(self) -> int:
        """Sequences of a step, n_b b m."""
        return self.data * self.micro_size * self.microbatches

    @property
    def partitioned(self) -> bool:
        """Whether replicas share one copy of the state."""
        return self.method != "3d"

    @property
    def accumulated(self) -> int:
        """Micro-batches that a layer takes in a row: all of them under layered accumulation."""
        return self.microbatches if self.method in ("layered", "modular") else 1


@dataclass(frozen=True)
class Overheads:
    """What a step takes beyond its compute at peak, as shares of that compute."""

    bubble: float
    tensor: float
    data: float
    pipeline: float

    @property
    def efficiency(self) -> float:
        """Share of the step in which the device computes: the bubble stretches with what the stages take."""
        return 1 / ((1 + self.bubble) * (1 + self.tensor) * (1 + self.data + self.pipeline))


def bubble(model: Transformer, layout: MethodLayout) -> float:
    """Idle time over compute: (p - 1) / (m v) with v chunks a stage, more where m is below p.

    Raises ValueError when the layers do not divide over the stages.
    """
    stages, microbatches = layout.pipeline, layout.microbatches
    if model.num_layers % stages:
        raise ValueError(f"{model.num_layers} layers cannot be divided evenly over {stages} stages; use a divisor")
    chunks = model.num_layers // stages if layout.method == "modular" else 1
    # A micro-batch comes back to a stage for its next chunk after at least as many steps as there are stages.
    steps = (chunks - 1) * max(stages, microbatches) + microbatches + stages - 1
    return steps / (microbatches * chunks) - 1


def overheads(model: Transformer, cluster: Cluster, layout: MethodLayout) -> Overheads:
    """Shares of a step that do not hide behind compute, from intensities beside thresholds."""
    link = link_threshold(cluster.peak_flops, cluster.link)
    tensor = link_threshold(cluster.peak_flops, cluster.tensor_link) / tensor_intensity(model, layout.tensor)
    data = sends = 0.0
    if layout.data > 1 and layout.partitioned:
        data = _exposed(link, partitioned_intensity(model, layout.micro_size, layout.accumulated))
    elif layout.data > 1:  # usual accumulation: beside the backward of the last micro-batch alone
        share = BACKWARD_SHARE / layout.microbatches
        data = share * _exposed(link, data_intensity(model, layout.micro_size))
    if layout.pipeline > 1:
        layers = 1 if layout.method == "modular" else model.num_layers // layout.pipeline
        sends = _exposed(link, pipeline_intensity(model, layers))
    return Overheads(bubble(model, layout), tensor, data, sends)


def memory_bytes(model: Transformer, layout: MethodLayout) -> float:
    """Of the first stage's device: state, weights and gradients in use, checkpoints and one layer's activations.

    Checkpoints are of every micro-batch under layered accumulation, of those in flight otherwise. The
    activations of the layer at hand are s b (34 h + 5 a s): Korthikanti et al. (2022), arXiv 2205.05198, equation 1.
    """
    in_flight = layout.microbatches
    if layout.accumulated == 1:
        in_flight = min(layout.pipeline, in_flight)
    own = model.parameters / (layout.pipeline * layout.tensor)
    if layout.partitioned:
        buffered = min(BUFFERED_LAYERS, model.num_layers // layout.pipeline)
        working = buffered * WORKING_BYTES * model.parameters / model.num_layers / layout.tensor
        state = STATE_BYTES * own / layout.data + working
    else:
        state = (STATE_BYTES + WORKING_BYTES) * own
    sequences = layout.micro_size * in_flight
    checkpoints = model.checkpoint_bytes * sequences / (layout.pipeline * layout.tensor)
    length = model.sequence_length
    activations = length * layout.micro_size * (34 * model.hidden_size + 5 * model.num_heads * length) / layout.tensor
    return state + checkpoints + activations


def layout_seconds(model: Transformer, cluster: Cluster, layout: MethodLayout, tokens: float) -> float:
    """Seconds to train on `tokens` tokens: 8 P tokens / (devices x peak x efficiency)."""
    require_positive({"tokens": tokens})
    rate = layout.devices * cluster.peak_flops * overheads(model, cluster, layout).efficiency
    return 8 * model.parameters * tokens / rate


def shortest(
    model: Transformer,
    cluster: Cluster,
    method: Method,
    batch_size: int,
    tokens: float,
    *,
    max_micro_size: int = 8,
    max_devices: int | None = None,
    least_efficiency: float = 0.0,
) -> tuple[MethodLayout, float]:
    """The layout that trains fastest within memory, and its seconds.

    Exact over tensor sizes that are powers of 2 within a node and divide the heads, stages that divide the layers,
    micro-batches of up to `max_micro_size` sequences, any replicas and micro-batches whose batch is at most
    `batch_size` sequences: the critical batch, beyond which more devices no longer save steps. Time alone asks for
    ever more devices that idle in a long bubble: `least_efficiency` is the share of peak that a layout has to reach.

    Raises:
        ValueError: a count below 1, or no layout fits; the message tells the least memory that one takes.
    """
    require_counts({"batch_size": batch_size, "max_micro_size": max_micro_size})
    if max_devices is not None:
        require_counts({"max_devices": max_devices})
    best: tuple[float, int, MethodLayout] | None = None
    least = math.inf
    replicas = {
        size: {batch_size // (size * count) for count in range(1, batch_size // size + 1)}
        for size in range(1, min(max_micro_size, batch_size) + 1)
    }
    for tensor, pipeline, micro_size in _grid(model, cluster, method, len(replicas)):
        cap = batch_size if max_devices is None else max_devices // (pipeline * tensor)
        for data in {min(cap, count) for count in replicas[micro_size]} - {0}:
            # More micro-batches never cost efficiency, only memory: the most that fit are the best.
            most = batch_size // (micro_size * data)
            count = _most_that_fit(model, cluster, MethodLayout(method, data, pipeline, tensor, micro_size, most))
            least = min(
                least, memory_bytes(model, MethodLayout(method, data, pipeline, tensor, micro_size, max(1, count)))
            )
            if count:
                layout = MethodLayout(method, data, pipeline, tensor, micro_size, count)
                key = (layout_seconds(model, cluster, layout, tokens), layout.devices)
                fast = overheads(model, cluster, layout).efficiency >= least_efficiency
                if fast and (best is None or key < best[:2]):
                    best = (*key, layout)
    if best is None:
        need = f"the smallest one needs {least / 1e9:,.2f} GB" if least < math.inf else "max_devices leaves none"
        raise ValueError(
            f"no {method} layout of batch {batch_size} fits {cluster.memory_bytes / 1e9:,.2f} GB per device at "
            f"efficiency {least_efficiency:g}: {need}; use more memory or devices, a smaller model, or a lower "
            "efficiency"
        )
    return best[2], best[0]


def _grid(model: Transformer, cluster: Cluster, method: Method, max_micro_size: int) -> Iterator[tuple[int, int, int]]:
    """(tensor, pipeline, micro_size) of every layout that the method may take."""
    powers = (2**power for power in range(cluster.node_size.bit_length()))
    tensors = [size for size in powers if size <= cluster.node_size and not model.num_heads % size]
    stages = [1] if method == "layered" else [p for p in range(1, model.num_layers + 1) if not model.num_layers % p]
    for tensor in tensors:
        for pipeline in stages:
            for micro_size in range(1, max_micro_size + 1):
                yield tensor, pipeline, micro_size


def _most_that_fit(model: Transformer, cluster: Cluster, layout: MethodLayout) -> int:
    """The largest number of micro-batches up to the layout's own within memory, which grows with it; 0 for none."""
    if memory_bytes(model, layout) <= cluster.memory_bytes:
        return layout.microbatches
    low, high = 0, layout.microbatches - 1
    while low < high:
        middle = (low + high + 1) // 2
        trial = replace(layout, microbatches=middle)
        if memory_bytes(model, trial) <= cluster.memory_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def _exposed(threshold: float, intensity: float) -> float:
    """Of traffic beside compute, the time that outlasts it over the compute."""
    return max(0.0, threshold / intensity - 1)
