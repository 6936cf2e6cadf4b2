"""One rank's share of the model, wired to its neighbours: schedule, stages, links, engine, optimizer."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megapipe.config.run import PretrainConfig
from megapipe.engine.engine import Engine
from megapipe.engine.groups import communicators, counted_states, unit_states
from megapipe.engine.program import Instruction
from megapipe.engine.reductions import Reductions
from megapipe.engine.stage import Stage
from megapipe.engine.swaps import Swaps
from megapipe.engine.wiring import LinkPool, connect
from megapipe.kernels.ops import OPS
from megapipe.layout.scheduling import build_schedule, num_stages
from megapipe.layout.stages import lay_out
from megapipe.layout.validation import num_microbatches
from megapipe.optim.clipping import clip_coefficient
from megapipe.optim.loss_scale import LossScaler
from megapipe.optim.make import make_optimizer
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.sharding import WHOLE, Sharding
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules import Schedule
from megapipe.schedules.schedule import Mode
from megapipe.spec.parameters import LayerSpec
from megapipe.training.action_places import ActionPlaces
from megapipe.training.assemble import (
    Assembly,
    building_progress,
    compile_blocks,
    recompute_parts,
    share_samples_of,
    use_accumulating_products,
    use_fp8,
)
from megapipe.training.families import family_of
from megapipe.training.offload_plan import ActivationPlan, plan_activations
from megapipe.training.sequence import shard_sequences
from megapipe.training.watchdog import Heartbeat


class Replica:
    """This rank's part of one model replica, ready to run steps with `engine`."""

    def __init__(
        self,
        config: PretrainConfig,
        mesh: Mesh,
        layers: tuple[LayerSpec, ...],
        swaps: Swaps | None = None,
        heartbeat: Heartbeat | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """swaps: what moves tensors to host memory and back; by default of this rank's device.

        heartbeat: notified of every action. say: prints the progress of building if that takes more than two seconds.
        """
        self._heartbeat = heartbeat
        self._config = config
        self._mesh = mesh
        self._layers = layers
        self.rank = mesh.coordinate("pipeline")
        by_hand = config.parallel.layers_per_stage
        self.family = family_of(config)
        length, predictions = config.data.sequence_length, self.family.predictions
        recompute = config.recompute.logits
        self.layout = lay_out(layers, config.model, num_stages(config), length, by_hand, predictions, recompute)
        plain = partial(self._schedule, config, ActivationPlan())
        self.plan = plan_activations(config, mesh, self.layout, plain)
        self.schedule = self._schedule(config, self.plan)
        self._swaps = Swaps(mesh.device) if swaps is None else swaps
        self.kernels = OPS.with_overrides(config.kernels.backends)
        replicas = mesh.group("data", "context")
        count = config.zero.num_shards(replicas.size)
        muon = config.optimizer.name == "muon"
        sharding = Sharding(config.zero.stage, replicas.rank % count, count, muon) if count > 1 else WHOLE
        built = building_progress(say, self.layout, self.schedule.header.stages_on(self.rank))
        assembly = Assembly(config, mesh, self.layout, self.schedule.header, self.kernels, sharding, built)
        self.stages: dict[int, Stage] = assembly.stages()
        if config.parallel.sequence:
            shard_sequences(self.stages, self.layout, mesh.group("tensor"), config.parallel.sequence_chunks)
        if mesh.size("context") > 1:
            share_samples_of(self.stages.values(), mesh.group("context"), config.parallel.context_attention)
        if config.recompute.method == "selective":
            recompute_parts(self.stages.values(), config.recompute.parts)
        use_accumulating_products(self.stages, self.kernels)
        use_fp8(self.stages, self.layout, config, mesh.group("tensor"))
        if config.training.compile:
            compile_blocks(list(self.stages.values()))
        groups = mesh.group("tensor"), mesh.shard_group(count) if count > 1 else None
        self.optimizer = make_optimizer(config.optimizer, self.kernels, config.training.seed, *groups)
        lag = 0 if self.schedule.flushes else 1
        scaled = config.training.precision == "fp16"
        self.loss_scaler = LossScaler(config.loss_scale, lag) if scaled else None
        self._links = LinkPool(mesh, config.parallel.links, config.parallel.timeout_seconds)
        self.engine = self._engine(self.schedule)

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the stage that reads token ids."""
        return 0 in self.stages

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the stage that computes the loss."""
        return len(self.layout.ranges) - 1 in self.stages

    def states(self) -> list[UnitState]:
        """This rank's unit states, tied ones once."""
        return unit_states(self.stages)

    def forward_engine(self) -> Engine:
        """An engine over the same stages that runs forwards alone, for evaluation."""
        return self._engine(self._schedule(self._config, self.plan, mode="forward"))

    def engine_for(self, global_size: int) -> Engine:
        """An engine over the same stages for steps of `global_size` samples. A collective call."""
        config = replace(self._config, batch=replace(self._config.batch, global_size=global_size))
        return self._engine(self._schedule(config, self.plan))

    def _schedule(self, config: PretrainConfig, plan: ActivationPlan, mode: Mode = "train") -> Schedule:
        return build_schedule(
            config,
            num_microbatches(config, self._mesh.world_size),
            units_per_stage=self.layout.units_per_stage,
            tied_groups=self.layout.tied,
            data_parallel=self._mesh.group("data", "context").size > 1 or config.parallel.sequence,
            recompute=plan.recompute if mode == "train" else (),
            offload=plan.offload,
            mode=mode,
        )

    def _engine(self, schedule: Schedule) -> Engine:
        transfers = connect(schedule, self._mesh, self.stages, self._links)
        reductions = self._reductions(schedule)
        return Engine(schedule, self.rank, self.stages, transfers, reductions, self._swaps, self._teller(schedule))

    def _teller(self, schedule: Schedule) -> Callable[[Instruction], Instruction] | None:
        heartbeat, places = self._heartbeat, ActionPlaces(schedule, self._mesh)
        if heartbeat is None:
            return None
        return lambda instruction: heartbeat.told(instruction, places.words(instruction))

    def _reductions(self, schedule: Schedule) -> Reductions:
        specs = [spec for layer in self._layers for spec in layer.parameters.values()]
        limit = self._config.optimizer.clip_norm
        groups = communicators(self._mesh, schedule, self.stages)
        return Reductions(
            counted_states(self.stages, groups),
            [spec.name for spec in specs],
            groups,
            partial(clip_coefficient, limit=limit) if limit is not None else torch.ones_like,
            self.optimizer,
            self._mesh.device,
            hidden=not schedule.flushes,
            squared_norm=self._squared_norm,
            balanced_names=[spec.name for spec in specs if spec.balance_rate],
            loss_terms=len(self.family.loss_terms),
            whole_gradients=schedule.header.whole_gradients,
            reduce_dtype=torch.bfloat16 if self._config.zero.reduce_dtype == "bf16" else None,
        )

    def _squared_norm(self, values: Tensor) -> Tensor:
        op = self.kernels.pick("gradient_norm", values)
        return op.squared_norm(values)
