"""What Narayanan et al. (2021, arXiv 2104.04473) found beside their table 1, as the cost model sees it.

Published figures stand where they were read; elsewhere the paper's direction alone. All on Selene (`a100-80`), with
the table's assumptions.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megapipe.config.parallel import ParallelConfig
from megapipe.config.recompute import RecomputeConfig
from megapipe.config.run import BatchConfig, PretrainConfig
from megapipe.config.schedule import ScheduleConfig
from megapipe.config.zero import ZeroConfig
from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.cost.model import estimate
from megapipe.planner.fitting.published import A100
from megapipe.planner.hardware.reader import load_hardware

NO_OVERLAP = 2.0
"""Slow-down under which compute and communication take turns."""


@dataclass(frozen=True)
class Shape:
    """A GPT's layers, heads and hidden size."""

    layers: int
    heads: int
    hidden: int


GPT_175B = Shape(96, 96, 12288)
GPT_161B = Shape(32, 128, 20480)
GPT_145B = Shape(80, 96, 12288)
GPT_88B = Shape(48, 96, 12288)


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


def speed(found: Estimate) -> float:
    """Executed TFLOP/s and device."""
    return found.executed_flops / found.step_seconds / found.world_size / 1e12


def run(shape: Shape, layout: Layout) -> Estimate:
    """What the model says of a layout. Under ZeRO-3 nothing overlaps."""
    base = A100.base
    stages = layout.pipeline * layout.chunks
    layers = [shape.layers // stages] * stages
    layers[0] += 1
    layers[-1] += 1
    interleaved = ScheduleConfig(name="interleaved_1f1b", chunks=layout.chunks)
    config: PretrainConfig = replace(
        base,
        model=replace(base.model, num_layers=shape.layers, num_heads=shape.heads, hidden_size=shape.hidden),
        batch=BatchConfig(global_size=layout.batch, micro_size=layout.micro_size),
        parallel=ParallelConfig(tensor=layout.tensor, pipeline=layout.pipeline, layers_per_stage=layers),
        schedule=interleaved if layout.chunks > 1 else ScheduleConfig(),
        recompute=RecomputeConfig(method="full" if layout.recompute else "none"),
        zero=ZeroConfig(stage=3 if layout.zero else 0),
    )
    assumptions = replace(A100.assumptions, slow_down=NO_OVERLAP) if layout.zero else A100.assumptions
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
    """By micro-batch size, TFLOP/s of a model of about 90B on 64 GPUs, t 8, p 8 (figure 16)."""
    return {size: speed(run(GPT_88B, Layout(8, 8, 64, batch, size))) for size in (1, 2, 4, 8)}


def recomputation(batch: int) -> tuple[Estimate, Estimate]:
    """145B on 128 GPUs, t 8, p 16: without recomputation and with it (figure 17)."""
    layout = Layout(8, 16, 128, batch)
    return run(GPT_145B, replace(layout, recompute=False)), run(GPT_145B, layout)


ZERO_PUBLISHED = {384: (144.0, 153.0), 768: (88.0, 149.0), 1536: (44.0, 141.0)}
"""By GPUs, TFLOP/s of ZeRO-3 and of tensor, pipeline and data parallelism together: 175B, batch 1536 (table 2)."""


def zero_against_pipeline() -> dict[int, tuple[float, float]]:
    """The same by the model, whose ZeRO-3 falls behind by less.

    ZeRO-3 takes the whole share of a GPU as one micro-batch; the other has t 8, p 12 and the micro-batch size and
    chunks that the model finds fastest.
    """
    found = {}
    for devices in ZERO_PUBLISHED:
        sharded = run(GPT_175B, Layout(1, 1, devices, 1536, 1536 // devices, zero=True))
        replicas = devices // 96
        choices = (
            Layout(8, 12, devices, 1536, size, chunks)
            for size in (1, 2, 4)
            for chunks in (2, 4, 8)
            if 1536 // replicas // size % 12 == 0
        )
        fitting = [each for each in (run(GPT_175B, choice) for choice in choices) if each.fits]
        found[devices] = speed(sharded), max(speed(each) for each in fitting)
    return found


def findings_lines() -> Iterator[str]:
    """The table of findings, as docs/cost_model.md has it."""
    yield "| finding | published | model |"
    yield "|---|---|---|"
    gains = ", ".join(f"{batch}: {gain:+.0%}" for batch, gain in interleaving_gains().items())
    yield f"| interleaving against batch size, 175B on 96 GPUs | 10% and more, less with larger batches | {gains} |"
    for batch in (32, 128):
        split = ", ".join(f"{tensor}: {tflops:.0f}" for tensor, tflops in tensor_against_pipeline(batch).items())
        yield f"| tensor size at 64 GPUs, 161B, batch {batch}, TFLOP/s | best at 8 | {split} |"
    for batch in (128, 512):
        sizes = ", ".join(f"{size}: {tflops:.0f}" for size, tflops in micro_sizes(batch).items())
        yield f"| micro-batch size, about 90B on 64 GPUs, batch {batch}, TFLOP/s | up to 15% apart | {sizes} |"
    without, with_it = recomputation(128)
    yield (
        "| recomputation, 145B on 128 GPUs, batch 128 | slower, for memory that larger batches need | "
        f"{without.step_seconds / with_it.step_seconds - 1:+.0%} sequences/s, "
        f"{without.peak_bytes / 1e9:.0f} to {with_it.peak_bytes / 1e9:.0f} GB |"
    )
    for devices, (sharded, together) in zero_against_pipeline().items():
        published = ZERO_PUBLISHED[devices]
        yield (
            f"| ZeRO-3 and PTD-P, 175B on {devices} GPUs, TFLOP/s | {published[0]:.0f} and {published[1]:.0f} | "
            f"{sharded:.0f} and {together:.0f} |"
        )
