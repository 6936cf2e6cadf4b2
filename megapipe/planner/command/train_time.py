"""`train-time`: estimate the days of a training run, and a lower bound of this time, by the analyses of two papers.

`training_seconds` is a formula of Narayanan et al. (2021), "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", arXiv 2104.04473, section 5.1, equation 4. Everything else follows Lamy-Poirier (2021),
"Layered gradient accumulation and modular pipeline parallelism", arXiv 2106.02679, which compares the arithmetic
intensity of each kind of traffic, in FLOPs per byte sent, with the intensity that hides the traffic. The constants are
derived here, not copied from the paper's tables, for 16-bit weights, gradients and activations, and for a device that
recomputes every layer's forward: 8 FLOPs per token and parameter, 6 of them in the backward, so 96 h^2 per token and
layer.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from megapipe.config import ConfigError
from megapipe.config.command_line import DAY, bytes_text, count_text, seconds_text
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.stages import layers_of, num_parameters
from megapipe.planner.command.main import Request
from megapipe.planner.command.planning import PREFERRED, layout_text, measured_times, planned_config, print_table
from megapipe.planner.search.plan import BEST_ALONE, search_speed
from megapipe.planner.search.space import divisors
from megapipe.schedules.registry import find_published
from megapipe.spec.layers import active_parameters

GPT3_PARAMETERS = 175e9
GPT3_BATCH_TOKENS = 3.2e6
"""Brown et al. (2020), arXiv 2005.14165, table 2.1: the batch size in tokens of the largest model."""
MODULAR = find_published("arXiv 2106.02679").name
METHODS = ("3d", "sharded", "layered", MODULAR)
"""3d: replicated state, contiguous pipeline, usual accumulation. sharded: the same with a partitioned state. layered:
partitioned state, layered accumulation, no pipeline. modular: partitioned state, layered accumulation, modular
pipeline of one layer per chunk."""

STATE_BYTES = 12
"""Bytes per parameter that are partitioned: the fp32 weight and the two moments of Adam."""
WORKING_BYTES = 4
"""Bytes per parameter in use: the 16-bit weight and gradient."""
BUFFERED_LAYERS = 2
"""Number of layers whose full weights and gradients a rank holds at once if the state is partitioned."""
BACKWARD_SHARE = 6 / 8
"""Share of a step's FLOPs in the backward, if the forward is recomputed."""


def training_seconds(parameters: float, tokens: float, devices: int, device_flops: float) -> float:
    """Return the end-to-end training time in seconds, 8 T P / (n X): section 5.1, equation 4.

    parameters: P. tokens: T. devices: n. device_flops: X, FLOP/s that each achieves, including recomputation.
    """
    return 8 * tokens * parameters / (devices * device_flops)


@dataclass(frozen=True)
class Transformer:
    """A model of L layers of hidden size h with `num_heads` heads, on sequences of s tokens, without embeddings."""

    num_layers: int
    hidden_size: int
    num_heads: int
    sequence_length: int

    @property
    def parameters(self) -> int:
        """Return the number of weights of all layers, without biases and norms: 12 L h^2."""
        return 12 * self.num_layers * self.hidden_size**2

    @property
    def checkpoint_bytes(self) -> int:
        """Return the bytes of all layers' inputs for one sequence, 16 bits per number: 2 s h L."""
        return 2 * self.sequence_length * self.hidden_size * self.num_layers


def critical_batch_tokens(parameters: float) -> float:
    """Return the critical batch in tokens, 572 P^(1/3), scaled to GPT-3's batch: larger batches no longer reduce the
    steps in proportion."""
    return float(GPT3_BATCH_TOKENS * (parameters / GPT3_PARAMETERS) ** (1 / 3))


@dataclass(frozen=True)
class Cluster:
    """Equal devices of peak_flops FLOP/s and memory_bytes bytes. tensor_link, link: bytes per second of a device's
    links, within a node for tensor traffic, and between nodes for data and pipeline traffic; both directions together,
    as in data sheets. node_size: maximum number of devices for tensor parallelism."""

    peak_flops: float
    memory_bytes: float
    tensor_link: float
    link: float
    node_size: int

    @property
    def thresholds(self) -> dict[str, float]:
        """Return the FLOPs that a device computes while a link, inside or outside of its node, transfers one byte.
        Compute can hide traffic with a higher intensity."""
        return {"inside": self.peak_flops / self.tensor_link, "outside": self.peak_flops / self.link}


