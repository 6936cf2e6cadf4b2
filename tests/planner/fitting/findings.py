"""Findings of Narayanan et al. (2021, arXiv 2104.04473) other than table 1, according to the cost model.

Published figures are given where the paper prints them; elsewhere its direction alone. All on Selene (`a100-80`), with
the table's assumptions.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from megapipe.config.memory import RecomputeConfig
from megapipe.config.parallel import ParallelConfig, ScheduleConfig, ZeroConfig
from megapipe.config.run import BatchConfig, PretrainConfig
from megapipe.layout.hardware.description import load_hardware
from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.cost.model import estimate
from megapipe.planner.fitting import A100
from megapipe.schedules.registry import find_generator

EARLY_ZERO = replace(A100.rows[0].assumptions, slow_down=2.0, tensor_by_tensor=True)
"""ZeRO-3 as Megatron-LM was compared with it in 2021: DeepSpeed 0.3, which waits for the device before each tensor's
gather, so that nothing overlaps (a slow-down of 2 is turn by turn). That is our own deduction from its code and from
what its pull request 1188 fixes, not the paper's; no number of it is fitted."""


@dataclass(frozen=True)
class Shape:
    """A GPT's layers, heads and hidden size."""

    layers: int
    heads: int
    hidden: int


GPT_530B = Shape(105, 128, 20480)
GPT_175B = Shape(96, 96, 12288)
GPT_161B = Shape(32, 128, 20480)
GPT_145B = Shape(80, 96, 12288)
GPT_91B = Shape(72, 80, 10240)
"""It has the number of parameters that figure 16 names; its shape is not documented."""


@dataclass(frozen=True)
class Layout:
    """A run of a shape: tensor and pipeline ranks, all devices, batch, micro-batch, chunks (1: no interleaving)."""

    tensor: int
    pipeline: int
    devices: int
    batch: int
    micro_size: int = 1
    chunks: int = 1
    recompute: bool = True
    zero: bool = False


def speed(estimate: Estimate) -> float:
    """Executed TFLOP/s and device."""
    return estimate.executed_flops / estimate.step_seconds / estimate.world_size / 1e12


