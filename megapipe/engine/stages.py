"""From layers of modules to the stages of a rank: parameters bound to unit states, tied weights found and shared."""

from collections.abc import Callable, Sequence

from torch import nn

from megapipe.engine.stage import Stage, TensorSpec
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules.schedule import Header
from megapipe.spec.parameters import LayerSpec, ParameterSpec, tied_names, tied_stages

MakeState = Callable[[str, list[ParameterSpec], int], UnitState]
"""(name, parameters, number of uses) -> state."""


class StageBuilder:
    """Builds the stages that a schedule places on a rank; a unit is a layer.

    ranges[s]: layers of stage s. boundaries[s]: what stage s hands to stage s + 1.
    make_twins: index of a layer -> its module at every weight version, parameters yet unbound. make_state: see there.
    """

    def __init__(
        self,
        header: Header,
        rank: int,
        layers: Sequence[LayerSpec],
        ranges: Sequence[range],
        boundaries: Sequence[tuple[TensorSpec, ...]],
        make_twins: Callable[[int], Sequence[nn.Module]],
        make_state: MakeState,
    ) -> None:
        self._header = header
        self._layers = layers
        self._ranges = ranges
        self._boundaries = boundaries
        self._make_twins = make_twins
        self._make_state = make_state
        self._tied_names = tied_names(tuple(layers))
        self._tied_groups = tied_stages(layers, ranges)
        self._local_stages = header.stages_on(rank)
        self._tied_states: dict[str, UnitState] = {}
        self._next_use: dict[str, int] = {}

    def stages(self) -> dict[int, Stage]:
        """Stage id -> Stage."""
        return {stage: self._stage(stage) for stage in self._local_stages}

    def _stage(self, stage: int) -> Stage:
        states: dict[int, UnitState] = {}
        units: list[Sequence[nn.Module]] = []
        for unit, index in enumerate(self._ranges[stage]):
            layer, twins = self._layers[index], self._make_twins(index)
            own = [spec for spec in layer.parameters.values() if spec.name not in self._tied_names]
            states[unit] = self._make_state(layer.name, own, 1)
            self._bind(states[unit], twins, layer, use=0)
            for name in sorted({spec.name for spec in layer.parameters.values()} & set(self._tied_names)):
                self._bind(self._tied_state(name), twins, layer, use=self._take_use(name))
            units.append(twins)
        for group, name in enumerate(self._tied_names):
            if stage in self._header.tied_owners(group) and stage in self._tied_groups[group]:
                states[len(units) + group] = self._tied_state(name)
        inputs = () if stage == 0 else self._boundaries[stage - 1]
        outputs = () if stage == len(self._ranges) - 1 else self._boundaries[stage]
        return Stage(units, states, inputs, outputs)

    @staticmethod
    def _bind(state: UnitState, twins: Sequence[nn.Module], layer: LayerSpec, use: int) -> None:
        for version, twin in enumerate(twins):
            state.bind(twin, layer.parameters, copy=version, use=use)

    def _tied_state(self, name: str) -> UnitState:
        """The tied weight's one state on this rank, with an accumulator for each local use."""
        if name not in self._tied_states:
            local = (self._layers[i] for stage in self._local_stages for i in self._ranges[stage])
            uses = [
                next(s for s in each.parameters.values() if s.name == name) for each in local if name in _names(each)
            ]
            self._tied_states[name] = self._make_state(name, uses[:1], len(uses))
        return self._tied_states[name]

    def _take_use(self, name: str) -> int:
        use = self._next_use.get(name, 0)
        self._next_use[name] = use + 1
        return use


def _names(layer: LayerSpec) -> set[str]:
    return {spec.name for spec in layer.parameters.values()}
