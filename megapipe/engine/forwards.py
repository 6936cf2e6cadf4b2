"""Closures of forwards and recomputations, and of the copies to host memory and back around them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.engine.host_memory import SavedTensors, StateCopies, Swaps, address_of
from megapipe.engine.reductions import shared_states
from megapipe.engine.stage import (
    WHOLE,
    SavedGraph,
    Stage,
    UnitForward,
    apart,
    as_leaves,
    requires_grad_flags,
    run_units,
    unsplit_parameters,
)
from megapipe.engine.step import EngineError, StepState, UnitKey
from megapipe.engine.transfers import Transfers
from megapipe.layers.split import SplitTape, Tensors
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules.actions import Action, Kind, on_side_stream
from megapipe.schedules.schedule import SECTIONS, Schedule

Closure = Callable[[StepState], None]
Forward = Callable[[Tensors], tuple[Tensors, SplitTape | None]]
"""A function from inputs to outputs with their graph, and the tape of a split backward."""


class Moves:
    """Makes the closures of one rank's offloads and reloads."""

    def __init__(self, schedule: Schedule, rank: int, stages: Mapping[int, Stage], swaps: Swaps | None) -> None:
        """Raise EngineError if the schedule offloads and there are no swaps."""
        count = schedule.header.num_microbatches
        self._stages = stages
        self._swaps = swaps
        self._activations: set[UnitKey] = set()
        self._states: set[tuple[int, int]] = set()
        for section in SECTIONS:
            for action in schedule.actions(section, rank):
                gathers = action.kind == Kind.GATHER_WEIGHTS
                brings = gathers and schedule.header.host_weights[action.stage, action.unit]
                if action.kind not in (Kind.OFFLOAD, Kind.SNAPSHOT) and not brings:
                    continue
                if swaps is None:
                    raise EngineError(
                        f"schedule {schedule.header.name} copies to host memory, "
                        "but this engine was created without swaps: pass it a Swaps"
                    )
                if action.kind == Kind.OFFLOAD and action.version >= 0:
                    self._states.add((action.stage, action.unit))
                elif action.kind == Kind.OFFLOAD:
                    key = action.stage, action.microbatch % count, action.unit
                    self._activations.add(key)

    def offload(self, action: Action) -> Closure:
        """Return a closure that starts copying activations to host memory, or optimizer state if the action has a
        version. action: counted from its own step, as in all methods of this class."""
        swaps = self._required()
        return self._moved(action, swaps.offload, swaps.offload_state)

    def reload(self, action: Action) -> Closure:
        """Return a closure that starts copying activations or optimizer state, as in `offload`, back to the device."""
        swaps = self._required()
        return self._moved(action, swaps.reload, swaps.reload_state)

    def _moved(
        self, action: Action, activations: Callable[[SavedTensors], None], optimizer_state: Callable[[UnitState], None]
    ) -> Closure:
        if action.version >= 0:
            state = self._state(action)
            return lambda step: optimizer_state(state)
        key = action.stage, action.microbatch, action.unit
        return lambda step: activations(step.saved[key])

    def snapshot(self, action: Action) -> Closure:
        """Return a closure that starts copying a unit's state for a checkpoint, if the step makes one."""
        swaps, state = self._required(), self._state(action)

        def run(step: StepState) -> None:
            if step.input.snapshot is not None:
                swaps.snapshot(step.input.snapshot, state)

        return run

    def bring_weights(self, state: UnitState) -> Closure:
        """Return a closure that starts copying a unit's weights from host memory."""
        swaps = self._required()
        return lambda step: state.gather_weights(0, swaps)

    def backward(self, action: Action, run: Closure) -> Closure:
        """Return a closure that waits for the activations of `run`, a backward or its input half, and then runs it."""
        key = action.stage, action.microbatch, action.unit
        if key not in self._activations:
            return run
        return self._after_arrival(lambda step: [step.saved.pop(key)], run)

    def may_change(self, copies: StateCopies, state: UnitState) -> None:
        """Wait for the copy of a unit's state for a checkpoint."""
        self._required().may_change(copies, state)

    def update(self, actions: Sequence[Action], run: Closure) -> Closure:
        """Return a closure that waits for the state of some units, and then runs `run`, their update."""
        moved = [self._state(action) for action in actions if (action.stage, action.unit) in self._states]
        return self._after_arrival(lambda step: moved, run) if moved else run

    def _after_arrival(
        self, owners: Callable[[StepState], Sequence[SavedTensors | UnitState]], run: Closure
    ) -> Closure:
        swaps = self._required()

        def arrive_and_run(step: StepState) -> None:
            for owner in owners(step):
                swaps.arrive(owner)
            run(step)

        return arrive_and_run

    def keeps(self, action: Action) -> bool:
        """Return whether the saved tensors of this forward are offloaded."""
        return (action.stage, action.microbatch, action.unit) in self._activations

    @staticmethod
    def run_forward(
        step: StepState, key: UnitKey, units: Sequence[UnitForward], inputs: Tensors, lent: bool, forward: Forward
    ) -> tuple[Tensors, Tensors, SplitTape | None]:
        """Run a forward whose saved tensors can be offloaded; return the leaves of its graph, its outputs and tape.

        units: the units that run. lent: the inputs are in memory that a link lends, and stay there.
        """
        resident = [*_weights(units), *_tensors(step.input.contexts[key[1]])]
        resident += inputs if lent else ()
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
        assert self._swaps is not None  # the constructor refuses schedules that would need one
        return self._swaps


