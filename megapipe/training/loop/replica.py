"""One rank's part of a model replica, connected to its neighbors: schedule, stages, links, engine, optimizer.

Under offload.activations auto, the costs of blocks decide which activations are kept, moved to host memory or
recomputed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from megapipe.config import ConfigError
from megapipe.config.memory import OffloadConfig
from megapipe.config.run import PretrainConfig
from megapipe.engine.assembly import Assembly, Holding, ModelTable, building_progress, pair_overlap
from megapipe.engine.engine import Engine
from megapipe.engine.host_memory import Swaps
from megapipe.engine.program import Instruction
from megapipe.kernels.ops import OPS
from megapipe.layout.batch_plan import num_microbatches
from megapipe.layout.offload import BlockCost, DoesNotFit, Treatments, treat
from megapipe.layout.scheduling import splits_backwards
from megapipe.layout.stages import StageLayout
from megapipe.layout.table import LayoutTable, build_schedule
from megapipe.models import DTYPES
from megapipe.optim.scaling import LossScaler
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules import Schedule
from megapipe.schedules.memory import NOTHING, microbatches_held
from megapipe.schedules.schedule import Mode
from megapipe.spec.ops import total_flops
from megapipe.spec.parameters import LayerSpec
from megapipe.training.device import copy_bandwidth, product_flops
from megapipe.training.resilience.watchdog import Heartbeat, described_action
from megapipe.training.validation import costs_on

PREFETCHES = (1, 2, 3, 4)
"""Values of offload.prefetch among which offload.activations auto chooses."""
GIB = 2**30


def layout_table(
    config: PretrainConfig, mesh: Mesh, layout: StageLayout, plain: Callable[[], Schedule]
) -> tuple[LayoutTable, tuple[str, ...]]:
    """Return the layout table of a run, and remarks: the decisions of offload.activations auto, with the figures that
    they follow from. A collective call under offload.activations auto.

    Args:
        layout: layers of each stage.
        plain: builds the run's schedule without recomputation and offload.

    Raises:
        ConfigError: no block is left to move, or auto has too little memory.
    """
    if config.offload.activations == "auto":
        return _decide_offload(config, mesh, layout, plain())
    return LayoutTable.of(config, layout), ()


def _decide_offload(
    config: PretrainConfig, mesh: Mesh, layout: StageLayout, plain: Schedule
) -> tuple[LayoutTable, tuple[str, ...]]:
    offload = config.offload
    flops, bandwidth = _rates(config, mesh)
    held = microbatches_held(plain)
    blocks = {stage: units for stage in range(len(layout.ranges)) if (units := layout.blocks(stage))}
    costs = {
        stage: [_block_cost(config, mesh, layout.layers[layout.ranges[stage][unit]], flops) for unit in units]
        for stage, units in blocks.items()
    }

    def choose(prefetch: int) -> dict[int, Treatments]:
        by_stage = {}
        for stage, block_costs in costs.items():
            neighbours = plain.header.stages_on(plain.rank_of(stage))
            fraction = len(block_costs) / sum(len(blocks.get(each, ())) for each in neighbours)
            memory = fraction * cast(float, offload.memory) * GIB
            try:
                by_stage[stage] = treat(
                    block_costs, microbatches=held[stage], memory=memory, bandwidth=bandwidth, prefetch=prefetch
                )
            except DoesNotFit as error:
                raise ConfigError(
                    f"offload.memory {offload.memory:g}: activations of the blocks of stage {stage} need "
                    f"{error.least / GIB:.3g} GiB for {held[stage]:g} micro-batches whatever is moved or recomputed, "
                    f"and have {memory / GIB:.3g}; raise it, or lower batch.micro_size or data.sequence_length"
                ) from None
        return by_stage

    prefetch, chosen = _least_recomputed(choose, PREFETCHES if offload.prefetch is None else (offload.prefetch,))
    without_offload = replace(config, offload=replace(offload, activations="none"))
    table = LayoutTable.of(without_offload, layout)
    strategies, remarks = list(table.strategies), []
    for stage, treatments in chosen.items():
        for unit, name in zip(blocks[stage], treatments.of_blocks, strict=True):
            layer = layout.ranges[stage][unit]
            strategies[layer] = strategies[layer]._replace(
                recompute="full" if name == "recompute" else "none", offload=name == "move"
            )
        remarks.append(_treatments_text(treatments, costs[stage], stage, held[stage], bandwidth))
    remark = (
        f"offload auto: blocks at {flops / 1e12:.3g} TFLOP/s, copies at {bandwidth / 1e9:.3g} "
        f"GB/s each way, {offload.memory:g} GiB of activations per rank, prefetch {prefetch}"
    )
    return replace(table, strategies=tuple(strategies), prefetch=prefetch), (remark, *remarks)


def _least_recomputed(
    choose: Callable[[int], dict[int, Treatments]], prefetches: Iterable[int]
) -> tuple[int, dict[int, Treatments]]:
    """Return the prefetch for which the slowest stage recomputes least, and its treatments by stage. Of equally good
    ones, return the smallest."""
    treatments: dict[int, dict[int, Treatments]] = {}
    first_error: ConfigError | None = None
    for prefetch in prefetches:
        try:
            treatments[prefetch] = choose(prefetch)
        except ConfigError as error:
            first_error = first_error or error
    if first_error is not None and not treatments:
        raise first_error
    best = min(treatments, key=lambda each: (max(stage.recomputed for stage in treatments[each].values()), each))
    return best, treatments[best]


def _treatments_text(
    treatments: Treatments, costs: Sequence[BlockCost], stage: int, held: float, bandwidth: float
) -> str:
    count = {name: treatments.of_blocks.count(name) for name in ("keep", "move", "recompute")}
    block = costs[0]
    return (
        f"offload auto: stage {stage}: of {len(costs)} blocks {count['keep']} keep, "
        f"{count['move']} move, {count['recompute']} recompute "
        f"({''.join(name[0] for name in treatments.of_blocks)}); {held:g} micro-batches hold "
        f"{treatments.bytes / GIB:.3g} GiB at most; a block keeps {block.kept / 2**20:.3g} "
        f"MiB, copied in {1e3 * block.kept / bandwidth:.3g} ms, its forward takes "
        f"{1e3 * block.forward:.3g} ms and its backward {1e3 * block.backward:.3g} ms; "
        f"recomputation adds {1e3 * treatments.recomputed:.3g} ms to a micro-batch"
    )


def _rates(config: PretrainConfig, mesh: Mesh) -> tuple[float, float]:
    """Return FLOP/s of a rank and bytes per second between its device and the host: the minimum over ranks if
    measured."""
    compute, bandwidth = config.offload.compute, config.offload.bandwidth
    flops = product_flops(DTYPES[config.training.precision], mesh.device) if compute is None else 1e12 * compute
    copied = copy_bandwidth(mesh.device) if bandwidth is None else 1e9 * bandwidth
    rates = mesh.world.all_gather_object((flops, copied))
    return min(each[0] for each in rates), min(each[1] for each in rates)


def _block_cost(config: PretrainConfig, mesh: Mesh, layer: LayerSpec, flops: float) -> BlockCost:
    costs = costs_on(config, mesh.device.type)
    work, ranks = total_flops(costs.ops(layer)), costs.tensor * costs.context
    backward = work.backward_input + (0 if splits_backwards(config) else work.backward_weight)
    return BlockCost(work.forward / ranks / flops, backward / ranks / flops, costs.kept(layer), costs.stream)


def muon_shards(states: Sequence[UnitState]) -> str | None:
    """Return a note about Muon's shards: padding in this rank's buffers, and bytes that updates gather; None if
    nothing is sharded."""
    sharded = [state for state in states if state.sharding.whole_matrices]
    if not sharded:
        return None
    count = sharded[0].sharding.count
    matrices = [segment for state in sharded for segment in state.table if segment.spec.matrix]
    num_parameters = sum(segment.stop - segment.start for state in sharded for segment in state.table)
    buffers = sum(state.table.num_elements for state in sharded)
    cut = sum(len(state.table.cut) for state in sharded)
    gathered = sum(state.table.num_elements * state.accumulate_dtype.itemsize for state in sharded if state.table.cut)
    padding = f"muon over {count} shards: {buffers / num_parameters - 1:.1%} of padding in addition to the parameters"
    if not cut:
        return f"{padding}; every matrix is whole on one rank"
    return f"{padding}; {cut} of {len(matrices)} matrices are cut, whose update gathers {gathered:,} bytes"


class Replica:
    """This rank's part of one model replica, ready to run steps with `engine`."""

    def __init__(
        self,
        config: PretrainConfig,
        mesh: Mesh,
        swaps: Swaps | None = None,
        heartbeat: Heartbeat | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """swaps: moves tensors to host memory and back; by default for this rank's device.

        heartbeat: notified of every action. say: prints the progress of building if that takes more than two seconds.
        """
        self._heartbeat = heartbeat
        self._config = config
        self._mesh = mesh
        self.rank = mesh.coordinate("pipeline")
        self.layout = StageLayout.of(config)
        plain = partial(self._schedule, replace(config, offload=OffloadConfig()), None)
        self.table, self.remarks = layout_table(config, mesh, self.layout, plain)
        self.schedule = self._schedule(config, self.table)
        self.kernels = OPS.with_overrides(config.kernels.backends)
        header = self.schedule.header
        built = building_progress(say, self.layout, header.stages_on(self.rank))
        model = ModelTable.of(config, self.layout, mesh, self.kernels)
        holding = Holding.of(self.table)
        two_streams, remark = pair_overlap(holding, mesh, self.schedule)
        self.remarks += () if remark is None else (remark,)
        self.assembly = Assembly(
            model, holding, mesh, header, kernels=self.kernels, swaps=swaps, built=built, two_streams=two_streams
        )
        self.stages, self.optimizer = self.assembly.stages, self.assembly.optimizer
        self.is_first = 0 in self.stages or bool(header.vocabulary)
        self.is_last = header.num_routed - 1 in self.stages or bool(header.vocabulary)
        lag = 0 if self.schedule.flushes else 1
        scaled = config.training.precision == "fp16"
        self.loss_scaler = LossScaler(config.loss_scale, lag) if scaled else None
        self.engine = self._engine(self.schedule)

    def states(self) -> list[UnitState]:
        """Return the unit states of this rank, each tied state once."""
        return self.assembly.states

    def forward_engine(self) -> Engine:
        """Return an engine over the same stages that only runs forwards, for evaluation."""
        return self._engine(self._schedule(self._config, self.table, mode="forward"))

    def engine_for(self, global_size: int) -> Engine:
        """Return an engine over the same stages for steps of `global_size` samples. A collective call."""
        config = replace(self._config, batch=replace(self._config.batch, global_size=global_size))
        return self._engine(self._schedule(config, self.table))

    def _schedule(self, config: PretrainConfig, table: LayoutTable | None, mode: Mode = "train") -> Schedule:
        return build_schedule(
            config,
            num_microbatches(config, self._mesh.world_size),
            self.layout,
            replicas=self._mesh.group("data", "context").size,
            recompute=table.recomputed if table is not None and mode == "train" else (),
            offload=NOTHING if table is None else table.offload,
            mode=mode,
        )

    def _engine(self, schedule: Schedule) -> Engine:
        return self.assembly.engine(schedule, wrap=self._recording(schedule))

    def _recording(self, schedule: Schedule) -> Callable[[Instruction], Instruction] | None:
        heartbeat = self._heartbeat
        if heartbeat is None:
            return None
        return lambda each: heartbeat.recording(each, described_action(each.action, schedule, self._mesh))
