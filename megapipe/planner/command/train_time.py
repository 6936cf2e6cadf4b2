"""`train-time`: how many days a training takes, and the fewest that it can take, by two papers' analyses.

Narayanan et al. (2021, arXiv 2104.04473, section 5.1, equation 4), and Lamy-Poirier (2021, arXiv 2106.02679).
"""

import json
import math
from dataclasses import dataclass, replace
from typing import Any, get_args

from megapipe.config.errors import ConfigError
from megapipe.config.words import DAY, bytes_told, count_told, seconds_told
from megapipe.layout.hardware.description import Hardware
from megapipe.layout.stages import layers_of
from megapipe.planner.command.arguments import Request
from megapipe.planner.command.planning import PREFERRED, measured_times, num_parameters, planned_config
from megapipe.planner.report.table import print_table
from megapipe.planner.report.words import layout_told
from megapipe.planner.search.plan import BEST_ALONE, search_speed
from megapipe.planner.training_time.intensity import (
    Transformer,
    critical_batch_tokens,
    data_intensity,
    link_threshold,
    partitioned_intensity,
    pipeline_intensity,
    tensor_intensity,
)
from megapipe.planner.training_time.layouts import (
    Cluster,
    Method,
    MethodLayout,
    Overheads,
    layout_seconds,
    memory_bytes,
    overheads,
    shortest,
)
from megapipe.planner.training_time.megatron import training_seconds
from megapipe.spec.layers import active_parameters


@dataclass(frozen=True)
class Shortest:
    """The fastest layout of a method: Lamy-Poirier's figures of it, or why there is none."""

    method: Method
    layout: MethodLayout | None = None
    seconds: float = math.nan
    memory: float = math.nan
    shares: Overheads | None = None
    intensities: dict[str, float] | None = None
    problem: str = ""

    def as_json(self) -> dict[str, Any]:
        """Numbers alone; infinite intensities, of traffic that there is none of, are null."""
        if self.layout is None or self.shares is None or self.intensities is None:
            return {"method": self.method, "problem": self.problem}
        return {
            "method": self.method,
            "layout": vars(self.layout),
            "devices": self.layout.devices,
            "batch": self.layout.batch_size,
            "days": self.seconds / DAY,
            "memory_bytes": self.memory,
            "efficiency": self.shares.efficiency,
            "overheads": vars(self.shares),
            "intensities": {key: value if math.isfinite(value) else None for key, value in self.intensities.items()},
        }


def run_train_time(request: Request) -> int:
    """Print the training time, and with --bounds the lower bounds of a paper's analysis."""
    flags = request.flags
    tokens = flags["tokens"]
    if tokens is None:
        raise ConfigError(
            "--tokens is missing; set it to the tokens that the model is trained on, as in --tokens 300e9"
        )
    if flags["achieved_tflops"] is not None and flags["hardware"] is not None:
        raise ConfigError(
            "--achieved_tflops and --hardware both set the speed; pass --achieved_tflops for a measured speed, or "
            "--hardware for a predicted one"
        )
    if flags["bounds"] and flags["hardware"] is None:
        raise ConfigError("--bounds needs --hardware, whose nominal figures it uses; set it to a file or a preset")
    _check_dense(request)
    parameters = float(num_parameters(request.config)) if flags["parameters"] is None else flags["parameters"]
    _check({"tokens": tokens, "parameters": parameters, "achieved_tflops": flags["achieved_tflops"]})
    if flags["devices"] is not None and flags["devices"] < 1:
        raise ConfigError(f"--devices is {flags['devices']}; it must be at least 1")
    if not 0 <= flags["least_efficiency"] < 1:
        raise ConfigError(
            f"--least_efficiency is {flags['least_efficiency']:g}; it is a fraction of the peak, at least 0 and below "
            "1"
        )
    answer = _answer(request, parameters, tokens)
    methods: list[Shortest] = []
    cluster = None
    if flags["bounds"]:
        hardware = request.hardware()
        most = _most_devices(hardware, flags["devices"])
        cluster = _cluster(hardware, request)
        methods = [_shortest(request, cluster, method, _batch(request), tokens, most) for method in get_args(Method)]
    if flags["json"]:
        found = {
            "parameters": parameters,
            "tokens": tokens,
            "critical_batch_tokens": critical_batch_tokens(parameters),
            "days": answer.seconds / DAY,
            "assumptions": answer.assumptions,
            "batch": _batch(request),
            "thresholds": None if cluster is None else _thresholds(cluster),
            "bounds": [each.as_json() for each in methods],
        }
        print(json.dumps(found, indent=2))
        return 0
    print(f"{count_told(parameters)} parameters on {count_told(tokens)} tokens: {answer.seconds / DAY:.1f} days")
    for line in answer.assumptions:
        print(f"  {line}")
    if cluster is not None:
        _print_shortest(request, cluster, methods, _batch(request))
    return 0