def _weights(units: Sequence[UnitForward]) -> Iterator[Tensor]:
    for unit in units:
        if isinstance(unit, nn.Module):
            yield from unit.parameters()
            yield from unit.buffers()


def _tensors(context: Any) -> Iterator[Tensor]:
    """Yield the tensors of a micro-batch."""
    for value in getattr(context, "__dict__", {}).values():
        values = value if isinstance(value, tuple) else (value,)
        yield from (each for each in values if isinstance(each, Tensor))


@dataclass(frozen=True)
class Chain:
    """Units that one action runs, by physical weight version.

    twins[copy]: the units. unsplit[copy]: their parameters whose gradients the input half of a split backward
    computes. shared: for each unit, the states whose weights are sharded or in host memory; empty if there are none.
    """

    twins: Sequence[Sequence[UnitForward]]
    unsplit: Sequence[tuple[torch.nn.Parameter, ...]]
    split: bool
    shared: Sequence[tuple[UnitState, ...]]

    def forward(self, copy: int, inputs: Tensors, context: Any) -> Tensors:
        """Return the outputs of the units; each unit waits for its weights."""
        if not self.shared:
            return run_units(self.twins[copy], inputs, context)

        def ready(unit: int) -> None:
            for state in self.shared[unit]:
                state.await_weights(copy)

        return run_units(self.twins[copy], inputs, context, ready)

    def run(self, copy: int, inputs: Tensors, context: Any) -> tuple[Tensors, SplitTape | None]:
        """Run the units, and return their outputs with the graph, and the tape of a split backward."""
        if not self.split:
            return self.forward(copy, inputs, context), None
        tape = SplitTape(self.unsplit[copy])
        return self.forward(copy, inputs, replace(context, tape=tape)), tape


