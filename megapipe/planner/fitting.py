"""Fit a machine's efficiency to rows of training speed, and compute the errors of predictions with it.

The free parameters are the shares of nominal figures that matrix products, memory and links reach. They minimize the
squared errors of log speed. The errors have no analytic derivative, so slopes are finite differences over one step.

Five rows of a table do not determine three shares: only the row of the smallest model depends much on the share of
memory. So each share has a prior from published rates of single kernels and collectives, none of which is a row of
training speed. Its logarithm is assumed to be normally distributed around the logarithm of their geometric mean.
Fitting is then ridge regression in logarithms (Hoerl and Kennard 1970, doi 10.1080/00401706.1970.10488634).

`half_size` and `launch` of a device come only from published rates of matrix products, because rows of training speed
hardly depend on how much slower small products are. All are cuBLAS products of square matrices: TFLOP/s by size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import exp, fsum, isfinite, log
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union

import numpy as np

from megapipe.config import ConfigError, nearest
from megapipe.config.bert import BertPretrainConfig
from megapipe.config.field_types import PositiveFloat, PositiveInt
from megapipe.config.files import read_text
from megapipe.config.load import parse_as, read_dataclass
from megapipe.config.memory import RecomputeConfig
from megapipe.config.model import ModelConfig
from megapipe.config.parallel import ParallelConfig, ScheduleConfig, ZeroConfig
from megapipe.config.run import BatchConfig, DataConfig, PretrainConfig, TrainingConfig
from megapipe.layout.hardware.description import Device, Efficiency, Hardware, load_hardware
from megapipe.layout.hardware.roofline import Product, fit_efficiency
from megapipe.planner.cost.estimate import Assumptions, Estimate
from megapipe.planner.cost.layer_times import UNFUSED_LOSS_BYTES
from megapipe.planner.cost.model import estimate
from megapipe.schedules.actions import Floats
from megapipe.schedules.registry import find_generator

WIDTH = 0.3
"""Standard deviation of the logarithm of a share, for all shares and machines: about that of rates in `MEMORY`."""
ROW_ERROR = 0.03
"""Standard deviation of a row's error that no share explains: about the size of the errors of published rows."""


@dataclass(frozen=True)
class Rate:
    """A published rate. reached, nominal: in the same unit, such as bytes/s. source: where `reached` was published."""

    what: str
    reached: float
    nominal: float
    source: str

    @property
    def share(self) -> float:
        """Return the fraction of the nominal rate that was reached."""
        return self.reached / self.nominal