@dataclass(frozen=True)
class Answer:
    """One training time. assumptions: one sentence for each."""

    seconds: float
    assumptions: list[str]


def _answer(request: Request, parameters: float, tokens: float) -> Answer:
    """Return the time at the FLOP/s that the user measured, or else of the layout that a search finds."""
    devices = request.flags["devices"]
    achieved = _megatron(request, parameters, tokens)
    if achieved is not None:
        return Answer(
            achieved,
            [
                f"{devices:,} devices at {request.flags['achieved_tflops']:g} TFLOP/s each, as given by "
                "--achieved_tflops",
                "8 T P / (n X): every forward is recomputed and counted (Narayanan et al. 2021, section 5.1)",
            ],
        )
    if request.flags["hardware"] is None or devices is None:
        raise ConfigError(
            "no speed is given: pass --devices with --hardware, or with the --achieved_tflops of each device"
        )
    if request.flags["parameters"] is not None:
        raise ConfigError(
            "--parameters can only be used with --achieved_tflops; with --hardware, describe the model with --model"
        )
    hardware, samples = request.hardware(), _batch(request)
    config, remarks = planned_config(request, hardware, layout_open=True)
    remarks = [
        f"batches of {samples:,} samples of {config.data.sequence_length:,} tokens" + _chosen(request),
        *remarks,
    ]
    config = replace(config, batch=replace(config.batch, global_size=samples))
    best = search_speed(
        config, hardware, devices, request.given, times=measured_times(hardware, devices), effort=BEST_ALONE
    ).best.estimate
    remarks.insert(
        0,
        f"the best layout of megapipe plan search on {devices:,} x {hardware.groups[0].device.name}: "
        f"{layout_told(best.config)}, {seconds_told(best.step_seconds)} a step, without saves, failures or evaluation",
    )
    return Answer(tokens / best.tokens_per_second, remarks)


def _chosen(request: Request) -> str:
    given = "batch.global_size" in request.given
    return "" if given else ", the critical batch (GPT-3's, by the cube root of the parameters)"


def _check_dense(request: Request) -> None:
    """Raise ConfigError for a mixture of experts with formulas that assume that every token uses every parameter."""
    model, flags = request.config.model, request.flags
    formula = flags["achieved_tflops"] is not None and flags["parameters"] is None
    if model.num_experts is not None and (formula or flags["bounds"]):
        active = active_parameters(model, layers_of(request.config))
        raise ConfigError(
            f"model.num_experts is {model.num_experts}, but these formulas are for dense models; pass --parameters "
            f"{active}, the parameters that a token uses, and leave --bounds out"
        )


def _megatron(request: Request, parameters: float, tokens: float) -> float | None:
    devices, achieved = request.flags["devices"], request.flags["achieved_tflops"]
    if achieved is None:
        return None
    if devices is None:
        raise ConfigError(
            f"--devices is missing; set it to the number of devices that reach --achieved_tflops {achieved:g} each"
        )
    return training_seconds(parameters, tokens, devices, achieved * 1e12)


def _most_devices(hardware: Hardware, asked: int | None) -> int | None:
    """As many as are asked for, or as the first group has, whose nodes the analysis is of; None for any number.

    Raises ConfigError where fewer are there than asked for.
    """
    group = hardware.groups[0]
    there = None if group.num_nodes is None else group.num_nodes * group.devices_per_node
    if asked is not None and there is not None and asked > there:
        raise ConfigError(
            f"--devices is {asked:,}, but {group.name!r}, the first group of hardware {hardware.name!r}, has "
            f"{there:,}; lower --devices, or raise num_nodes of the group"
        )
    return there if asked is None else asked


