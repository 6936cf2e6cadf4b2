"""The interpreter's state of one rank: its program, weights and buffers with their current contents."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from megapipe.schedules import Action, Kind
from tests.schedules.serial import Weights, first_holder, initial, mix, states_of

if TYPE_CHECKING:
    from tests.schedules.interpreter import World


class Broken(Exception):
    """The schedule does something that no machine can do, or hangs."""


class RankState:
    """One pipeline rank: its weights, buffers and program."""

    def __init__(self, world: World, rank: int, program: list[Action]) -> None:
        self.world, self.rank, self.program, self.position = world, rank, program, 0
        header = world.schedule.header
        self.names: dict[tuple[int, int], tuple[str, int, int]] = {}
        for stage in header.stages_on(rank):
            for unit in header.state_units(stage):
                tied = header.tied_group(stage, unit)
                self.names[stage, unit] = (
                    ("tied", tied, 0) if tied >= 0 else ("unit", first_holder(header, stage), unit)
                )
        self.weights: Weights = {
            name: [initial(name)] * header.versions_per_stage[stage] for (stage, _), name in self.names.items()
        }
        self.slots: dict[tuple[str, int, int], int | None] = {}
        self.values: dict[tuple[str, int, int], int] = {}
        self.inputs: dict[tuple[int, int, int], int] = {}
        self.input_slot: dict[tuple[int, int], int] = {}
        self.halves: dict[tuple[int, int, int], int] = {}
        self.gradients: dict[tuple[object, ...], list[int]] = defaultdict(list)
        self.reduced: dict[tuple[object, ...], int] = {}
        self.started: dict[tuple[object, ...], int] = defaultdict(int)
        self.again: dict[tuple[int, int, int], int] = {}
        self.runs_again = {
            (action.stage, unit, action.microbatch)
            for action in program
            if action.kind == Kind.RECOMPUTE
            for unit in self.units(action)
        }
        self.whole_gradients: set[tuple[int, int, int]] = set()
        self.gathered: dict[tuple[int, int, int], int] = {}
        self.away: set[tuple[int, int, int]] = set()
        self.state_moves = any(a.kind in (Kind.OFFLOAD, Kind.RELOAD) and a.version >= 0 for a in program)
        self.states_here: set[tuple[int, int]] = set()
        self.meant_for: dict[tuple[tuple[object, ...], int], int] = {}

    def shared(self, stage: int) -> bool:
        """Whether another stage holds the same part of the model."""
        stages = self.world.schedule.header.stages
        return sum(place.part == stages[stage].part for place in stages) > 1

    def take(self, sort: str, action: Action) -> int | None:
        """The input or gradient that a chunk starts from; None where it has not arrived."""
        if action.slot >= 0:
            if (sort, action.stage, action.slot) not in self.slots:
                raise Broken(f"reads a slot that was never posted: {action}")
            return self.slots[sort, action.stage, action.slot]
        key = (sort, action.stage, action.microbatch)
        if key not in self.values:
            raise Broken(f"nothing to start from: {action}")
        return self.values.pop(key)

    def weight(self, stage: int, unit: int, version: int, needs_gather: bool = True) -> int:
        """Return the weights of a unit: its own, and the tied ones at the stage's first unit."""
        header = self.world.schedule.header
        states = states_of(header, stage, unit)
        names = [("unit", first_holder(header, stage), state) for state in states]
        if unit == 0:
            names += [("tied", group, 0) for group, uses in enumerate(header.tied_groups) if stage in uses]
        values = [self.weights[name][version % len(self.weights[name])] for name in names]
        for index, state in enumerate(states):
            if header.stage_states[stage][state].weights != "whole" and needs_gather:
                if (stage, state, version) not in self.gathered:
                    raise Broken(f"weights of state unit {state} of stage {stage} are not gathered")
                values[index] = self.gathered[stage, state, version]
        return mix(*values)

    def gather_weights(self, action: Action) -> bool:
        place = action.stage, action.unit, action.version
        states = self.world.schedule.header.stage_states
        if place in self.gathered or states[action.stage][action.unit].weights == "whole":
            raise Broken(f"nothing to gather: {action}")
        gathered = sum(states[stage][unit].size for stage, unit, _ in (*self.gathered, place))
        if gathered > self.world.schedule.header.states.weight_pool:
            raise Broken(f"no room: {action}")
        copies = self.weights["unit", first_holder(self.world.schedule.header, action.stage), action.unit]
        self.gathered[place] = copies[action.version % len(copies)]
        return True

    def release_weights(self, action: Action) -> bool:
        del self.gathered[action.stage, action.unit, action.version]
        return True

    def units(self, action: Action) -> list[int]:
        count = self.world.schedule.header.units_per_stage[action.stage]
        return list(range(count)) if action.unit < 0 else [action.unit]

    def offload(self, action: Action) -> bool:
        if action.version >= 0:
            self.states_here.remove((action.stage, action.unit))
            return True
        for unit in self.units(action):
            place = action.stage, unit, action.microbatch
            if place not in self.inputs or place in self.away or place in self.runs_again:
                raise Broken(f"nothing to move: {action}")
            self.away.add(place)
        return True

    def reload(self, action: Action) -> bool:
        if action.version >= 0:
            place = action.stage, action.unit
            if place in self.states_here or len(self.states_here) == 2:
                raise Broken(f"no room: {action}")
            self.states_here.add(place)
            return True
        for unit in self.units(action):
            self.away.remove((action.stage, unit, action.microbatch))
        return True

    def saved_input(self, stage: int, unit: int, microbatch: int) -> int:
        """Return the current input of a unit: a receive buffer may have been overwritten since the forward."""
        if (stage, unit, microbatch) not in self.inputs:
            raise Broken("backward without forward")
        if (stage, unit, microbatch) in self.away:
            raise Broken("its activations are in host memory")
        slot = self.input_slot[stage, microbatch]
        if unit == 0 and slot >= 0:
            return mix(self.slots["activation", stage, slot])
        return mix(self.inputs[stage, unit, microbatch])
