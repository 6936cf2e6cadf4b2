"""Closures of what goes to host memory and comes back, and of the actions that leave it or need it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from megapipe.engine.errors import EngineError
from megapipe.engine.saved_tensors import SavedTensors, address_of
from megapipe.engine.stage import Stage, UnitForward
from megapipe.engine.step import StepState, UnitKey
from megapipe.engine.swaps import Swaps
from megapipe.layers.split import SplitTape
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules.actions import Action, Kind
from megapipe.schedules.schedule import SECTIONS, Schedule

Tensors = tuple[Tensor, ...]
Closure = Callable[[StepState], None]
Forward = Callable[[Tensors], tuple[Tensors, SplitTape | None]]
"""Inputs -> outputs with their graph, and the tape of a split backward."""


class Moves:
    """Makes the closures of one rank's offloads and reloads."""

    def __init__(self, schedule: Schedule, rank: int, stages: Mapping[int, Stage], swaps: Swaps | None) -> None:
        """Raises EngineError where the schedule moves something and there are no swaps to do it."""
        count = schedule.header.num_microbatches
        self._stages = stages
        self._swaps = swaps
        self._activations: set[UnitKey] = set()
        self._states: set[tuple[int, int]] = set()
        for section in SECTIONS:
            for action in schedule.actions(section, rank):
                brings = action.kind == Kind.GATHER_WEIGHTS and schedule.header.weights_in_host
                if action.kind != Kind.OFFLOAD and not brings:
                    continue
                if swaps is None:
                    raise EngineError(
                        f"schedule {schedule.header.name} offloads, but this engine was created without swaps: pass "
                        "it a Swaps"
                    )
                if action.version < 0:
                    self._activations.add((action.stage, action.microbatch % count, action.unit))
                elif not brings:
                    self._states.add((action.stage, action.unit))

    def offload(self, action: Action) -> Closure:
        """action: counted from its own step, as everywhere here."""
        swaps = self._required()
        if action.version >= 0:
            state = self._state(action)
            return lambda step: swaps.offload_state(state)
        key = action.stage, action.microbatch, action.unit
        return lambda step: swaps.offload(step.saved[key])

    def reload(self, action: Action) -> Closure:
        """Start the copy of activations, or with a version of optimizer state, from host memory."""
        swaps = self._required()
        if action.version >= 0:
            state = self._state(action)
            return lambda step: swaps.reload_state(state)
        key = action.stage, action.microbatch, action.unit
        return lambda step: swaps.reload(step.saved[key])

    def bring_weights(self, state: UnitState) -> Closure:
        """The start of the copy of a unit's weights from host memory."""
        swaps = self._required()
        return lambda step: state.gather_weights(0, swaps)

    def backward(self, action: Action, run: Closure) -> Closure:
        """`run`, a backward or its input half, behind the arrival of its activations."""
        key = action.stage, action.microbatch, action.unit
        if key not in self._activations:
            return run
        swaps = self._required()

        def arrive_and_run(step: StepState) -> None:
            swaps.arrive(step.saved.pop(key))
            run(step)

        return arrive_and_run

    def update(self, actions: Sequence[Action], run: Closure) -> Closure:
        """`run`, the update of some units, behind the arrival of their state."""
        moved = [self._state(action) for action in actions if (action.stage, action.unit) in self._states]
        if not moved:
            return run
        swaps = self._required()

        def arrive_and_run(step: StepState) -> None:
            for state in moved:
                swaps.arrive(state)
            run(step)

        return arrive_and_run

    def keeps(self, action: Action) -> bool:
        """Whether what this forward saves for its backward leaves."""
        return (action.stage, action.microbatch, action.unit) in self._activations

    @staticmethod
    def run_forward(
        step: StepState, key: UnitKey, units: Sequence[UnitForward], inputs: Tensors, lent: bool, forward: Forward
    ) -> tuple[Tensors, Tensors, SplitTape | None]:
        """A forward whose saved tensors can leave: the leaves of its graph, its outputs and tape.

        units: those that run. lent: the inputs lie in memory that a link has lent, and stay there.
        """
        resident = [*_weights(units), *_tensors(step.input.contexts[key[1]]), *(inputs if lent else ())]
        saved = SavedTensors(address_of(tensor) for tensor in resident)
        leaves, entered = saved.entered(inputs)
        with saved.collecting():
            outputs, tape = forward(entered)
        saved.finish(outputs, tape)
        step.saved[key] = saved
        return leaves, outputs, tape

    def _state(self, action: Action) -> UnitState:
        return self._stages[action.stage].states[action.unit]

    def _required(self) -> Swaps:
        assert self._swaps is not None  # the constructor has refused the schedule otherwise
        return self._swaps


def _weights(units: Sequence[UnitForward]) -> Iterator[Tensor]:
    for unit in units:
        if isinstance(unit, nn.Module):
            yield from unit.parameters()
            yield from unit.buffers()


def _tensors(context: Any) -> Iterator[Tensor]:
    """What a micro-batch brings along, for all units."""
    for value in getattr(context, "__dict__", {}).values():
        yield from (each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, Tensor))
