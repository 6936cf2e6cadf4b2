"""From a configuration, a mesh and a schedule to this rank's stages: the one place where model and layout meet."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.costs.compute import layer_flops
from megapipe.costs.parameters import LayerSpec, ParameterSpec, tied_names
from megapipe.engine.stage import Stage, TensorSpec
from megapipe.models.gpt import build_layer
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules.balance import balance_layers, check_assignment
from megapipe.schedules.schedule import Header

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


def lay_out(
    layers: tuple[LayerSpec, ...],
    model: ModelConfig,
    num_stages: int,
    sequence_length: int,
    layers_per_stage: Sequence[int] | None = None,
) -> StageLayout:
    """Split layers into contiguous stages, by hand or balanced by their FLOPs.

    Raises ScheduleError with more stages than layers, or numbers by hand that do not fit.
    """
    if layers_per_stage is None:
        bounds = balance_layers([layer_flops(model, layer, 1, sequence_length).total for layer in layers], num_stages)
    else:
        bounds = check_assignment(layers_per_stage, len(layers), num_stages)
    ranges = tuple(range(first, stop) for first, stop in bounds)
    tied = []
    for name in tied_names(layers):
        users = [i for i, layer in enumerate(layers) if any(s.name == name for s in layer.parameters.values())]
        tied.append(tuple(sorted({s for s, members in enumerate(ranges) for i in users if i in members})))
    return StageLayout(layers, ranges, tuple(tied))


class Assembly:
    """Builds the stages that a schedule places on this rank, with weights drawn from the seed."""

    def __init__(self, config: PretrainConfig, mesh: Mesh, layout: StageLayout, header: Header) -> None:
        self._config = config
        self._mesh = mesh
        self._layout = layout
        self._header = header
        self._dtype = DTYPES[config.training.precision]
        self._tied_names = tied_names(layout.layers)
        self._local_stages = header.stages_on(mesh.coordinate("pipeline"))
        self._copies = max(header.versions_per_stage[stage] for stage in self._local_stages)
        self._tied_states: dict[str, UnitState] = {}
        self._next_use: dict[str, int] = {}

    def stages(self) -> dict[int, Stage]:
        """Stage id -> Stage, ready to run."""
        return {stage: self._stage(stage) for stage in self._local_stages}

    def _stage(self, stage: int) -> Stage:
        states: dict[int, UnitState] = {}
        units: list[list[nn.Module]] = []
        for unit, index in enumerate(self._layout.ranges[stage]):
            layer = self._layout.layers[index]
            twins = [
                build_layer(layer, self._config.model, self._mesh.group("tensor"), VOCABULARY_ALIGNMENT)
                for _ in range(self._copies)
            ]
            own = [spec for spec in layer.parameters.values() if spec.name not in self._tied_names]
            states[unit] = self._state(layer.name, own, num_uses=1)
            self._bind(states[unit], twins, layer, use=0)
            for name in {spec.name for spec in layer.parameters.values()} & set(self._tied_names):
                self._bind(self._tied_state(name), twins, layer, use=self._take_use(name))
            units.append(twins)
        for group, name in enumerate(self._tied_names):
            if stage in self._header.tied_owners(group) and stage in self._layout.tied[group]:
                states[len(units) + group] = self._tied_state(name)
        boundary = self.boundary()
        first, last = stage == 0, stage == len(self._layout.ranges) - 1
        return Stage(units, states, () if first else boundary, () if last else boundary)

    def boundary(self) -> tuple[TensorSpec, ...]:
        """What crosses every stage boundary: the residual stream [micro_size, sequence_length, hidden_size]."""
        config = self._config
        shape = (config.batch.micro_size, config.data.sequence_length, config.model.hidden_size)
        return (TensorSpec(shape, self._dtype),)

    def _bind(self, state: UnitState, twins: Sequence[nn.Module], layer: LayerSpec, use: int) -> None:
        for index, twin in enumerate(twins):
            state.bind(twin, layer.parameters, copy=index, use=use)

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
        )
        state.initialize(self._config.training.seed)
        return state

    def _tied_state(self, name: str) -> UnitState:
        """The tied weight's one state on this rank, with an accumulator for each local use."""
        if name not in self._tied_states:
            specs = [spec for layer in self._local_layers() for spec in layer.parameters.values() if spec.name == name]
            self._tied_states[name] = self._state(name, specs[:1], num_uses=len(specs))
        return self._tied_states[name]

    def _take_use(self, name: str) -> int:
        use = self._next_use.get(name, 0)
        self._next_use[name] = use + 1
        return use

    def _local_layers(self) -> list[LayerSpec]:
        return [self._layout.layers[i] for stage in self._local_stages for i in self._layout.ranges[stage]]
