"""One rank's part of a model: its stages with their state and groups, and the engines that run schedules over them.

A `ModelTable` lists the layers and makes their modules, from a configuration or from a user's own modules. `Holding`
says how a run stores and computes them. An `Assembly` builds the stages of this rank from both, and connects engines
for training, evaluation and decoding over the same stages.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from megapipe.config.memory import OffloadConfig, Part, RecomputedPart
from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.parallel import ParallelConfig, ZeroConfig
from megapipe.config.run import PretrainConfig
from megapipe.engine.engine import Engine
from megapipe.engine.host_memory import Swaps
from megapipe.engine.pairs import TwoStreams
from megapipe.engine.program import Instruction
from megapipe.engine.reductions import Communicators, Reductions
from megapipe.engine.stage import (
    BlockModule,
    CompiledForward,
    CompiledUnit,
    Specs,
    Stage,
    TensorSpec,
    UnitForward,
    unit_states,
)
from megapipe.engine.transfers import LinkPool, connect
from megapipe.kernels.ops import OPS
from megapipe.kernels.registry import Registry
from megapipe.layers.context_parallel import keep_rings_out_of_graphs
from megapipe.layers.linear import AccumulatingProducts, Fp8Products, Products, Recipe, shard_sequence, use_products
from megapipe.layers.sequence_parallel import SequenceProducts
from megapipe.layout.stages import VOCABULARY_ALIGNMENT, StageLayout, slice_ranges
from megapipe.layout.table import LayerChoice, LayoutTable
from megapipe.layout.units import tied_unit
from megapipe.models import DTYPES, build_layer
from megapipe.models.gpt import Head, PredictionDepth
from megapipe.optim.muon import make_optimizer
from megapipe.optim.scaling import clip_coefficient
from megapipe.parallel.groups import DistributedGroup, Group
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.segments import WHOLE, Sharding
from megapipe.parallel.unit_state import HostWeights, UnitState
from megapipe.schedules.actions import pairs_of
from megapipe.schedules.schedule import Header, Schedule
from megapipe.spec.parameters import LayerSpec, ParameterSpec, TiedNames, tied_names, tied_stages

BUILDING_SECONDS = 2.0
"""If building a model takes longer than this, its progress is printed."""


@dataclass(frozen=True)
class ModelTable:
    """The layers of a model, and the function that builds their modules on one rank.

    layers: in order. ranges[s]: layers of stage s. boundaries[s]: tensors that stage s passes to stage s + 1.
    build: index of a layer -> its module, whose parameters are not bound to a buffer yet. It is called once for each
    weight version. bound: called with a layer and its modules when their parameters are bound.
    dtype: of weights and activations. alignment: rows of padded parameters are rounded up to it.
    initialize: initializes a new state; None leaves zeros. loss_terms: number of terms of the loss.
    """

    layers: tuple[LayerSpec, ...]
    ranges: Sequence[range]
    boundaries: Sequence[Specs]
    build: Callable[[int], nn.Module]
    dtype: torch.dtype
    bound: Callable[[int, Sequence[nn.Module]], None] = lambda index, twins: None
    alignment: int = 1
    initialize: Callable[[UnitState], None] | None = None
    loss_terms: int = 1

    @classmethod
    def of(cls, config: PretrainConfig, layout: StageLayout, mesh: Mesh, kernels: Registry = OPS) -> "ModelTable":
        """Return the table of a GPT or BERT. kernels: which backends run the layers' ops."""
        seed, layers = config.training.seed, layout.layers
        lengths = tuple(map(len, slice_ranges(config)))
        boundary = residual_stream(config, config.batch.micro_size, max(lengths))
        if len(set(lengths)) > 1:
            slices = tuple(length // config.parallel.sequence_shards for length in lengths)
            boundary = tuple(replace(spec, slices=slices) for spec in boundary)

        def build(index: int) -> nn.Module:
            layer, recompute = layers[index], config.recompute.logits
            group = holders(layer, mesh)
            return build_layer(layer, config.model, group, VOCABULARY_ALIGNMENT, kernels, recompute)

        return cls(
            layers,
            layout.ranges,
            [boundary] * (len(layout.ranges) - 1),
            build,
            DTYPES[config.training.precision],
            alignment=VOCABULARY_ALIGNMENT,
            initialize=lambda state: state.initialize(seed),
            loss_terms=len(config.loss_terms),
        )


def holders(layer: LayerSpec, mesh: Mesh) -> Group:
    """Return the group of ranks over which the matrices of a layer are sharded."""
    shared = layer.kind in ("output", "words")
    return mesh.group("pipeline", "tensor") if shared else mesh.group("tensor")


def residual_stream(config: PretrainConfig, rows: int, tokens: int, requires_grad: bool = True) -> Specs:
    """Return the tensors that cross every stage boundary of a GPT or BERT: [rows, tokens of a rank, hidden_size].

    tokens: of a sample; they are sharded over context ranks and, under sequence parallelism, over tensor ranks.
    """
    own = tokens // (config.parallel.context * config.parallel.sequence_shards)
    shape, dtype = (rows, own, config.model.hidden_size), DTYPES[config.training.precision]
    return (TensorSpec(shape, dtype, requires_grad),)


@dataclass(frozen=True)
class Holding:
    """How a run stores and computes a model.

    choices: one for each layer; empty if no layer is sharded, recomputed or offloaded. parallel: options of tensor and
    context ranks, and of links. recomputed: what layers with selective recomputation recompute. further_recomputed:
    what heads recompute of their blocks of multi-token prediction. master_weights: keep weights in fp32 too if they
    are narrower. fp8: recipe of the layers that multiply in fp8. compile: run blocks
    through torch.compile. seed: of stochastic rounding.
    """

    choices: Sequence[LayerChoice] = ()
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recomputed: Sequence[RecomputedPart] = ()
    further_recomputed: Collection[Part] = ()
    master_weights: bool = True
    fp8: Literal["none"] | Recipe = "none"
    compile: bool = False
    seed: int = 0

    @classmethod
    def of(cls, table: LayoutTable) -> "Holding":
        """Return the holding that a run's layout table and its configuration describe."""
        config, training = table.config, table.config.training
        return cls(
            table.strategies,
            config.zero,
            config.offload,
            config.optimizer,
            config.parallel,
            config.recompute.parts,
            config.recompute.parts_in_heads,
            training.master_weights,
            training.fp8,
            training.compile,
            training.seed,
        )


def pair_overlap(holding: Holding, mesh: Mesh, schedule: Schedule) -> tuple[bool, str | None]:
    """Return whether the halves of pairs run on two streams, and a sentence about it; None on a CPU and without pairs.

    The halves run one after the other if they have no collectives, or if one of them may start copies, gathers or
    compiled code, whose order relative to the other half is not known.
    """
    rows = (list(schedule.actions("body", rank)) for rank in range(schedule.header.num_ranks))
    if mesh.device.type != "cuda" or not any(map(pairs_of, rows)):
        return False, None
    groups = [group for group in map(mesh.group, ("tensor", "context")) if group.size > 1]
    reasons = {
        "parallel.tensor and parallel.context are 1, with nothing to overlap": not groups,
        "tensor and context ranks are threads": not all(isinstance(group, DistributedGroup) for group in groups),
        "training.compile": holding.compile,
        "zero.stage above 1": any(choice.zero > 1 for choice in holding.choices)
        and mesh.group("data", "context").size > 1,
        "offload.activations": any(choice.offload for choice in holding.choices),
        "offload.weights": holding.offload.weights,
        "a schedule without flushes": not schedule.flushes,
        "sequence slices": schedule.header.slices > 1,
        "parallel.vocabulary": bool(schedule.header.vocabulary),
    }
    reason = next((words for words, holds in reasons.items() if holds), None)
    if reason is None:
        return True, "pairs of a forward and a backward overlap on two streams"
    return False, f"pairs of a forward and a backward run one after the other: {reason} (docs/schedules.md#dualpipe_v)"


class Assembly:
    """The stages that a schedule places on one rank, and engines over them.

    Attributes:
        rank: pipeline rank.
        stages: stages of this rank, by id.
        optimizer: updates their states.
        swaps: of all engines; they move tensors to host memory and back.
    """

    def __init__(
        self,
        model: ModelTable,
        holding: Holding,
        mesh: Mesh,
        header: Header,
        *,
        kernels: Registry = OPS,
        swaps: Swaps | None = None,
        built: Callable[[], None] = lambda: None,
        two_streams: bool = False,
    ) -> None:
        """Build the stages. A collective call.

        Args:
            header: of a schedule to run; it places the stages and numbers weight versions and state units.
            kernels: which backends run the ops of layers, updates and norms.
            swaps: moves tensors to host memory and back; by default for this rank's device.
            built: called after each unit of this rank has its initial weights.
            two_streams: run the halves of pairs at the same time (`pair_overlap`). Each layer then has twice the
                number of modules, over the same weights and gradients; those of the side stream are last.
        """
        self._model = model
        self._holding = holding
        self._mesh = mesh
        self._header = header
        self._kernels = kernels
        self._built = built
        self.swaps = Swaps(mesh.device) if swaps is None else swaps
        self.rank = mesh.coordinate("pipeline")
        self._tied = tied_names(model.layers)
        self._tied_groups = tied_stages(model.layers, model.ranges)
        self._tied_states: dict[TiedNames, UnitState] = {}
        self._next_use: dict[TiedNames, int] = {}
        own = header.stages_on(self.rank)
        self._copies = max(header.versions_per_stage[stage] for stage in own)
        self._streams = self._two_streams() if two_streams else None
        self.stages = {stage: self._stage(stage) for stage in own}
        self._apply_options()
        count = holding.zero.num_shards(self._replicas.size)
        groups = mesh.group("tensor"), mesh.shard_group(count) if count > 1 else None
        self.optimizer = make_optimizer(holding.optimizer, kernels, holding.seed, *groups)
        self._links = LinkPool(mesh, holding.parallel.links, holding.parallel.timeout_seconds)

    @property
    def states(self) -> list[UnitState]:
        """Unit states of this rank, each tied state once."""
        return unit_states(self.stages)

    def layers(self) -> Iterator[tuple[int, Sequence[nn.Module]]]:
        """Yield each layer of this rank with its modules, one for each weight version and stream."""
        for number, stage in self.stages.items():
            for index, twins in zip(self._model.ranges[number], stage.units, strict=True):
                yield index, cast(Sequence[nn.Module], twins)

    def whole_layers(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield each layer of this rank; its newest weights are whole on the device until the next layer is requested.
        A collective call."""
        for number, stage in self.stages.items():
            for unit, index in enumerate(self._model.ranges[number]):
                parts = [stage.states[state] for state in self._header.states_of(number, unit)]
                for state in (*parts, *self._tied_states.values()):
                    copy = state.newest % len(state.weights)
                    if state.transient_weights:
                        count = state.sharding.count
                        state.gather_weights(copy, self._mesh.shard_group(count) if count > 1 else self.swaps)
                    state.await_weights(copy)
                twins = cast(Sequence[nn.Module], stage.units[unit])
                yield index, twins[stage.newest % len(twins)]
                for state in parts:
                    if state.transient_weights:
                        state.release_weights(state.newest % len(state.weights))

    def engine(
        self,
        schedule: Schedule,
        *,
        boundary: Specs | None = None,
        units: Mapping[int, Sequence[Sequence[UnitForward]]] | None = None,
        wrap: Callable[[Instruction], Instruction] | None = None,
    ) -> Engine:
        """Connect an engine over the stages: for training, or for the mode of the schedule. A collective call.

        Args:
            schedule: places the same stages on the same ranks.
            boundary: tensors that cross every stage boundary; by default those of training.
            units: modules to run in place of those of each stage, over the same parameters, such as decoding layers.
            wrap: see `Engine`.
        """
        model = self._model
        boundaries = model.boundaries if boundary is None else [boundary] * len(model.ranges)
        stages = {}
        for number, stage in self.stages.items():
            own = stage.units if units is None else units[number]
            stages[number] = Stage(own, stage.states, *self._boundaries(number, boundaries))
        transfers = connect(schedule, self._mesh, stages, self._links)
        streams = self._streams if schedule.header.mode == "train" else None
        return Engine(schedule, self.rank, stages, transfers, self._reductions(schedule), self.swaps, wrap, streams)

    def keep_weights_alone(self) -> None:
        """Free gradients, master weights and moments, for engines that only run forwards."""
        for _, twins in self.layers():
            for parameter in (each for twin in twins for each in twin.parameters()):
                parameter.requires_grad_(False)
                parameter.grad = None
        self._tied_states.clear()
        for stage in self.stages.values():
            stage.states.clear()

    def close(self) -> None:
        """Release the links of all engines."""
        self._links.close()

    def communicators(self, schedule: Schedule) -> Communicators:
        """Return the groups that an engine sums over. A collective call: every rank makes it, in the same order."""
        mesh, header = self._mesh, schedule.header
        tied = {}
        for group, users in enumerate(header.tied_groups):
            members = mesh.stage_group(tuple(sorted(set(map(schedule.rank_of, users)))))
            if members is not None:
                tied[group] = members
        # The header is the same on all ranks, so it may name groups in which this rank's stages have no state.
        usual = next((state.sharding.count for state in self.states), 1)
        sizes = {usual, *(unit.shards for units in header.stage_states for unit in units)}
        shards = {size: mesh.shard_group(size) for size in sorted(sizes) if size > 1}
        copies = {size: mesh.shard_replicas(size) for size in shards}
        ends_here = any(route[-1] in self.stages for route in header.routes)
        return Communicators(
            world=mesh.world,
            data=self._replicas,
            tied=tied,
            scalars=mesh.world if schedule.flushes else mesh.second_world(),
            counts_loss=ends_here and mesh.coordinate("tensor") == 0,
            shards=shards,
            copies={size: members for size, members in copies.items() if members.size > 1},
            tensor=mesh.group("tensor"),
        )

    def _reductions(self, schedule: Schedule) -> Reductions:
        specs = [spec for layer in self._model.layers for spec in layer.parameters.values()]
        limit = self._holding.optimizer.clip_norm
        return Reductions(
            self._counted_states(schedule),
            [spec.name for spec in specs],
            self.communicators(schedule),
            partial(clip_coefficient, limit=limit) if limit is not None else torch.ones_like,
            self.optimizer,
            self._mesh.device,
            hidden=not schedule.flushes,
            squared_norm=self._squared_norm,
            balanced_names=[spec.name for spec in specs if spec.balance_rate],
            loss_terms=self._model.loss_terms,
            pool_limit=schedule.header.states.gradient_pool,
            reduce_dtype=torch.bfloat16 if self._holding.zero.reduce_dtype == "bf16" else None,
        )

    def _counted_states(self, schedule: Schedule) -> list[UnitState]:
        """Return the states whose gradient norm this rank contributes: a tied weight counts on the first rank that has
        it."""
        header = schedule.header
        elsewhere = {
            id(stage.states[header.tied_unit(number, group)])
            for number, stage in self.stages.items()
            for group, users in enumerate(header.tied_groups)
            if self.rank != min(map(schedule.rank_of, users)) and header.tied_unit(number, group) in stage.states
        }
        return [state for state in self.states if id(state) not in elsewhere]

    def _squared_norm(self, values: Tensor) -> Tensor:
        return self._kernels.pick("gradient_norm", values).apply(values)

    @property
    def _replicas(self) -> Group:
        """The group of ranks that hold the same weights."""
        return self._mesh.group("data", "context")

    def _stage(self, stage: int) -> Stage:
        states: dict[int, UnitState] = {}
        units: list[Sequence[UnitForward]] = []
        for unit, index in enumerate(self._model.ranges[stage]):
            layer = self._model.layers[index]
            twins = [self._model.build(index) for _ in range(self._copies * (1 if self._streams is None else 2))]
            tied = [names for names in dict.fromkeys(self._tied) if names[0] in _names(layer)]
            shared = set[str]().union(*tied)
            own = [spec for spec in dict.fromkeys(layer.parameters.values()) if spec.name not in shared]
            parts = self._header.states_of(stage, unit)
            for number, specs in zip(parts, _state_parts(own, len(parts)), strict=True):
                apart = "" if number == parts.start else f".{specs[0].state_unit}"
                states[number] = self._state(
                    layer.name + apart, specs, self._choice(index).zero, rank=holders(layer, self._mesh).rank
                )
                _bind(states[number], twins, layer, use=0)
            for names in tied:
                use = self._next_use[names] = self._next_use.get(names, -1) + 1
                state = self._tied_state(names)
                _bind(state, twins, layer, use % state.num_uses)
            self._model.bound(index, twins)
            units.append(twins)
        for group, names in enumerate(self._tied):
            if stage in self._header.tied_owners(group) and stage in self._tied_groups[group]:
                states[self._header.tied_unit(stage, group)] = self._tied_state(names)
        return Stage(units, states, *self._boundaries(stage, self._model.boundaries))

    def _two_streams(self) -> TwoStreams:
        streams = TwoStreams(self._mesh.device)
        for group in (self._mesh.group("tensor"), self._mesh.group("context")):
            if isinstance(group, DistributedGroup):
                group.pause = streams.turns.pause
        return streams

    def _boundaries(self, stage: int, boundaries: Sequence[Specs]) -> tuple[Specs, Specs]:
        """Return the tensors that arrive at a stage, and those that leave it. boundaries[s]: tensors that stage s
        passes on; vocabulary shards pass on the same."""
        header = self._header
        starts = stage in header.inputs or (stage == 0 and not header.vocabulary)
        ends = stage in header.outputs or (stage == header.num_routed - 1 and not header.vocabulary)
        arriving = () if starts else boundaries[max(0, stage - 1)]
        return arriving, () if ends else boundaries[min(stage, len(boundaries) - 1)]

    def _choice(self, index: int) -> LayerChoice:
        return self._holding.choices[index] if self._holding.choices else LayerChoice(0)

    def _tied_state(self, names: TiedNames) -> UnitState:
        """Return the state of a tied weight on this rank, with one gradient accumulator for each local use."""
        if names not in self._tied_states:
            ranges = (self._model.ranges[stage] for stage in self._header.stages_on(self.rank))
            unit = tied_unit(names, [self._model.layers[index] for members in ranges for index in members])
            # If a weight has several uses on a rank, its gradients cannot be sharded, only the tensors that updates
            # change.
            zero_stage = min(self._holding.zero.stage, 1)
            rank = self._mesh.group("pipeline", "tensor").rank if unit.specs[0].shards > 1 else None
            self._tied_states[names] = self._state(names[0], list(unit.specs), zero_stage, uses=unit.uses, rank=rank)
        return self._tied_states[names]

    def _state(
        self, name: str, specs: list[ParameterSpec], zero_stage: int, uses: int | None = None, rank: int | None = None
    ) -> UnitState:
        """Return a new state. uses: number of uses of a tied weight. rank: among the ranks over which the matrices are
        sharded, by default the tensor rank."""
        model, holding, mesh = self._model, self._holding, self._mesh
        tensor = mesh.group("tensor")
        shared: dict[str, Any] = {
            "compute_dtype": model.dtype,
            "device": mesh.device,
            "tensor_rank": tensor.rank if rank is None else rank,
            "tensor_size": tensor.size,
            "alignment": model.alignment,
            "master_weights": holding.master_weights,
        }
        state: UnitState
        if holding.offload.weights and uses is None:
            state = HostWeights(name, specs, **shared)
        else:
            state = UnitState(
                name,
                specs,
                **shared,
                num_versions=self._copies,
                num_uses=uses or 1,
                gradient_buffers=self._header.gradient_buffers,
                sharding=self._sharding(zero_stage, specs[0].state_unit if specs else "layer"),
                in_host=holding.offload.optimizer,
            )
        # On the meta device there is nothing to fill.
        if model.initialize is not None and mesh.device.type != "meta":
            model.initialize(state)
        self._built()
        return state

    def _sharding(self, zero_stage: int, state_unit: str) -> Sharding:
        """Return which parts of a unit's state replicas shard, and this rank's index among those that share a copy."""
        count = self._holding.zero.num_shards(self._replicas.size, state_unit)
        muon = self._holding.optimizer.name == "muon"
        return Sharding(zero_stage, self._replicas.rank % count, count, muon) if count > 1 else WHOLE

    def _apply_options(self) -> None:
        """Apply the options of the layers, in the only order that works.

        Samples are sharded first: over tensor ranks, then over context ranks. Recomputation and the way to multiply
        matrices follow; fp8 comes after the products that accumulate, which it replaces. Compilation comes last,
        because it wraps the modules.
        """
        holding, mesh = self._holding, self._mesh
        # If only shapes are computed, there are neither kernels nor graphs.
        on_meta = mesh.device.type == "meta"
        if holding.parallel.sequence:
            self._shard_sequences(SequenceProducts(mesh.group("tensor"), holding.parallel.sequence_chunks))
        for index, twins in self.layers():
            blocks = cast(Sequence[BlockModule], twins) if self._model.layers[index].kind == "block" else ()
            for block in blocks:
                if mesh.size("context") > 1:
                    block.share_samples(mesh.group("context"), holding.parallel.context_attention)
                if self._choice(index).recompute == "selective":
                    block.recompute(holding.recomputed)
            for head in (twin for twin in twins if isinstance(twin, Head)):
                head.recompute(holding.further_recomputed)
        if self._kernels.is_requested("weight_gradient") and not on_meta:
            self._use(AccumulatingProducts(self._kernels), range(len(self._model.layers)))
        if holding.fp8 != "none":
            chosen = [index for index in range(len(self._model.layers)) if self._choice(index).fp8]
            self._use(Fp8Products(holding.fp8, mesh.group("tensor")), chosen)
        if holding.compile and not on_meta:
            self._compile_blocks()

    def _shard_sequences(self, products: SequenceProducts) -> None:
        """Shard the tokens of every sample over tensor ranks. Unit states record which gradients are partial sums."""
        for number, stage in self.stages.items():
            for unit, index in enumerate(self._model.ranges[number]):
                parameters = self._model.layers[index].parameters
                own = [stage.states[state] for state in self._header.states_of(number, unit)]
                for twin in cast(Sequence[nn.Module], stage.units[unit]):
                    names = {parameters[path].name for path in shard_sequence(twin, products)}
                    for state in (*own, *self._tied_states.values()):
                        state.partial |= names

    def _use(self, products: Products, layers: Sequence[int]) -> None:
        """Replace the way in which the linear layers of blocks multiply, within some layers."""
        for index, twins in self.layers():
            for twin in twins if index in layers else ():
                within_head: list[nn.Module] = [depth.block for depth in _depths([twin])]
                for module in within_head or [twin]:
                    use_products(module, products)

    def _compile_blocks(self) -> None:
        """Let all transformer blocks run through one torch.compile, each as one graph except under ring attention.
        Compilation happens at the first call."""
        blocks = {index for index, layer in enumerate(self._model.layers) if layer.kind == "block"}
        whole = [keep_rings_out_of_graphs(twin) for index, twins in self.layers() for twin in twins if index in blocks]
        forward = CompiledForward(fullgraph=all(whole))
        for depth in (each for _, twins in self.layers() for each in _depths(twins)):
            depth.block = CompiledUnit(depth.block, forward)  # type: ignore[assignment]
        for number, stage in self.stages.items():
            named = zip(self._model.ranges[number], stage.units, strict=True)
            stage.units = [
                [CompiledUnit(cast(nn.Module, twin), forward) for twin in twins] if index in blocks else twins
                for index, twins in named
            ]


def building_progress(
    say: Callable[[str], None] | None, layout: StageLayout, stages: Iterable[int]
) -> Callable[[], None]:
    """Return a function to call after each built unit. It prints the progress after two seconds, and then whenever the
    time has doubled. stages: of this rank. say: prints a line; None for no output."""
    if say is None:
        return lambda: None
    total = sum(len(layout.ranges[stage]) for stage in stages)
    start, done, next_line = time.monotonic(), 0, BUILDING_SECONDS

    def built() -> None:
        nonlocal done, next_line
        done += 1
        seconds = time.monotonic() - start
        if done < total and seconds >= next_line:
            next_line = 2 * seconds
            left = seconds / done * (total - done)
            say(f"building the model: {done} of {total} layers on rank 0, about {left:.0f} s left")

    return built


def _depths(twins: Iterable[UnitForward]) -> list[PredictionDepth]:
    """Return the parts of heads that predict further tokens."""
    return [depth for twin in twins if isinstance(twin, Head) for depth in twin.depths]


def _bind(state: UnitState, twins: Sequence[nn.Module], layer: LayerSpec, use: int) -> None:
    for version, twin in enumerate(twins):
        state.bind(twin, layer.parameters, copy=version % len(state.weights), use=use)


def _state_parts(specs: list[ParameterSpec], count: int) -> list[list[ParameterSpec]]:
    """Return a layer's parameters by state unit, the layer's own first."""
    if count == 1:
        return [specs]
    named = dict.fromkeys(["layer", *(spec.state_unit for spec in specs)])
    return [[spec for spec in specs if spec.state_unit == name] for name in named]


def _names(layer: LayerSpec) -> set[str]:
    return {spec.name for spec in layer.parameters.values()}
