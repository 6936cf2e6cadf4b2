"""What of this run's activations runs again and what goes to host memory: as asked, or decided by costs."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.layers.attention import has_amx
from megapipe.layout.moves import blocks_of, named_offload
from megapipe.layout.offload import BlockCost, DoesNotFit, Treatments, treat
from megapipe.layout.prediction import layout_costs
from megapipe.layout.scheduling import splits_backwards
from megapipe.layout.stages import StageLayout
from megapipe.parallel.mesh import Mesh
from megapipe.schedules.lowering import Spans
from megapipe.schedules.memory import microbatches_held
from megapipe.schedules.offload import NOTHING, Offload
from megapipe.schedules.schedule import Schedule
from megapipe.spec.ops import total_flops
from megapipe.spec.parameters import LayerSpec
from megapipe.training.assemble import DTYPES
from megapipe.training.matrix_product import product_flops

COPIED = 64 * 2**20
"""Bytes of a copy that is timed."""
REPEATS = 5
PREFETCHES = (1, 2, 3, 4)
"""What auto chooses from."""
GIB = 2**30


@dataclass(frozen=True)
class ActivationPlan:
    """By stage, what runs again and what moves; by default nothing. remarks: what was decided and on which figures."""

    recompute: Spans = ()
    offload: Offload = NOTHING
    remarks: tuple[str, ...] = ()


def plan_activations(
    config: PretrainConfig, mesh: Mesh, layout: StageLayout, plain: Callable[[], Schedule]
) -> ActivationPlan:
    """The plan of a run. plain: makes its schedule without recomputation and offload. A collective call under
    offload.activations auto.

    Raises ConfigError where nothing is left to move, or auto finds too little memory.
    """
    if config.offload.activations == "auto":
        return _decided(config, mesh, layout, plain())
    again = layout.recomputed(config.recompute)
    return ActivationPlan(again, named_offload(config, layout, again))


def _decided(config: PretrainConfig, mesh: Mesh, layout: StageLayout, plain: Schedule) -> ActivationPlan:
    offload, buffers = config.offload, config.offload.buffers
    flops, bandwidth = _rates(config, mesh)
    held = microbatches_held(plain)
    blocks = {stage: found for stage in range(len(layout.ranges)) if (found := blocks_of(layout, stage))}
    costs = {
        stage: [_block_cost(config, mesh, layout.layers[layout.ranges[stage][unit]], flops) for unit in found]
        for stage, found in blocks.items()
    }

    def treated(prefetch: int) -> dict[int, Treatments]:
        found = {}
        for stage, own in costs.items():
            neighbours = plain.header.stages_on(plain.rank_of(stage))
            share = len(own) / sum(len(blocks.get(each, ())) for each in neighbours)
            memory = share * cast(float, offload.memory) * GIB
            found[stage] = _treated(config, own, stage, held[stage], memory, bandwidth, prefetch)
        return found

    prefetch, chosen = _least_recomputed(treated, PREFETCHES if offload.prefetch is None else (offload.prefetch,))
    again, units, told = [], [], []
    for stage in range(len(layout.ranges)):
        named = list(zip(blocks[stage], chosen[stage].of_blocks, strict=True)) if stage in blocks else []
        again.append([range(unit, unit + 1) for unit, name in named if name == "recompute"])
        units.append(tuple(unit for unit, name in named if name == "move"))
        if named:
            told.append(_told(chosen[stage], costs[stage], stage, held[stage], bandwidth))
    remark = (
        f"offload auto: blocks at {flops / 1e12:.3g} TFLOP/s, copies at {bandwidth / 1e9:.3g} GB/s each way, "
        f"{offload.memory:g} GiB of activations per rank, prefetch {prefetch}"
    )
    return ActivationPlan(again, Offload(tuple(units), prefetch, offload.optimizer, buffers), (remark, *told))


def _least_recomputed(
    treated: Callable[[int], dict[int, Treatments]], prefetches: Iterable[int]
) -> tuple[int, dict[int, Treatments]]:
    """The prefetch, with its treatments by stage, whose slowest stage recomputes least; of several the smallest."""
    found: dict[int, dict[int, Treatments]] = {}
    refused: ConfigError | None = None
    for prefetch in prefetches:
        try:
            found[prefetch] = treated(prefetch)
        except ConfigError as error:
            refused = refused or error
    if refused is not None and not found:
        raise refused
    best = min(found, key=lambda each: (max(stage.recomputed for stage in found[each].values()), each))
    return best, found[best]


def _treated(
    config: PretrainConfig,
    costs: Sequence[BlockCost],
    stage: int,
    held: float,
    memory: float,
    bandwidth: float,
    prefetch: int,
) -> Treatments:
    try:
        return treat(costs, microbatches=held, memory=memory, bandwidth=bandwidth, prefetch=prefetch)
    except DoesNotFit as error:
        raise ConfigError(
            f"offload.memory {config.offload.memory:g}: activations of the blocks of stage {stage} need "
            f"{error.least / GIB:.3g} GiB for {held:g} micro-batches whatever is moved or recomputed, and have "
            f"{memory / GIB:.3g}; raise it, or lower batch.micro_size or data.sequence_length"
        ) from None


def _told(found: Treatments, costs: Sequence[BlockCost], stage: int, held: float, bandwidth: float) -> str:
    count = {name: found.of_blocks.count(name) for name in ("keep", "move", "recompute")}
    block = costs[0]
    return (
        f"offload auto: stage {stage}: of {len(costs)} blocks {count['keep']} keep, {count['move']} move, "
        f"{count['recompute']} recompute ({''.join(name[0] for name in found.of_blocks)}); {held:g} micro-batches "
        f"hold {found.bytes / GIB:.3g} GiB at most; a block keeps {block.kept / 2**20:.3g} MiB, copied in "
        f"{1e3 * block.kept / bandwidth:.3g} ms, its forward takes {1e3 * block.forward:.3g} ms and its backward "
        f"{1e3 * block.backward:.3g} ms; recomputation adds {1e3 * found.recomputed:.3g} ms to a micro-batch"
    )


def _rates(config: PretrainConfig, mesh: Mesh) -> tuple[float, float]:
    """FLOP/s of a rank and bytes per second between its device and the host: the slowest rank's, where measured."""
    compute, bandwidth = config.offload.compute, config.offload.bandwidth
    flops = product_flops(DTYPES[config.training.precision], mesh.device) if compute is None else 1e12 * compute
    copied = copy_bandwidth(mesh.device) if bandwidth is None else 1e9 * bandwidth
    every = mesh.world.all_gather_object((flops, copied))
    return min(each[0] for each in every), min(each[1] for each in every)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy to page-locked host memory; on a CPU of one in its memory. The best of several."""
    pinned = device.type == "cuda"
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target = torch.zeros(COPIED, dtype=torch.uint8, pin_memory=pinned)
    times = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return COPIED / min(times[1:])


def _block_cost(config: PretrainConfig, mesh: Mesh, layer: LayerSpec, flops: float) -> BlockCost:
    device = mesh.device.type
    costs = layout_costs(config, device=device, amx=device == "cpu" and has_amx())
    work, ranks = total_flops(costs.ops(layer)), costs.tensor * costs.context
    backward = work.backward_input + (0 if splits_backwards(config) else work.backward_weight)
    return BlockCost(work.forward / ranks / flops, backward / ranks / flops, costs.kept(layer), costs.stream)