def _cluster(hardware: Hardware, request: Request) -> Cluster:
    """The first group's nodes as the paper's cluster. Its bandwidths count both directions."""
    group = hardware.groups[0]
    known = [name for name in PREFERRED if name in group.device.peak_flops]
    asked = request.config.training.precision
    precision = asked if "training.precision" in request.given or not known else known[0]
    return Cluster(
        peak_flops=group.device.peak(precision),
        memory_bytes=group.device.memory_bytes,
        tensor_link=2 * group.inside.bandwidth,
        link=2 * group.outside.of_device(group.devices_per_node),
        node_size=group.devices_per_node,
    )


def _transformer(request: Request) -> Transformer:
    model = request.config.model
    return Transformer(model.num_layers, model.hidden_size, model.num_heads, request.config.data.sequence_length)


def _batch(request: Request) -> int:
    """Return the sequences per batch: as given, or the critical batch, rounded down to a multiple of the devices."""
    if "batch.global_size" in request.given:
        return request.config.batch.global_size
    model, devices = _transformer(request), request.flags["devices"] or 1
    critical = max(1, int(critical_batch_tokens(model.parameters) / model.sequence_length))
    return critical // devices * devices or critical


def _shortest(
    request: Request, cluster: Cluster, method: Method, batch: int, tokens: float, most: int | None
) -> Shortest:
    model = _transformer(request)
    try:
        layout, _ = shortest(
            model,
            cluster,
            method,
            batch,
            tokens,
            max_devices=most,
            least_efficiency=request.flags["least_efficiency"],
        )
    except ValueError as error:
        return Shortest(method, problem=str(error))
    layers = 1 if method == "modular" else model.num_layers / layout.pipeline
    data = (
        partitioned_intensity(model, layout.micro_size, layout.accumulated)
        if layout.partitioned
        else data_intensity(model, layout.micro_size, layout.accumulated)
    )
    return Shortest(
        method,
        layout,
        layout_seconds(model, cluster, layout, tokens),
        memory_bytes(model, layout),
        overheads(model, cluster, layout),
        {
            "data": data if layout.data > 1 else math.inf,
            "pipeline": pipeline_intensity(model, layers) if layout.pipeline > 1 else math.inf,
            "tensor": tensor_intensity(model, layout.tensor),
        },
    )


def _thresholds(cluster: Cluster) -> dict[str, float]:
    return {
        "inside": link_threshold(cluster.peak_flops, cluster.tensor_link),
        "outside": link_threshold(cluster.peak_flops, cluster.link),
    }


def _print_shortest(request: Request, cluster: Cluster, methods: list[Shortest], batch: int) -> None:
    limits = _thresholds(cluster)
    print(
        f"\nlower bounds from a paper's analysis with nominal peaks, not predictions\nbatches of at most {batch:,} "
        f"sequences of {request.config.data.sequence_length:,} tokens, efficiency at least "
        f"{request.flags['least_efficiency']:.0%} of the peak (Lamy-Poirier 2021)"
    )
    print(
        f"traffic between nodes is hidden by compute above an intensity of {limits['outside']:,.0f} FLOP per byte; "
        f"tensor traffic is never hidden and adds {limits['inside']:,.0f} / intensity to the time\n"
    )
    rows = []
    for each in methods:
        if each.layout is None or each.shares is None or each.intensities is None:
            print(f"{each.method}: {each.problem}")
            continue
        layout, found = each.layout, each.intensities
        sizes = (layout.devices, layout.data, layout.pipeline, layout.tensor, layout.micro_size, layout.microbatches)
        rows.append(
            [
                each.method,
                f"{each.seconds / DAY:,.1f}",
                *(f"{size:,}" for size in sizes),
                f"{each.shares.efficiency:.0%}",
                bytes_told(each.memory),
                *(f"{value:,.0f}" if math.isfinite(value) else "none" for value in found.values()),
            ]
        )
    if rows:
        columns = ["method", "days", "devices", "data", "pipeline", "tensor", "micro-batch", "micro-batches"]
        print_table(
            [*columns, "efficiency", "memory", *(f"{name} FLOP/B" for name in ("data", "pipeline", "tensor"))], rows
        )


def _check(values: dict[str, float | None]) -> None:
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"--{name} is {value:g}; it must be a finite number above 0")