@dataclass(frozen=True)
class MethodLayout:
    """n_b replicas (`data`), n_l stages (`pipeline`), n_a devices that shard layers (`tensor`), m micro-batches per
    replica and step (`microbatches`) of b sequences (`micro_size`)."""

    method: str
    data: int
    pipeline: int
    tensor: int
    micro_size: int
    microbatches: int

    @property
    def devices(self) -> int:
        """Return the number of devices, n_b n_l n_a."""
        return self.data * self.pipeline * self.tensor

    @property
    def batch_size(self) -> int:
        """Return the sequences of a step, n_b b m."""
        return self.data * self.micro_size * self.microbatches

    @property
    def partitioned(self) -> bool:
        """Return whether replicas shard one copy of the state."""
        return self.method != "3d"

    @property
    def accumulated(self) -> int:
        """Return the number of consecutive micro-batches of a layer: all of them with layered accumulation."""
        return self.microbatches if self.method in ("layered", MODULAR) else 1

    def intensities(self, model: Transformer) -> dict[str, float]:
        """Return the intensities of the traffic between data, pipeline and tensor ranks, infinite without traffic.

        data: with a replicated state 1.5 s b m: an all-reduce of gradients, 4 bytes per parameter for a backward of 6
        FLOPs per token. With a partitioned state 4/3 s b m: two restores and one reduction of 2 bytes each for 8 FLOPs
        per token. m is 1 for usual accumulation. pipeline: 24 h times the layers of a chunk: activations and
        gradients, 4 h bytes per token and chunk. tensor: 4 h / (n_a - 1): six all-reduces of a layer, two of them in
        recomputation. They do not overlap with compute: they add threshold / intensity to its time.
        """
        data = (4 / 3 if self.partitioned else 1.5) * model.sequence_length * self.micro_size * self.accumulated
        pipeline = 24 * model.hidden_size * self.layers_per_chunk(model.num_layers)
        tensor = 4 * model.hidden_size / max(1, self.tensor - 1)
        values = {"data": data, "pipeline": pipeline, "tensor": tensor}
        return {name: each if getattr(self, name) > 1 else math.inf for name, each in values.items()}

    def layers_per_chunk(self, num_layers: int) -> int:
        """Return the layers of a chunk: 1 in the modular pipeline, L / p in a contiguous one."""
        return 1 if self.method == MODULAR else num_layers // self.pipeline


@dataclass(frozen=True)
class Overheads:
    """Times of a step in addition to its compute at peak rate, relative to that compute."""

    bubble: float
    tensor: float
    data: float
    pipeline: float

    @property
    def efficiency(self) -> float:
        """Return the share of a step in which the device computes. The other overheads also lengthen the bubble."""
        return 1 / ((1 + self.bubble) * (1 + self.tensor) * (1 + self.data + self.pipeline))


def bubble(model: Transformer, layout: MethodLayout) -> float:
    """Return idle time / compute time: (p - 1) / (m v) with v chunks per stage, more if m is below p."""
    stages, microbatches = layout.pipeline, layout.microbatches
    chunks = model.num_layers // stages // layout.layers_per_chunk(model.num_layers)
    # A micro-batch returns to a stage for its next chunk after at least as many steps as there are stages.
    steps = (chunks - 1) * max(stages, microbatches) + microbatches + stages - 1
    return steps / (microbatches * chunks) - 1


def overheads(model: Transformer, cluster: Cluster, layout: MethodLayout) -> Overheads:
    """Return the overheads of a step that compute does not hide, from intensities and thresholds."""
    inside, outside = cluster.thresholds.values()
    data, pipeline, tensor = layout.intensities(model).values()
    # Usual accumulation overlaps only with the backward of the last micro-batch.
    share = 1.0 if layout.partitioned else BACKWARD_SHARE / layout.microbatches
    sums, sends = share * max(0.0, outside / data - 1), max(0.0, outside / pipeline - 1)
    return Overheads(bubble(model, layout), inside / tensor, sums, sends)


