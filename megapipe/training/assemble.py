"""From a configuration, a mesh and a schedule to this rank's stages: the one place where model and layout meet."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megapipe.config.model import ModelConfig
from megapipe.config.recompute import RecomputeConfig, RecomputedPart
from megapipe.config.run import PretrainConfig
from megapipe.costs.compute import layer_flops
from megapipe.costs.parameters import LayerSpec, ParameterSpec
from megapipe.engine.stage import Stage, TensorSpec
from megapipe.engine.stages import StageBuilder, tied_stages
from megapipe.kernels.ops import OPS
from megapipe.kernels.registry import Registry
from megapipe.layers.compiled import CompiledForward, CompiledUnit
from megapipe.models.gpt import Block
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules.balance import balance_layers, check_assignment
from megapipe.schedules.schedule import Header
from megapipe.training.families import family_of

VOCABULARY_ALIGNMENT = 64
"""Rows of a padded vocabulary shard come in this multiple, so that its matrix product meets no odd size."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


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

    kernels: which backends run the layers' ops.
    """

    def __init__(
        self, config: PretrainConfig, mesh: Mesh, layout: StageLayout, header: Header, kernels: Registry = OPS
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._layout = layout
        self._header = header
        self._kernels = kernels
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
        """What crosses every stage boundary: the residual stream [micro_size, sequence_length, hidden_size]."""
        config = self._config
        shape = (config.batch.micro_size, config.data.sequence_length, config.model.hidden_size)
        return (TensorSpec(shape, self._dtype),)

    def _twins(self, index: int) -> list[nn.Module]:
        layer = self._layout.layers[index]
        tensor, build = self._mesh.group("tensor"), self._family.build
        return [build(layer, tensor, VOCABULARY_ALIGNMENT, self._kernels) for _ in range(self._copies)]

    def _state(self, name: str, specs: list[ParameterSpec], num_uses: int) -> UnitState:
        tensor = self._mesh.group("tensor")
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


def compile_blocks(stages: Iterable[Stage]) -> None:
    """Let the transformer blocks of these stages run through one torch.compile. Nothing is compiled yet."""
    forward = CompiledForward(fullgraph=True)
    for stage in stages:
        stage.units = [
            [CompiledUnit(twin, forward) if isinstance(twin, Block) else twin for twin in twins]
            for twins in stage.units
        ]
