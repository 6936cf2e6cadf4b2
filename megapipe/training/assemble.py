"""From a configuration, a mesh and a schedule to this rank's stages: the one place where model and layout meet."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from megapipe.config.model import ModelConfig
from megapipe.config.recompute import RecomputeConfig, RecomputedPart
from megapipe.config.run import PretrainConfig
from megapipe.costs.compute import layer_flops
from megapipe.costs.parameters import LayerSpec, ParameterSpec
from megapipe.engine.stage import Stage, TensorSpec
from megapipe.engine.stages import StageBuilder, tied_names, tied_stages
from megapipe.kernels.ops import OPS
from megapipe.kernels.registry import Registry
from megapipe.layers.compiled import CompiledForward, CompiledUnit
from megapipe.layers.fp8 import Fp8Products
from megapipe.layers.linear import Linear
from megapipe.layers.shared_samples import keep_rings_out_of_graphs, share_samples
from megapipe.models.gpt import Block
from megapipe.parallel.groups import Group
from megapipe.parallel.host_weights import HostWeights
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.sharding import WHOLE, Sharding
from megapipe.parallel.token_order import ContextAttention
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules.balance import balance_layers, check_assignment
from megapipe.schedules.schedule import Header
from megapipe.training.families import family_of

VOCABULARY_ALIGNMENT = 64
"""Rows of a padded vocabulary shard come in this multiple, so that its matrix product meets no odd size."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StageLayout:
    """How a model's layers fall into stages.

    ranges[s]: layers of stage s. tied[g]: stages that use the g-th tied weight, one entry a stage.
    """

    layers: tuple[LayerSpec, ...]
    ranges: tuple[range, ...]
    tied: tuple[tuple[int, ...], ...]

    @property
    def units_per_stage(self) -> tuple[int, ...]:
        """Layers in each stage; a unit is a layer."""
        return tuple(len(each) for each in self.ranges)

    def recomputed(self, config: RecomputeConfig) -> list[list[range]]:
        """Per stage, the runs of units that are computed again: blocks alone, `every` at a time. Embeddings keep
        nothing of note, and the backward of a head follows its forward."""
        if config.method != "full":
            return []
        found = []
        for members in self.ranges:
            blocks = [unit for unit, layer in enumerate(members) if self.layers[layer].kind == "block"]
            blocks = blocks[: config.num_blocks]
            chunks = (blocks[at : at + config.every] for at in range(0, len(blocks), config.every))
            found.append([range(chunk[0], chunk[-1] + 1) for chunk in chunks])
        return found


def lay_out(
    layers: tuple[LayerSpec, ...],
    model: ModelConfig,
    num_stages: int,
    sequence_length: int,
    layers_per_stage: Sequence[int] | None = None,
    predictions: int | None = None,
    recompute_logits: bool = False,
) -> StageLayout:
    """Split layers into contiguous stages, by hand or balanced by their FLOPs.

    predictions: tokens of a sample that the head predicts, by default all. recompute_logits: as in `layer_flops`.

    Raises ScheduleError with more stages than layers, or numbers by hand that do not fit.
    """
    if layers_per_stage is None:
        flops = [
            layer_flops(model, layer, 1, sequence_length, predictions, recompute_logits).executed for layer in layers
        ]
        bounds = balance_layers(flops, num_stages)
    else:
        bounds = check_assignment(layers_per_stage, len(layers), num_stages)
    ranges = tuple(range(first, stop) for first, stop in bounds)
    return StageLayout(layers, ranges, tied_stages(layers, ranges))