def memory_bytes(model: Transformer, layout: MethodLayout) -> float:
    """Return a first-stage device's bytes: state, weights and gradients in use, checkpoints, one layer's activations.

    Layered accumulation keeps the checkpoints of all micro-batches, other methods those in flight. The activations of
    the current layer are s b (34 h + 5 a s): Korthikanti et al. (2022), arXiv 2205.05198, equation 1.
    """
    shards, length = layout.pipeline * layout.tensor, model.sequence_length
    in_flight = layout.microbatches
    if layout.accumulated == 1:
        in_flight = min(layout.pipeline, in_flight)
    parameters = model.parameters / shards
    if layout.partitioned:
        buffered = min(BUFFERED_LAYERS, model.num_layers // layout.pipeline)
        in_use = buffered * WORKING_BYTES * model.parameters / model.num_layers / layout.tensor
        state = STATE_BYTES * parameters / layout.data + in_use
    else:
        state = (STATE_BYTES + WORKING_BYTES) * parameters
    checkpoints = model.checkpoint_bytes * layout.micro_size * in_flight / shards
    activations = length * layout.micro_size * (34 * model.hidden_size + 5 * model.num_heads * length) / layout.tensor
    return state + checkpoints + activations


def layout_seconds(model: Transformer, cluster: Cluster, layout: MethodLayout, tokens: float) -> float:
    """Return the seconds to train on `tokens` tokens: 8 P tokens / (devices x peak x efficiency)."""
    rate = layout.devices * cluster.peak_flops * overheads(model, cluster, layout).efficiency
    return 8 * model.parameters * tokens / rate


def shortest(
    model: Transformer,
    cluster: Cluster,
    method: str,
    batch_size: int,
    tokens: float,
    *,
    max_micro_size: int = 8,
    max_devices: int | None = None,
    least_efficiency: float = 0.0,
) -> tuple[MethodLayout, float]:
    """Return the layout that fits in memory and trains fastest, and its training time in seconds.

    The search is exact over tensor sizes that are powers of 2 within a node and divide the heads, stages that divide
    the layers, micro-batches of up to `max_micro_size` sequences, and any number of replicas and micro-batches with at
    most `batch_size` sequences per batch (the critical batch: more sequences no longer save steps in proportion).
    least_efficiency: minimum fraction of the peak. With 0, the fastest layout uses ever more devices, which
    are mostly idle in a long bubble.

    Raises ValueError if no layout fits; the message has the minimum memory of a layout.
    """
    candidates, sizes = [], []
    replicas = {
        size: {batch_size // (size * count) for count in range(1, batch_size // size + 1)}
        for size in range(1, min(max_micro_size, batch_size) + 1)
    }
    tensors = [2**power for power in range(cluster.node_size.bit_length()) if not model.num_heads % 2**power]
    stages = [1] if method == "layered" else divisors(model.num_layers)
    for tensor, pipeline, micro_size in product(tensors, stages, replicas):
        cap = batch_size if max_devices is None else max_devices // (pipeline * tensor)
        for data in {min(cap, count) for count in replicas[micro_size]} - {0}:
            # More micro-batches never reduce efficiency, they only take memory: the largest number that fits is best.
            max_microbatches = batch_size // (micro_size * data)
            layout = MethodLayout(method, data, pipeline, tensor, micro_size, max_microbatches)
            count = _most_that_fit(model, cluster, layout)
            layout = replace(layout, microbatches=max(1, count))
            sizes.append(memory_bytes(model, layout))
            if count and overheads(model, cluster, layout).efficiency >= least_efficiency:
                candidates.append((layout, layout_seconds(model, cluster, layout, tokens)))
    if not candidates:
        need = f"the smallest one needs {min(sizes) / 1e9:,.2f} GB" if sizes else "max_devices allows no layout"
        raise ValueError(
            f"no {method} layout of batch {batch_size} fits {cluster.memory_bytes / 1e9:,.2f} "
            f"GB per device at efficiency {least_efficiency:g}: {need}; use more memory or "
            "devices, a smaller model, or a lower efficiency"
        )
    return min(candidates, key=lambda each: (each[1], each[0].devices))


def _most_that_fit(model: Transformer, cluster: Cluster, layout: MethodLayout) -> int:
    """Return the largest number of micro-batches, up to that of the layout, that fits in memory; 0 for none."""
    if memory_bytes(model, layout) <= cluster.memory_bytes:
        return layout.microbatches
    return bisect_right(
        range(1, layout.microbatches),
        cluster.memory_bytes,
        key=lambda count: memory_bytes(model, replace(layout, microbatches=count)),
    )


def run_train_time(request: Request) -> None:
    """Print the training time, and with --bounds the lower bounds of a paper's analysis."""
    flags = request.flags
    if problem := next(_problems(request), None):
        raise ConfigError(problem)
    parameters = flags["parameters"] or float(num_parameters(request.config))
    seconds, assumptions = _answer(request, parameters, flags["tokens"])
    bounds = _bounds(request, request.hardware()) if flags["bounds"] else {"thresholds": None, "bounds": []}
    answer = {
        "parameters": parameters,
        "tokens": flags["tokens"],
        "critical_batch_tokens": critical_batch_tokens(parameters),
        "days": seconds / DAY,
        "assumptions": assumptions,
        "batch": _batch(request),
        **bounds,
    }
    if flags["json"]:
        print(json.dumps(answer, indent=2))
        return
    run = f"{count_text(parameters)} parameters on {count_text(flags['tokens'])} tokens"
    print(f"{run}: {seconds / DAY:.1f} days", *(f"  {line}" for line in assumptions), sep="\n")
    if flags["bounds"]:
        _print_bounds(request, answer)


def _problems(request: Request) -> Iterator[str]:
    """Yield one message for each rule that the flags break."""
    model, flags = request.config.model, request.flags
    devices, achieved = flags["devices"], flags["achieved_tflops"]
    if flags["tokens"] is None:
        yield "--tokens is missing; set it to the tokens that the model is trained on, as in --tokens 300e9"
    if achieved is not None and flags["hardware"] is not None:
        yield (
            "--achieved_tflops and --hardware both set the speed; pass "
            "--achieved_tflops for a measured speed, or --hardware for a predicted one"
        )
    if flags["bounds"] and flags["hardware"] is None:
        yield "--bounds needs --hardware, whose nominal figures it uses; set it to a file or a preset"
    # The formulas, unlike a search, assume that every token uses every parameter.
    formula = achieved is not None and flags["parameters"] is None
    experts = [each.num_experts for each in model.kinds_of_layers.values() if each.num_experts is not None]
    if experts and (formula or flags["bounds"]):
        active = active_parameters(model, layers_of(request.config))
        yield (
            f"model.num_experts is {experts[0]}, but these formulas are for dense models; pass --parameters "
            f"{active}, the parameters that a token uses, and leave --bounds out"
        )
    if achieved is not None and devices is None:
        yield f"--devices is missing; set it to the number of devices that reach --achieved_tflops {achieved:g} each"
    if achieved is None and (flags["hardware"] is None or devices is None):
        yield "no speed is given: pass --devices with --hardware, or with the --achieved_tflops of each device"
    if achieved is None and flags["parameters"] is not None:
        yield "--parameters can only be used with --achieved_tflops; with --hardware, describe the model with --model"


def _answer(request: Request, parameters: float, tokens: float) -> tuple[float, list[str]]:
    """Return the training time in seconds, and one sentence for each assumption. The speed is the measured speed of
    --achieved_tflops, or otherwise the speed of the layout that a search finds."""
    devices, achieved = request.flags["devices"], request.flags["achieved_tflops"]
    if achieved is not None:
        return training_seconds(parameters, tokens, devices, achieved * 1e12), [
            f"{devices:,} devices at {achieved:g} TFLOP/s each, as given by --achieved_tflops",
            "8 T P / (n X): every forward is recomputed and counted (Narayanan et al. 2021, section 5.1)",
        ]
    hardware, samples = request.hardware(), _batch(request)
    config, remarks = planned_config(request, hardware, layout_open=True)
    batches = f"batches of {samples:,} samples of {config.data.sequence_length:,} tokens"
    if "batch.global_size" not in request.given:
        batches += ", the critical batch (GPT-3's, by the cube root of the parameters)"
    config = replace(config, batch=replace(config.batch, global_size=samples))
    times = measured_times(hardware, devices)
    findings = search_speed(config, hardware, devices, request.given, times=times, effort=BEST_ALONE)
    best = findings.best.estimate
    layout = (
        "the best layout of megapipe plan search "
        f"on {devices:,} x {hardware.groups[0].device.name}: {layout_text(best.config)}, "
        f"{seconds_text(best.step_seconds)} a step, without saves, failures or evaluation"
    )
    return tokens / best.tokens_per_second, [layout, batches, *remarks]


def _bounds(request: Request, hardware: Hardware) -> dict[str, Any]:
    """Return Lamy-Poirier's thresholds and fastest layouts, for JSON, on nodes of the first group.

    Bandwidths count both directions, as in the paper. Raises ConfigError if the group has too few devices.
    """
    group, most = hardware.groups[0], request.flags["devices"]
    num_devices = None if group.num_nodes is None else group.num_nodes * group.devices_per_node
    if most is not None and num_devices is not None and most > num_devices:
        raise ConfigError(
            f"--devices is {most:,}, but {group.name!r}, the first group of hardware {hardware.name!r}, has "
            f"{num_devices:,}; lower --devices, or raise num_nodes of the group"
        )
    precision = request.config.training.precision
    if "training.precision" not in request.given:
        precision = next((name for name in PREFERRED if name in group.device.peak_flops), precision)
    limit = num_devices if most is None else most
    peak, node_size = group.device.peak(precision), group.devices_per_node
    inside, outside = 2 * group.inside.bandwidth, 2 * group.outside.of_device(node_size)
    cluster = Cluster(peak, group.device.memory_bytes, inside, outside, node_size)
    return {
        "thresholds": cluster.thresholds,
        "bounds": [_shortest(request, cluster, method, limit) for method in METHODS],
    }


def _transformer(request: Request) -> Transformer:
    model, length = request.config.model, request.config.data.sequence_length
    return Transformer(model.num_layers, model.hidden_size, model.num_heads, length)


def _batch(request: Request) -> int:
    """Return the sequences per batch: as given, or the critical batch, rounded down to a multiple of the devices."""
    if "batch.global_size" in request.given:
        return request.config.batch.global_size
    model, devices = _transformer(request), request.flags["devices"] or 1
    critical = max(1, int(critical_batch_tokens(model.parameters) / model.sequence_length))
    return critical // devices * devices or critical


def _shortest(request: Request, cluster: Cluster, method: str, most: int | None) -> dict[str, Any]:
    """Return the figures of the fastest layout of a method on at most `most` devices, or the reason why there is none.

    The intensity of traffic that does not occur is None.
    """
    model, batch, flags = _transformer(request), _batch(request), request.flags
    limits = {"max_devices": most, "least_efficiency": flags["least_efficiency"]}
    try:
        layout, seconds = shortest(model, cluster, method, batch, flags["tokens"], **limits)
    except ValueError as error:
        return {"method": method, "problem": str(error)}
    shares = overheads(model, cluster, layout)
    return {
        "method": method,
        "layout": vars(layout),
        "devices": layout.devices,
        "batch": layout.batch_size,
        "days": seconds / DAY,
        "memory_bytes": memory_bytes(model, layout),
        "efficiency": shares.efficiency,
        "overheads": vars(shares),
        "intensities": {name: each if each < math.inf else None for name, each in layout.intensities(model).items()},
    }


def _print_bounds(request: Request, answer: dict[str, Any]) -> None:
    limits = answer["thresholds"]
    print(
        "\nlower bounds from a paper's analysis with nominal peaks, "
        f"not predictions\nbatches of at most {answer['batch']:,} sequences "
        f"of {request.config.data.sequence_length:,} tokens, efficiency at least "
        f"{request.flags['least_efficiency']:.0%} of the peak (Lamy-Poirier 2021)"
    )
    print(
        "traffic between nodes is hidden by compute above an intensity of "
        f"{limits['outside']:,.0f} FLOP per byte; tensor traffic is never "
        f"hidden and adds {limits['inside']:,.0f} / intensity to the time\n"
    )
    rows = []
    for bound in answer["bounds"]:
        if "problem" in bound:
            print(f"{bound['method']}: {bound['problem']}")
            continue
        method, *sizes = bound["layout"].values()
        intensities = ("none" if each is None else f"{each:,.0f}" for each in bound["intensities"].values())
        counts = [f"{size:,}" for size in (bound["devices"], *sizes)]
        rates = [f"{bound['efficiency']:.0%}", bytes_text(bound["memory_bytes"]), *intensities]
        rows.append([method, f"{bound['days']:,.1f}", *counts, *rates])
    if rows:
        columns = ["method", "days", "devices", "data", "pipeline", "tensor", "micro-batch", "micro-batches"]
        print_table([*columns, "efficiency", "memory", "data FLOP/B", "pipeline FLOP/B", "tensor FLOP/B"], rows)