@dataclass(eq=False)
class Forwards:
    """Makes the closures of one rank's forwards and recomputations.

    The graph is cut at the input of a recomputed unit. Consecutive recomputed units keep only the input of the first
    one.
    """

    schedule: Schedule
    rank: int
    stages: Mapping[int, Stage]
    transfers: Transfers
    moves: Moves
    two_streams: bool

    def __post_init__(self) -> None:
        schedule, rank = self.schedule, self.rank
        self._training = schedule.header.mode == "train"
        count = schedule.header.num_microbatches
        actions = [each for section in SECTIONS for each in schedule.actions(section, rank)]
        halves = [action for action in actions if action.kind == Kind.BACKWARD_INPUT]
        self._split = {(half.stage, half.microbatch % count) for half in halves}
        self._on_side = on_side_stream(list(schedule.actions("body", rank))) if self.two_streams else frozenset()
        self._again: set[UnitKey] = set()
        self._continuing: set[UnitKey] = set()
        before = Action(Kind.UPDATE)
        for action in actions:
            if action.kind == Kind.RECOMPUTE:
                key = action.stage, action.microbatch % count, action.unit
                self._again.add(key)
                if before == action._replace(unit=action.unit - 1):
                    self._continuing.add(key)
            before = action
        self._flags: dict[tuple[int, int], tuple[bool, ...]] = {}

    def forward(self, action: Action) -> Closure:
        """Return the closure of a forward. action: counted from its own step."""
        stage_id, microbatch, unit = place = action.stage, action.microbatch, action.unit
        stage, key, slot = self.stages[stage_id], (stage_id, microbatch), action.slot
        chain = self._chain(action)
        flags = requires_grad_flags(stage.inputs)
        shard, summed = self.transfers.shards.get(stage_id), self.transfers.ends.get(stage_id)
        receives = shard is not None and stage_id in self.schedule.header.outputs
        summed = summed if summed is not None and summed.stage in self.schedule.header.inputs else None
        enters = unit in (WHOLE, 0)
        hand_on = self._hand_on(action)
        training, again = self._training, place in self._again
        run_bare = self._run_bare(action, chain) if again else None
        moves = self.moves if training and self.moves.keeps(action) else None
        version = action.version
        slots = self.transfers.receive_activation.get(stage_id) if slot >= 0 else None
        following = self.schedule.next_stage(stage_id, microbatch)
        # In training an output has been sent before its gradient arrives, and its slot is kept until then.
        leaves_in_time = training and following is not None and following not in self.stages

        def run(step: StepState) -> None:
            if not enters:
                outputs = step.activations.pop(key)
                inputs = as_leaves(outputs, requires_grad_flags(outputs))
            elif shard is not None and receives:
                own = step.activations.pop((shard.end, microbatch)) if shard.is_home else None
                own = None if own is None else tuple(each.detach() for each in own)
                inputs = as_leaves(shard.broadcast(step, microbatch, own), flags)
            elif summed is not None:
                inputs = as_leaves(summed.sum_of(step, microbatch), flags)
            elif slots is not None:
                inputs = as_leaves(slots.take(slot), flags)
            else:
                inputs = as_leaves(step.activations.pop(key, ()), flags)
            context = step.input.contexts[microbatch]
            if shard is not None and not receives:
                shard.end_all(step)
            if not training:
                with torch.no_grad():
                    outputs = chain.forward(stage.newest % len(chain.twins), inputs, context)
                    hand_on(step, outputs if slots is None else apart(outputs, inputs))
                if receives:
                    for each in self.transfers.shards.values():
                        each.end_all(step)
                return
            copy = step.absolute(version) % len(chain.twins)
            leaves = inputs
            if run_bare is not None:
                outputs = run_bare(step, copy, inputs)
            elif moves is not None:
                leaves, outputs, tape = moves.run_forward(
                    step, place, chain.twins[copy], inputs, slots is not None, lambda x: chain.run(copy, x, context)
                )
            else:
                outputs, tape = chain.run(copy, inputs, context)
            if slots is not None and not leaves_in_time:
                outputs = apart(outputs, inputs)
            if run_bare is None:
                step.pieces[place] = SavedGraph.between(leaves, outputs, tape)
            hand_on(step, outputs)

        return run

    def recompute(self, action: Action) -> Closure:
        """Return the closure of a recomputation, which leaves the graph that its backward needs."""
        stage_id, microbatch, unit = place = action.stage, action.microbatch, action.unit
        following = stage_id, microbatch, unit + 1
        chain = self._chain(action)
        goes_on = following in self._continuing
        version = action.version

        def run(step: StepState) -> None:
            inputs = step.kept.pop(place)
            copy = step.absolute(version) % len(chain.twins)
            outputs, tape = chain.run(copy, inputs, step.input.contexts[microbatch])
            step.pieces[place] = SavedGraph.between(inputs, outputs, tape)
            if goes_on:
                step.kept[following] = as_leaves(outputs, requires_grad_flags(outputs))

        return run

    def _chain(self, action: Action) -> Chain:
        units = self.stages[action.stage].units
        chain = units if action.unit == WHOLE else units[action.unit : action.unit + 1]
        copies = len(units[0]) // 2 if self.two_streams else len(units[0])
        start = copies if (action.stage, action.microbatch) in self._on_side else 0
        twins = [[versions[start + copy] for versions in chain] for copy in range(copies)]
        split = (action.stage, action.microbatch) in self._split
        shared = shared_states(self.schedule.header, self.stages, action.stage)
        shared = shared if action.unit == WHOLE else shared[action.unit : action.unit + 1]
        unsplit = [unsplit_parameters(each) if split else () for each in twins]
        return Chain(twins, unsplit, split, shared if any(shared) else ())

    def _run_bare(self, action: Action, chain: Chain) -> Callable[[StepState, int, Tensors], Tensors]:
        """Return a forward that keeps only its inputs, and only if it starts a group of recomputed units.

        Its outputs require grad if those of the graph do, which is known from the unit's first forward.
        """
        microbatch, place = action.microbatch, (action.stage, action.unit)
        kept = (action.stage, microbatch, action.unit)
        keeps = kept not in self._continuing
        known = self._flags

        def run(step: StepState, copy: int, inputs: Tensors) -> Tensors:
            context = step.input.contexts[microbatch]
            with torch.set_grad_enabled(place not in known):
                outputs = chain.forward(copy, inputs, context)
            flags = known.setdefault(place, requires_grad_flags(outputs))
            if keeps:
                step.kept[kept] = inputs
            return as_leaves(outputs, flags)

        return run

    def _hand_on(self, action: Action) -> Callable[[StepState, Tensors], None]:
        """Return a function that passes outputs on: to the next unit or stage here, a send, or the step's result."""
        key, microbatch = (action.stage, action.microbatch), action.microbatch
        following = self.schedule.next_stage(action.stage, action.microbatch)
        shard, end = self.transfers.shards.get(action.stage), self.transfers.ends.get(action.stage)
        to_shards = end is not None and end.stage in self.schedule.header.outputs
        to_sum = shard if action.stage in self.schedule.header.inputs else None
        closes = action.unit in (WHOLE, len(self.stages[action.stage].units) - 1)
        training = self._training
        target = key
        if closes and following is not None and following in self.stages:
            target = (following, microbatch)

        def run(step: StepState, outputs: Tensors) -> None:
            if to_sum is not None:
                to_sum.start_sum(step, microbatch, tuple(each.detach() for each in outputs))
            elif not closes or following is not None or to_shards:
                step.activations[target] = outputs
            elif training:
                step.loss_sums.append(outputs[0].detach())
            else:
                step.outputs[microbatch] = outputs

        return run
