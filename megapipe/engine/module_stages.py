"""Stages of any torch modules: copies of the layers that a rank runs, bound to unit states that hold their weights."""

import threading
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megapipe.engine.errors import PipelineError
from megapipe.engine.groups import unit_states
from megapipe.engine.plan_layers import Layer, ModelPlan, clone
from megapipe.engine.reductions import Communicators
from megapipe.engine.stage import Stage
from megapipe.engine.stages import StageBuilder
from megapipe.engine.units import Loss, ModuleUnit
from megapipe.layers.adoption import adopt
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules.actions import KIND, Kind
from megapipe.schedules.schedule import Schedule
from megapipe.spec.parameters import LayerSpec, ParameterSpec

WRAPPED = "module."
"""Where a layer's paths begin inside its ModuleUnit."""

GENERATOR_LOCK = threading.Lock()
"""torch's random generator is one for all threads, and ranks may be threads."""


class ModuleStages:
    """This rank's stages of `layers`. The layers themselves are left as they are: the stages run copies.

    stages: stage id -> Stage, weights not yet set; `initialize` does that. seed: what layers that are made here draw
    their weights from, together with their number.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        plan: ModelPlan,
        ranges: Sequence[range],
        mesh: Mesh,
        schedule: Schedule,
        loss: Loss,
        seed: int,
    ) -> None:
        self._layers = layers
        self._plan = plan
        self._ranges = ranges
        self._mesh = mesh
        self._schedule = schedule
        self._loss = loss
        self._seed = seed
        rank = mesh.coordinate("pipeline")
        versions = schedule.header.versions_per_stage
        self._copies = max(versions[stage] for stage in schedule.header.stages_on(rank))
        self._splits = any((rows[:, KIND] == Kind.BACKWARD_INPUT).any() for rows in schedule.sections.body)
        self._originals: dict[int, nn.Module] = {}
        builder = StageBuilder(
            schedule.header,
            rank,
            [_inside_unit(spec) for spec in plan.specs],
            ranges,
            [plan.layers[members[-1]].outputs for members in ranges[:-1]],
            self._twins,
            self._state,
        )
        self.stages: dict[int, Stage] = builder.stages()
        for index, twins in self.units().items():
            for twin in twins:
                twin.share(self._originals[index], plan.layers[index].spec.parameters)

    def units(self) -> dict[int, list[ModuleUnit]]:
        """Layer -> its copies, one a weight version, for the layers of this rank."""
        return {
            index: [twin for twin in twins if isinstance(twin, ModuleUnit)]
            for stage_id, stage in self.stages.items()
            for index, twins in zip(self._ranges[stage_id], stage.units, strict=True)
        }

    def initialize(self, groups: Communicators) -> None:
        """Take the weights of the layers; of replicas and of uses of a tied weight, the first one's. Collective."""
        states = unit_states(self.stages)
        holders = {segment.spec.name: (state, segment) for state in states for segment in state.table}
        for index in self.units():
            for path, spec in self._plan.layers[index].spec.parameters.items():
                state, segment = holders[spec.name]
                value = self._originals[index].get_parameter(path).detach()
                state.owned_view(state.master, segment).copy_(value)
        self._originals.clear()
        for state in states:
            if state.master.numel():
                self._mesh.group("data").broadcast(state.master, 0)
        for group, members in groups.tied.items():
            owned = [stage.states.get(len(stage.units) + group) for stage in self.stages.values()]
            members.broadcast(next(state for state in owned if state is not None).master, 0)
        for state in states:
            state.restore(state.newest)

    def _twins(self, index: int) -> list[ModuleUnit]:
        original = self._originals[index] = self._built(index)
        last = index == len(self._layers) - 1
        copies = []
        for _ in range(self._copies):
            module = clone(original, self._place)
            module = adopt(module) if self._splits else module
            copies.append(ModuleUnit(module, first=index == 0, loss=self._loss if last else None))
        return copies

    def _place(self, tensor: Tensor) -> Tensor:
        """A buffer on this rank's device. Parameters stay where they are: copies are bound to other memory."""
        return tensor if isinstance(tensor, nn.Parameter) else tensor.to(self._mesh.device)

    def _built(self, index: int) -> nn.Module:
        layer = self._layers[index]
        device = self._mesh.device
        if not isinstance(layer, nn.Module):
            devices = [device] if device.type == "cuda" else []
            with GENERATOR_LOCK, torch.random.fork_rng(devices), device:
                torch.manual_seed(self._seed + index)
                layer = layer()
        if any(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers())):
            raise PipelineError(
                f"layer {index} is on the meta device: pass a function that creates it instead, so that its "
                "parameters get values"
            )
        return layer

    def _state(self, name: str, specs: list[ParameterSpec], num_uses: int) -> UnitState:
        return UnitState(
            name,
            specs,
            compute_dtype=self._plan.dtype,
            device=self._mesh.device,
            num_versions=self._copies,
            num_uses=num_uses,
            gradient_buffers=self._schedule.header.gradient_buffers,
        )


def _inside_unit(spec: LayerSpec) -> LayerSpec:
    return replace(spec, parameters={WRAPPED + path: each for path, each in spec.parameters.items()})