A100_40_BANDWIDTH, A100_80_BANDWIDTH, H100_BANDWIDTH = 1555e9, 2039e9, 3.35e12
"""Memory bandwidths in bytes per second, from the manufacturers' data sheets (SXM)."""
_APEX = "github.com/NVIDIA/apex, pull request 1037, on a GA100 (taken to be the A100 of 40 GB)"
_PYTORCH = "github.com/pytorch/pytorch, pull request 168335"
_QUACK = "github.com/Dao-AILab/quack, media/2025-07-10-membound-sol.md"
_LIGER = "github.com/linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv, megatron-unfused, vocabulary 131072"
_LOSS_LOGITS, _LOSS_SECONDS = 8192 * 131072, 21.25e-3
"""From the row `backward` of June 2026 in that file, which the benchmark's script times together with the forward:
2048 x 4 tokens in bf16 on an 80 GB H100."""
MEMORY: Mapping[str, tuple[Rate, ...]] = {
    "a100-80": (
        Rate("reads", 1.80e12, A100_80_BANDWIDTH, "forums.developer.nvidia.com, thread 339083"),
        Rate("layer norm, forward", 895.8e9, A100_40_BANDWIDTH, _APEX),
        Rate("layer norm, backward", 572.2e9, A100_40_BANDWIDTH, _APEX),
        Rate("layer norm, forward, rewritten", 1258.0e9, A100_40_BANDWIDTH, _APEX),
        Rate("layer norm, backward, rewritten", 1163.4e9, A100_40_BANDWIDTH, _APEX),
    ),
    "h100": (
        Rate("softmax over 131072, written by hand", 3.01e12, H100_BANDWIDTH, _QUACK),
        Rate("softmax over 262144, compiled", 1.89e12, H100_BANDWIDTH, _QUACK),
        Rate("layer norm, forward, compiled", 1600e9, H100_BANDWIDTH, _PYTORCH),
        Rate("layer norm, forward, compiled, tuned", 2000e9, H100_BANDWIDTH, _PYTORCH),
        Rate("Megatron-LM's loss", _LOSS_LOGITS * UNFUSED_LOSS_BYTES / _LOSS_SECONDS, H100_BANDWIDTH, _LIGER),
    ),
}
"""Rates of memory-bound kernels such as those of training, by preset."""
LINKS: Mapping[str, tuple[Rate, ...]] = {
    "a100-80": (
        Rate("all-reduce of 8 in a node", 232.5e9, 300e9, "github.com/NVIDIA/nccl, issue 1048"),
        Rate("all-reduce of DGX A100 nodes", 192e9, 200e9, "github.com/NVIDIA/nccl, issue 812, NVIDIA's figure"),
    ),
    "h100": (
        Rate("a ring of 8 in a node", 370e9, 450e9, "github.com/NVIDIA/nccl-tests, issue 212, NVIDIA's figure"),
        Rate("an adapter, 46 to 48", 47e9, 50e9, "github.com/NVIDIA/nccl-tests, issue 290, NVIDIA's figure"),
    ),
}
"""Rates of large messages in NCCL's own benchmark, with nothing else running, by preset."""
A100_FP16 = {
    512: 23.831273, 640: 39.384616, 768: 63.195428, 896: 78.051553, 1024: 99.864382, 1152: 135.726544,
    1280: 157.538463, 1408: 155.765024, 1536: 181.484314, 1664: 179.978245, 1792: 175.616000, 1920: 209.454544,
    2048: 204.600198, 2176: 201.236485, 2304: 248.831991, 2432: 222.971938, 2560: 246.375951, 2688: 219.266228,
    2816: 238.329010, 2944: 256.886772, 3072: 239.928400, 3200: 255.999988, 3328: 239.970975, 3456: 258.402470,
    3584: 265.237152, 3712: 250.369276, 3840: 250.775504, 3968: 248.521248, 4096: 264.208112,
}  # fmt: skip
"""TFLOP/s by size of one A100-SXM4-40GB, one call at a time: github.com/xanderdunn/fused-gelu-testing, README of early
2023, which shows the output of triton-lang.org's tutorial on matrix products. Its sizes 256 and 384 are left out: they
take 9.2 and 11.3 microseconds, all of it launch time."""
H100_BF16 = {4096: 716.0, 6144: 741.1, 8192: 797.8}
"""TFLOP/s by size of one H100 SXM, mean of consecutive calls: github.com/pranjalssh/fast.cu, README (the first size
from its later version, the others from its earlier version)."""


@dataclass(frozen=True)
class Belief:
    """The prior of a share. mean: its most likely value. origin: where the value comes from, in a few words."""

    mean: float
    origin: str


@dataclass(frozen=True)
class Prior:
    """Priors of all shares. beliefs: by parameter name, in the order of the parameters. width: see `WIDTH`."""

    beliefs: Mapping[str, Belief]
    width: float = WIDTH

    def errors(self, point: Floats) -> Floats:
        """Return the distances of a point [parameters] from the means, in the unit of a row's error."""
        means = np.array([belief.mean for belief in self.beliefs.values()])
        return np.log(point / means) * (ROW_ERROR / self.width)

    def as_json(self) -> dict[str, Any]:
        """Return the priors as JSON data."""
        means = {name: {"mean": belief.mean, "origin": belief.origin} for name, belief in self.beliefs.items()}
        return {"width": self.width, "row_error": ROW_ERROR, "shares": means}


def prior_of(name: str) -> Prior:
    """Return the prior of a preset, one of the keys of `MEMORY`."""
    memory = _middle(MEMORY[name], "kernels that read and write")
    return Prior({"ceiling": _products(name), "memory": memory, "links": _middle(LINKS[name], "collectives alone")})


def _middle(rates: Sequence[Rate], what: str) -> Belief:
    mean = exp(fsum(log(rate.share) for rate in rates) / len(rates))
    return Belief(mean, f"{len(rates)} published {what}")