def run(shape: Shape, layout: Layout) -> Estimate:
    """Return the model's estimate of a layout; of ZeRO-3 with `EARLY_ZERO`."""
    base = A100.rows[0].base
    stages = layout.pipeline * layout.chunks
    layers = [shape.layers // stages] * stages
    layers[0] += 1
    layers[-1] += 1
    interleaved = ScheduleConfig(name=find_generator(ScheduleConfig.name).looped, chunks=layout.chunks)
    config: PretrainConfig = replace(
        base,
        model=replace(base.model, num_layers=shape.layers, num_heads=shape.heads, hidden_size=shape.hidden),
        batch=BatchConfig(global_size=layout.batch, micro_size=layout.micro_size),
        parallel=ParallelConfig(tensor=layout.tensor, pipeline=layout.pipeline, layers_per_stage=layers),
        schedule=interleaved if layout.chunks > 1 else ScheduleConfig(),
        recompute=RecomputeConfig(method="full" if layout.recompute else "none"),
        zero=ZeroConfig(stage=3 if layout.zero else 0),
    )
    assumptions = EARLY_ZERO if layout.zero else A100.rows[0].assumptions
    return estimate(config, load_hardware("a100-80"), world_size=layout.devices, assumptions=assumptions)


def interleaving_gains() -> dict[int, float]:
    """By batch size, how much faster two chunks are than one: 175B on 96 GPUs, t 8, p 12 (figure 12)."""
    batches = (12, 24, 36, 48, 60)
    return {
        batch: speed(run(GPT_175B, Layout(8, 12, 96, batch, chunks=2)))
        / speed(run(GPT_175B, Layout(8, 12, 96, batch)))
        - 1.0
        for batch in batches
    }


def tensor_against_pipeline(batch: int) -> dict[int, float]:
    """By tensor size, TFLOP/s of 161B on 64 GPUs, the rest a pipeline (figure 13)."""
    return {tensor: speed(run(GPT_161B, Layout(tensor, 64 // tensor, 64, batch))) for tensor in (2, 4, 8, 16, 32)}


def micro_sizes(batch: int) -> dict[int, float]:
    """By micro-batch size, TFLOP/s of a model of about 91B on 64 GPUs, t 8, p 8 (figure 16, section 5.5)."""
    return {size: speed(run(GPT_91B, Layout(8, 8, 64, batch, size))) for size in (1, 2, 4, 8)}


def recomputation(batch: int) -> tuple[Estimate, Estimate]:
    """145B on 128 GPUs, t 8, p 16: without recomputation and with it (figure 17)."""
    layout = Layout(8, 16, 128, batch)
    return run(GPT_145B, replace(layout, recompute=False)), run(GPT_145B, layout)


@dataclass(frozen=True)
class ZeroRow:
    """Two rows of table 2: ZeRO-3 and PTD-P (pipeline, tensor and data parallelism).

    devices, micro_size: of ZeRO-3, whose GPUs have one micro-batch each. pipeline, ptd_devices, batch: of PTD-P, whose
    t is 8 and whose micro-batches are 1. zero, ptd: published TFLOP/s and GPU.
    """

    name: str
    shape: Shape
    devices: int
    micro_size: int
    zero: float
    pipeline: int
    ptd_devices: int
    batch: int
    ptd: float


ZERO_ROWS = (
    ZeroRow("175B", GPT_175B, 384, 4, 144.0, 12, 384, 1536, 153.0),
    ZeroRow("175B", GPT_175B, 768, 2, 88.0, 12, 768, 1536, 149.0),
    ZeroRow("175B", GPT_175B, 1536, 1, 44.0, 12, 1536, 1536, 141.0),
    ZeroRow("530B", GPT_530B, 640, 4, 138.0, 35, 560, 2240, 171.0),
    ZeroRow("530B", GPT_530B, 1120, 2, 98.0, 35, 1120, 2240, 167.0),
    ZeroRow("530B", GPT_530B, 2240, 1, 48.0, 35, 2240, 2240, 159.0),
)


@cache
def zero_against_pipeline(row: ZeroRow) -> tuple[float, float]:
    """TFLOP/s of both by the model: PTD-P with the chunks that it finds fastest of those that fit."""
    batch = row.devices * row.micro_size
    sharded = run(row.shape, Layout(1, 1, row.devices, batch, row.micro_size, zero=True))
    choices = (
        Layout(8, row.pipeline, row.ptd_devices, row.batch, chunks=chunks)
        for chunks in range(2, row.shape.layers // row.pipeline + 1)
        if row.shape.layers % (row.pipeline * chunks) == 0
    )
    fitting = [each for each in (run(row.shape, choice) for choice in choices) if each.fits]
    return speed(sharded), max(speed(each) for each in fitting)


def findings_lines() -> Iterator[str]:
    """The table of findings, as docs/cost_model.md has it."""
    yield "| finding | published | model |"
    yield "|---|---|---|"
    gains = ", ".join(f"{batch}: {gain:+.0%}" for batch, gain in interleaving_gains().items())
    yield f"| interleaving, 175B on 96 GPUs, by batch | faster; the gain decreases with the batch size | {gains} |"
    for batch in (32, 128):
        split = ", ".join(f"{tensor}: {tflops:.0f}" for tensor, tflops in tensor_against_pipeline(batch).items())
        yield f"| tensor size at 64 GPUs, 161B, batch {batch}, TFLOP/s | best at 8 | {split} |"
    for batch in (128, 512):
        sizes = ", ".join(f"{size}: {tflops:.0f}" for size, tflops in micro_sizes(batch).items())
        yield f"| micro-batch size, about 91B on 64 GPUs, batch {batch}, TFLOP/s | best at 2 | {sizes} |"
    without, with_it = recomputation(128)
    yield (
        "| recomputation, 145B on 128 GPUs, batch 128 | up to 33% slower; larger batches only fit with it | "
        f"{without.step_seconds / with_it.step_seconds - 1:+.0%} sequences/s, "
        f"{without.peak_bytes / 1e9:.0f} to {with_it.peak_bytes / 1e9:.0f} GB |"
    )
    for row in ZERO_ROWS:
        sharded, together = zero_against_pipeline(row)
        others = "" if row.devices == row.ptd_devices else f" and {row.ptd_devices}"
        yield (
            f"| ZeRO-3 and PTD-P, {row.name} on {row.devices}{others} GPUs, TFLOP/s | "
            f"{row.zero:.0f} and {row.ptd:.0f} | {sharded:.0f} and {together:.0f} |"
        )