class Assembly:
    """Builds the stages that a schedule places on this rank, with weights drawn from the seed.

    kernels: which backends run the layers' ops. sharding: what replicas share out of a unit's state; of a tied weight,
    whose gradients are summed over several stages, that is master weights and moments alone.
    """

    def __init__(
        self,
        config: PretrainConfig,
        mesh: Mesh,
        layout: StageLayout,
        header: Header,
        kernels: Registry = OPS,
        sharding: Sharding = WHOLE,
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._layout = layout
        self._header = header
        self._kernels = kernels
        self._sharding = sharding
        self._tied = frozenset(tied_names(layout.layers))
        self._rank = mesh.coordinate("pipeline")
        self._family = family_of(config)
        self._dtype = DTYPES[config.training.precision]
        self._copies = max(header.versions_per_stage[stage] for stage in header.stages_on(self._rank))

    def stages(self) -> dict[int, Stage]:
        """Stage id -> Stage, ready to run."""
        layers, ranges = self._layout.layers, self._layout.ranges
        boundaries = [self.boundary()] * (len(ranges) - 1)
        return StageBuilder(self._header, self._rank, layers, ranges, boundaries, self._twins, self._state).stages()

    def boundary(self) -> tuple[TensorSpec, ...]:
        """What crosses every stage boundary: the residual stream [micro_size, tokens, hidden_size].

        Tokens are the sample's, or this rank's share of them under context and sequence parallelism.
        """
        config = self._config
        tokens = config.data.sequence_length // (self._mesh.size("context") * config.parallel.sequence_shards)
        shape = (config.batch.micro_size, tokens, config.model.hidden_size)
        return (TensorSpec(shape, self._dtype),)

    def _twins(self, index: int) -> list[nn.Module]:
        layer = self._layout.layers[index]
        tensor, build = self._mesh.group("tensor"), self._family.build
        return [build(layer, tensor, VOCABULARY_ALIGNMENT, self._kernels) for _ in range(self._copies)]

    def _state(self, name: str, specs: list[ParameterSpec], num_uses: int) -> UnitState:
        tensor, sharding = self._mesh.group("tensor"), self._sharding
        if name in self._tied:
            sharding = replace(sharding, stage=min(sharding.stage, 1))
        elif self._config.offload.weights:
            own = HostWeights(
                name,
                specs,
                compute_dtype=self._dtype,
                device=self._mesh.device,
                tensor_rank=tensor.rank,
                tensor_size=tensor.size,
                alignment=VOCABULARY_ALIGNMENT,
                master_weights=self._config.training.master_weights,
            )
            own.initialize(self._config.training.seed)
            return own
        state = UnitState(
            name,
            specs,
            compute_dtype=self._dtype,
            device=self._mesh.device,
            tensor_rank=tensor.rank,
            tensor_size=tensor.size,
            alignment=VOCABULARY_ALIGNMENT,
            num_versions=self._copies,
            num_uses=num_uses,
            gradient_buffers=self._header.gradient_buffers,
            master_weights=self._config.training.master_weights,
            sharding=sharding,
            in_host=self._config.offload.optimizer,
        )
        state.initialize(self._config.training.seed)
        return state


def recompute_parts(stages: Iterable[Stage], parts: Collection[RecomputedPart]) -> None:
    """Let the transformer blocks of these stages make some of their activations again in their backward."""
    for stage in stages:
        for unit in stage.units:
            for twin in unit:
                if isinstance(twin, Block):
                    twin.recompute(parts)


def share_samples_of(stages: Iterable[Stage], group: Group, kind: ContextAttention) -> None:
    """Let the transformer blocks of these stages attend to tokens that the other ranks of a context group hold."""
    for stage in stages:
        for unit in stage.units:
            for twin in unit:
                if isinstance(twin, Block):
                    share_samples(twin.attention, group, kind)


def use_fp8(stages: Mapping[int, Stage], layout: StageLayout, config: PretrainConfig, group: Group) -> None:
    """Let the transformer blocks of these stages, but for the first and last that are kept, multiply in fp8."""
    training = config.training
    if training.fp8 == "none":
        return
    products = Fp8Products(training.fp8, group)
    chosen = range(training.fp8_first_kept, config.model.num_layers - training.fp8_last_kept)
    for number, stage in stages.items():
        for unit, index in zip(stage.units, layout.ranges[number], strict=True):
            layer = layout.layers[index]
            modules = (module for twin in unit if isinstance(twin, nn.Module) for module in twin.modules())
            for module in modules if layer.kind == "block" and layer.index in chosen else ():
                if isinstance(module, Linear):
                    module.products = products


def compile_blocks(stages: Sequence[Stage]) -> None:
    """Let the transformer blocks of these stages run through one torch.compile, each as one graph unless samples are
    shared in a ring. Nothing is compiled yet."""
    twins = (twin for stage in stages for twins in stage.units for twin in twins)
    whole = [keep_rings_out_of_graphs(twin) for twin in twins if isinstance(twin, Block)]
    forward = CompiledForward(fullgraph=all(whole))
    for stage in stages:
        stage.units = [
            [CompiledUnit(twin, forward) if isinstance(twin, Block) else twin for twin in twins]
            for twins in stage.units
        ]