def _products(name: str) -> Belief:
    """Return the prior of the ceiling, from the same rates of products that `half_size` comes from."""
    device = load_hardware(name).groups[0].device
    if name == "a100-80":
        return Belief(law_of(device, "fp16", A100_FP16).ceiling, f"{len(A100_FP16)} published products")
    _, ceiling = half_size_and_ceiling(device, "bf16", H100_BF16, device.efficiency.launch)
    return Belief(ceiling, f"{len(H100_BF16)} published products")


def law_of(device: Device, dtype: str, rates: Mapping[int, float]) -> Efficiency:
    """Fit ceiling, half_size and launch to products that were measured one at a time. rates: TFLOP/s by size."""
    products = [Product(size, size, size, _seconds(size, rate)) for size, rate in rates.items()]
    return fit_efficiency(device, dtype, products)


def half_size_and_ceiling(
    device: Device, dtype: str, rates: Mapping[int, float], launch: float
) -> tuple[float, float]:
    """Fit half_size, and the share of the peak that an infinitely large product would reach, to products of about
    three sizes: by the law of `Efficiency`, a line through the cube roots of seconds per FLOP, by 1 / size.

    rates: TFLOP/s by size. launch: known seconds of a launch.
    """
    sizes = np.array(list(rates), dtype=np.float64)
    seconds = np.array([_seconds(size, rate) for size, rate in rates.items()]) - launch
    slope, intercept = np.polyfit(1.0 / sizes, (seconds / (2.0 * sizes**3)) ** (1.0 / 3.0), 1)
    return float(slope / intercept), float(intercept**-3 / device.peak(dtype))


def _seconds(size: int, rate: float) -> float:
    return 2.0 * size**3 / (rate * 1e12)


DEPENDENT = 1e-9
"""Singular values of the slopes below this fraction of the largest one count as rounding errors."""


class Parameter(NamedTuple):
    """A free parameter: its name, bounds, start of the search, and step of the finite difference for its slope."""

    name: str
    low: float
    high: float
    start: float
    step: float


PARAMETERS = (
    Parameter("ceiling", 0.05, 1.0, 0.7, 0.02),
    Parameter("memory", 0.05, 1.0, 0.7, 0.05),
    Parameter("links", 0.05, 1.0, 0.7, 0.05),
)
"""Free parameters: shares of the nominal figures that matrix products, memory and links reach. See `Efficiency`."""


class Optimum(NamedTuple):
    """The point with the least sum of squared errors, and the slopes of the errors there [errors, parameters]."""

    point: Floats
    slopes: Floats

    def spreads(self, error: float) -> tuple[float, ...]:
        """Return the standard deviation of each parameter if that of each error is `error`, by linear approximation.

        It is infinite for parameters that no error depends on. All are infinite if the slopes are linearly dependent.
        """
        deviations = np.full(len(self.point), np.inf)
        used = self.slopes.any(axis=0)
        slopes = self.slopes[:, used]
        if used.any() and np.linalg.matrix_rank(slopes, tol=DEPENDENT * np.linalg.norm(slopes, 2)) == used.sum():
            deviations[used] = error * np.sqrt(np.diag(np.linalg.inv(slopes.T @ slopes)))
        return tuple(map(float, deviations))


def fit_parameters(errors: Callable[[Floats], Floats], parameters: Sequence[Parameter]) -> Optimum:
    """Return the parameters with the least sum of squared errors near their start, within their bounds.

    errors: function from a point [parameters] to its errors [errors].
    """
    from scipy.optimize import least_squares  # the import takes a quarter of a second

    low, high, start, step = np.array([each[1:] for each in parameters]).T
    solution = least_squares(
        errors, start, bounds=(low, high), x_scale=step, method="dogbox", diff_step=step / start, ftol=1e-6
    )
    return Optimum(solution.x, solution.jac)


FittingRow = Union["PublishedRun", "MeasuredRow"]
"""A run and its measured speed."""


@dataclass(frozen=True)
class RowResult:
    """A row and its prediction. left_out: its error by a fit without this row; None for rows that are not fitted."""

    name: str
    source: str
    measured: float
    predicted: float
    left_out: float | None
    estimate: Estimate

    @property
    def error(self) -> float:
        """Return predicted / measured speed - 1."""
        return self.predicted / self.measured - 1.0

    def as_json(self) -> dict[str, Any]:
        """Return the figures of the row as JSON data, with the assumed micro-batch size and chunks of the run."""
        config = self.estimate.config
        return {
            **{name: getattr(self, name) for name in ("name", "source", "measured", "predicted", "error")},
            "leave_one_out_error": self.left_out,
            "micro_size": config.batch.micro_size,
            "chunks": config.schedule.chunks,
            "step_time_s": self.estimate.step_seconds,
        }


@dataclass(frozen=True)
class FitResult:
    """Fitted parameters, and predictions of rows with them.

    spreads: standard deviation of each of `PARAMETERS` if that of a row's error is `ROW_ERROR`; infinite if the rows
    do not determine it. fitted: rows used for the fit. unfitted: other rows. prior: None if the fit had none.
    """

    hardware: Hardware
    efficiency: Efficiency
    spreads: tuple[float, ...]
    fitted: tuple[RowResult, ...]
    unfitted: tuple[RowResult, ...]
    prior: Prior | None = None

    @property
    def mean_error(self) -> float:
        """Return the mean absolute error of the fitted rows."""
        return float(np.mean([abs(row.error) for row in self.fitted]))

    @property
    def worst_error(self) -> float:
        """Return the largest absolute error of the fitted rows."""
        return max(abs(row.error) for row in self.fitted)

    @property
    def left_out_errors(self) -> tuple[float, ...]:
        """Return the absolute error of each fitted row, predicted from the other rows; may be empty."""
        return tuple(abs(row.left_out) for row in self.fitted if row.left_out is not None)

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON data."""
        left_out, names = self.left_out_errors, [each.name for each in PARAMETERS]
        deviations = [spread if isfinite(spread) else None for spread in self.spreads]
        return {
            "hardware": self.hardware.name,
            "parameters": {name: getattr(self.efficiency, name) for name in names},
            "standard_deviations": dict(zip(names, deviations, strict=True)),
            "prior": None if self.prior is None else self.prior.as_json(),
            "mean_error": self.mean_error,
            "worst_error": self.worst_error,
            "leave_one_out_mean_error": float(np.mean(left_out)) if left_out else None,
            "leave_one_out_worst_error": max(left_out) if left_out else None,
            "rows": [row.as_json() for row in self.fitted],
            "rows_not_fitted": [row.as_json() for row in self.unfitted],
        }


def with_shares(hardware: Hardware, shares: Mapping[str, float]) -> Hardware:
    """Return the machine with these values of `PARAMETERS` in the efficiency of every device, otherwise unchanged."""
    return hardware.with_devices(lambda device: replace(device, efficiency=replace(device.efficiency, **shares)))


def fit(
    rows: Sequence[FittingRow],
    hardware: Hardware,
    unfitted: Sequence[FittingRow] = (),
    *,
    prior: Prior | None = None,
    leave_one_out: bool = True,
) -> FitResult:
    """Fit the efficiency of a machine to rows, by least squares of log speed.

    half_size and launch do not change. unfitted: rows that are only predicted. prior: prior knowledge of the shares;
    their distance from it counts like a row's error. leave_one_out: also fit without each row, to measure how well the
    other rows predict it. Raises ConfigError if there are fewer rows than parameters (with leave_one_out, than
    parameters plus 1), or no layout of a row fits in memory.
    """
    needed = len(PARAMETERS) + leave_one_out
    if len(rows) < needed:
        raise ConfigError(
            f"{len(rows)} rows given: {len(PARAMETERS)} parameters ({', '.join(each.name for each in PARAMETERS)}) "
            f"need {needed} or more; measure more layouts"
        )
    best = _optimize(rows, hardware, prior)
    machine = _machine(hardware, best.point)
    fitted = []
    for index, row in enumerate(rows):
        left_out = None
        if leave_one_out:
            without = _optimize([*rows[:index], *rows[index + 1 :]], hardware, prior)
            left_out = judge(row, _machine(hardware, without.point)).error
        fitted.append(judge(row, machine, left_out))
    efficiency, spreads = machine.groups[0].device.efficiency, best.spreads(ROW_ERROR)
    predicted = tuple(judge(row, machine) for row in unfitted)
    return FitResult(machine, efficiency, spreads, tuple(fitted), predicted, prior)


def judge(row: FittingRow, hardware: Hardware, left_out: float | None = None) -> RowResult:
    """Return a row and its prediction on a machine, without fitting."""
    estimate = row.predict(hardware)
    predicted, measured = row.speeds(estimate)
    return RowResult(row.name, row.source, measured, predicted, left_out, estimate)


def _machine(hardware: Hardware, point: Floats) -> Hardware:
    return with_shares(hardware, {each.name: float(value) for each, value in zip(PARAMETERS, point, strict=True)})


def _optimize(rows: Sequence[FittingRow], hardware: Hardware, prior: Prior | None) -> Optimum:
    """Return the shares with the least sum of squared log errors of rows, and of distances from the prior."""

    def errors(point: Floats) -> Floats:
        machine = _machine(hardware, point)
        speeds = (row.speeds(row.predict(machine)) for row in rows)
        log_errors = [np.log(predicted / measured) for predicted, measured in speeds]
        return np.concatenate([log_errors, [] if prior is None else prior.errors(point)])

    return fit_parameters(errors, PARAMETERS)


def report_lines(result: FitResult, unit: str) -> Iterator[str]:
    """Yield the report of a fit: parameters before and after it, with standard deviations in percent, and rows with
    their errors. unit: unit of speeds."""
    values = ", ".join(f"{each.name} {getattr(result.efficiency, each.name):.3f}" for each in PARAMETERS)
    yield f"{len(PARAMETERS)} free parameters of {result.hardware.name}: {values}"
    yield f"{'share':<10}{'before':>16}{'fitted':>17}  +-: one standard deviation, if that of a row is {ROW_ERROR:.0%}"
    for parameter, spread in zip(PARAMETERS, result.spreads, strict=True):
        share = getattr(result.efficiency, parameter.name)
        after = f"{share:.3f} +-{spread / share:4.0%}" if isfinite(spread) else f"{share:.3f}, not determined"
        before, origin = "unknown", ""
        if result.prior is not None:
            belief = result.prior.beliefs[parameter.name]
            before, origin = f"{belief.mean:.3f} +-{result.prior.width:4.0%}", f"  before: {belief.origin}"
        yield f"{parameter.name:<10}{before:>16}{after:>17}{origin}"
    yield f"{'row':<10}{unit:>10}{'predicted':>11}{'error':>9}{'left out':>10}  assumed"
    yield from map(_row_line, result.fitted)
    yield f"mean error {result.mean_error:.1%}, worst {result.worst_error:.1%}"
    if left_out := result.left_out_errors:
        yield f"left out: mean error {np.mean(left_out):.1%}, worst {max(left_out):.1%}"
    if result.unfitted:
        yield "not fitted, only predicted:"
        yield from (f"{_row_line(row)}; {row.source}" for row in result.unfitted)


def _row_line(row: RowResult) -> str:
    config = row.estimate.config
    left_out = "" if row.left_out is None else f"{row.left_out:+.1%}"
    chunks = "" if config.schedule.chunks is None else f", {config.schedule.chunks} chunks"
    figures = f"{row.name:<10}{row.measured:>10.4g}{row.predicted:>11.4g}{row.error:>+9.1%}{left_out:>10}"
    return f"{figures}  micro-batch {config.batch.micro_size}{chunks}"


H100_TABLE = "Megatron-LM, table of training speed on H100"
"""The table is an image in the README of Megatron-LM; four more rows of it could not be read."""
SC21 = "Narayanan et al. 2021, arXiv 2104.04473, table 1"
"""Five rows are from the paper, the others from two transcriptions of it, which agree with it and each other."""
MICRO_SIZES = (1, 2, 4, 8)
"""Micro-batch sizes to try, in samples."""


@dataclass(frozen=True)
class PublishedRun:
    """One row of a table, as `fit` accepts it.

    source: publication of the speed. counts: counted FLOPs: those of the model, or all executed ones, including
    recomputation. base: configuration fields that all runs of the table share. assumptions: the same for properties of
    the implementation. heads, hidden, layers: sizes of the model. tensor, pipeline, devices, batch: sizes of the run;
    batch in samples per step. tflops: speed in TFLOP/s per device. pieces: tensor ranks gather and scatter tokens in
    one piece per rank, and these transfers overlap with matrix products.
    """

    source: str
    counts: Literal["model", "executed"]
    base: PretrainConfig
    assumptions: Assumptions
    name: str
    heads: int
    hidden: int
    layers: int
    tensor: int
    pipeline: int
    devices: int
    batch: int
    tflops: float
    pieces: bool = field(default=False, kw_only=True)

    def predict(self, hardware: Hardware) -> Estimate:
        """Return the fastest of the candidates that fit in memory. Raises ConfigError if none fits."""
        estimates = [estimate(each, hardware, assumptions=self.assumptions) for each in self.candidates()]
        fitting = [each for each in estimates if each.fits]
        if not fitting:
            raise ConfigError(
                f"row {self.name}: none of {len(estimates)} layouts fits the memory of "
                f"{hardware.name!r}; use devices with more memory"
            )
        return min(fitting, key=lambda each: each.step_seconds)

    def speeds(self, estimate: Estimate) -> tuple[float, float]:
        """Return predicted and published TFLOP/s per device."""
        flops = estimate.model_flops if self.counts == "model" else estimate.executed_flops
        return flops / estimate.step_seconds / estimate.world_size / 1e12, self.tflops

    def candidates(self) -> Iterator[PretrainConfig]:
        """Yield the row's run with every possible micro-batch size and number of chunks; the tables omit them."""
        data = self.devices // (self.tensor * self.pipeline)
        sequence = self.base.parallel.sequence and self.tensor > 1
        pieces = self.tensor if self.pieces and sequence else 1
        model = replace(self.base.model, num_layers=self.layers, hidden_size=self.hidden, num_heads=self.heads)
        parallel = ParallelConfig(
            tensor=self.tensor, pipeline=self.pipeline, data=data, sequence=sequence, sequence_chunks=pieces
        )
        run, interleaved = replace(self.base, model=model), find_generator(ScheduleConfig.name).looped
        counts = range(2, self.layers // self.pipeline + 1) if self.pipeline > 1 else (1,)
        for micro_size, chunks in product(MICRO_SIZES, counts):
            stages = self.pipeline * chunks
            # Interleaving requires that layers and micro-batches divide evenly.
            if self.layers % stages or self.batch % (micro_size * data * self.pipeline):
                continue
            # The first stage also has the embedding, and the last one the head.
            sizes = [self.layers // stages + (stage == 0) + (stage == stages - 1) for stage in range(stages)]
            yield replace(
                run,
                batch=BatchConfig(global_size=self.batch, micro_size=micro_size),
                parallel=replace(parallel, layers_per_stage=sizes),
                schedule=ScheduleConfig(name=interleaved, chunks=chunks) if chunks > 1 else ScheduleConfig(),
            )


@dataclass(frozen=True)
class PublishedTable:
    """Runs on one machine. rows: runs that parameters are fitted to. unfitted: runs that are only predicted."""

    name: str
    hardware: str
    title: str
    rows: tuple[PublishedRun, ...]
    unfitted: tuple[PublishedRun, ...] = ()


_A100_MODEL = ModelConfig(vocabulary_size=51200, max_positions=2048, activation="gelu_tanh", attention="unfused")
_H100_MODEL = ModelConfig(vocabulary_size=131072, max_positions=4096, activation="gelu_tanh", attention="sdpa")
_on_a100 = partial(
    PublishedRun,
    SC21,
    "executed",
    PretrainConfig(
        model=replace(_A100_MODEL, attention_dropout=0.1, hidden_dropout=0.1, embedding_dropout=0.1),
        data=DataConfig(sequence_length=2048),
        training=TrainingConfig(precision="fp16"),
        recompute=RecomputeConfig(method="full"),
    ),
    Assumptions(scattered_sends=True, waits_for_sends=True, megatron_kernels=True),
)
_on_h100 = partial(
    PublishedRun,
    H100_TABLE,
    "model",
    PretrainConfig(
        model=_H100_MODEL,
        data=DataConfig(sequence_length=4096),
        training=TrainingConfig(precision="bf16"),
        zero=ZeroConfig(stage=1),
        parallel=ParallelConfig(sequence=True),
    ),
    Assumptions(gathers_beside_forward=True, megatron_kernels=True),
    pieces=True,
)
A100 = PublishedTable(
    name="sc21",
    hardware="a100-80",
    title="GPT on A100: " + SC21,
    rows=(
        _on_a100("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137.0),
        _on_a100("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142.0),
        _on_a100("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138.0),
        _on_a100("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148.0),
        _on_a100("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163.0),
    ),
    unfitted=(
        _on_a100("3.6B", 32, 3072, 30, 2, 1, 64, 512, 138.0),
        _on_a100("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135.0),
        _on_a100("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 140.0),
        _on_a100("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 155.0),
        _on_a100("1008B", 160, 25600, 128, 8, 64, 3072, 3072, 163.0),
    ),
)
H100 = PublishedTable(
    name="h100",
    hardware="h100",
    title="GPT on H100: " + H100_TABLE,
    rows=(
        _on_h100("1.7B", 16, 2048, 24, 1, 1, 48, 192, 408.8),
        _on_h100("16B", 48, 6144, 32, 4, 1, 192, 192, 489.1),
        _on_h100("70B", 64, 8192, 84, 8, 2, 768, 384, 419.7),
        _on_h100("177B", 96, 12288, 96, 8, 6, 2304, 1152, 432.8),
        _on_h100("462B", 144, 18432, 112, 8, 16, 6144, 3072, 459.9),
    ),
)
TABLES = {table.name: table for table in (A100, H100)}
"""Tables of published rows, by name."""


def fit_table(name: str) -> FitResult:
    """Fit a machine to a table of published rows, with its prior. Raises ConfigError for an unknown name."""
    table = find_table(name)
    hardware, prior = load_hardware(table.hardware), prior_of(table.hardware)
    return fit(table.rows, hardware, table.unfitted, prior=prior)


def find_table(name: str) -> PublishedTable:
    """Return a table of published rows by its name. Raises ConfigError for an unknown name."""
    if name not in TABLES:
        raise ConfigError(f"unknown rows {name!r}{nearest(name, TABLES)} (known: {', '.join(TABLES)})")
    return TABLES[name]


LARGEST_FILE = 1_000_000
"""Maximum number of characters of a file of rows."""


@dataclass(frozen=True)
class WrittenRow:
    """A row of a user's file. config: configuration file, relative to this file. overrides: fields to change in it."""

    name: str
    config: str
    devices: PositiveInt
    step_seconds: PositiveFloat
    overrides: dict[str, Any] = field(default_factory=dict)
    model: Literal["gpt", "bert"] = "gpt"


@dataclass(frozen=True)
class RowsFile:
    """A user's file of measured rows."""

    rows: tuple[WrittenRow, ...]


@dataclass(frozen=True)
class MeasuredRow:
    """A run and its measured step time in seconds. Its speed is in tokens per second."""

    name: str
    config: PretrainConfig
    devices: int
    step_seconds: float
    source: str

    def predict(self, hardware: Hardware) -> Estimate:
        """Return the estimate on a machine, even if the run does not fit in memory by prediction, because it ran."""
        return estimate(self.config, hardware, world_size=self.devices)

    def speeds(self, estimate: Estimate) -> tuple[float, float]:
        """Return predicted and measured tokens per second."""
        predicted = estimate.tokens_per_second
        return predicted, predicted * estimate.step_seconds / self.step_seconds


def read_rows(path: str) -> tuple[MeasuredRow, ...]:
    """Return the rows of a file. Raises a ConfigError that names every wrong row."""
    text = read_text(Path(path), ConfigError, "choose a YAML file with measured rows", LARGEST_FILE)
    problems: list[str] = []
    rows = []
    for index, row in enumerate(read_dataclass(RowsFile, text, path, LARGEST_FILE).rows):
        overrides = [f"--{name}={value}" for name, value in row.overrides.items()]
        arguments = ["--config", str(Path(path).parent / row.config), *overrides]
        try:
            config = parse_as(BertPretrainConfig if row.model == "bert" else PretrainConfig, arguments)
            rows.append(MeasuredRow(row.name, config, row.devices, row.step_seconds, f"measured, {path}"))
        except ConfigError as error:
            problems += [f"{path}: rows[{index}] {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return tuple(rows)
