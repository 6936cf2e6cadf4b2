"""Closures of what runs forward: the first time, and again ahead of the backward where only the input was kept."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megapipe.engine.compute import (
    WHOLE,
    SavedGraph,
    apart,
    as_leaves,
    requires_grad_flags,
    run_units,
    unsplit_parameters,
)
from megapipe.engine.moves import Moves
from megapipe.engine.shared_state import shared_states
from megapipe.engine.stage import Stage, UnitForward
from megapipe.engine.step import StepState, UnitKey
from megapipe.engine.transfers import Transfers
from megapipe.layers.split import SplitTape
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules.actions import Action, Kind
from megapipe.schedules.schedule import SECTIONS, Schedule

Tensors = tuple[Tensor, ...]
Closure = Callable[[StepState], None]


@dataclass(frozen=True)
class Chain:
    """Units that one action runs, by physical weight version.

    twins[copy]: the units. unsplit[copy]: their parameters that a split backward's input half has to do.
    shared: by unit, states whose weights replicas share out or host memory has; empty where there are none.
    """

    twins: Sequence[Sequence[UnitForward]]
    unsplit: Sequence[tuple[torch.nn.Parameter, ...]]
    split: bool
    shared: Sequence[tuple[UnitState, ...]]

    def forward(self, copy: int, inputs: Tensors, context: Any) -> Tensors:
        """The units' outputs, each unit run once its weights are there."""
        if not self.shared:
            return run_units(self.twins[copy], inputs, context)

        def ready(unit: int) -> None:
            for state in self.shared[unit]:
                state.await_weights(copy)

        return run_units(self.twins[copy], inputs, context, ready)

    def run(self, copy: int, inputs: Tensors, context: Any) -> tuple[Tensors, SplitTape | None]:
        """Outputs with their graph, and the tape of a split backward."""
        tape = SplitTape(self.unsplit[copy]) if self.split else None
        return self.forward(copy, inputs, replace(context, tape=tape) if self.split else context), tape


class Forwards:
    """Makes the closures of one rank's forwards and of what runs again.

    What runs again is cut out of the graph at its input. Where its rows follow one another without a row between, a
    run of units has one kept input alone, the first unit's.
    """

    def __init__(
        self, schedule: Schedule, rank: int, stages: Mapping[int, Stage], transfers: Transfers, moves: Moves
    ) -> None:
        self._moves = moves
        self._schedule = schedule
        self._stages = stages
        self._transfers = transfers
        self._training = schedule.header.mode == "train"
        count = schedule.header.num_microbatches
        actions = [action for section in SECTIONS for action in schedule.actions(section, rank)]
        self._split = {
            (action.stage, action.microbatch % count) for action in actions if action.kind == Kind.BACKWARD_INPUT
        }
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
        """action: counted from its own step."""
        stage_id, unit, microbatch, slot = action.stage, action.unit, action.microbatch, action.slot
        stage, key = self._stages[stage_id], (stage_id, microbatch)
        chain = self._chain(action)
        flags = requires_grad_flags(stage.inputs)
        enters = unit in (WHOLE, 0)
        hand_on = self._hand_on(action)
        place = stage_id, microbatch, unit
        training, again = self._training, place in self._again
        run_bare = self._run_bare(action, chain) if again else None
        moves = self._moves if training and self._moves.keeps(action) else None
        version, per_step = action.version, self._schedule.header.updates_per_step
        slots = self._transfers.receive_activation.get(stage_id) if slot >= 0 else None
        following = self._schedule.next_stage(stage_id, microbatch)
        # What is sent in training has left before its gradient comes, and the slot is kept until then.
        leaves_in_time = training and following is not None and following not in self._stages

        def run(step: StepState) -> None:
            if not enters:
                outputs = step.activations.pop(key)
                inputs = as_leaves(outputs, requires_grad_flags(outputs))
            elif slots is not None:
                inputs = as_leaves(slots.take(slot), flags)
            else:
                inputs = as_leaves(step.activations.pop(key, ()), flags)
            context = step.input.contexts[microbatch]
            if not training:
                with torch.no_grad():
                    outputs = chain.forward(stage.newest % len(chain.twins), inputs, context)
                    hand_on(step, outputs if slots is None else apart(outputs, inputs))
                return
            copy = (step.input.step * per_step + version) % len(chain.twins)
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
        """action: counted from its own step. Leaves what the first forward would have left for the backward."""
        stage_id, microbatch, unit = place = action.stage, action.microbatch, action.unit
        following = stage_id, microbatch, unit + 1
        chain = self._chain(action)
        goes_on = following in self._continuing
        version, per_step = action.version, self._schedule.header.updates_per_step

        def run(step: StepState) -> None:
            inputs = step.kept.pop(place)
            copy = (step.input.step * per_step + version) % len(chain.twins)
            outputs, tape = chain.run(copy, inputs, step.input.contexts[microbatch])
            step.pieces[place] = SavedGraph.between(inputs, outputs, tape)
            if goes_on:
                step.kept[following] = as_leaves(outputs, requires_grad_flags(outputs))

        return run

    def _chain(self, action: Action) -> Chain:
        units = self._stages[action.stage].units
        chain = units if action.unit == WHOLE else units[action.unit : action.unit + 1]
        twins = [[versions[copy] for versions in chain] for copy in range(len(units[0]))]
        split = (action.stage, action.microbatch) in self._split
        shared = shared_states(self._stages, action.stage)
        shared = shared if action.unit == WHOLE else shared[action.unit : action.unit + 1]
        unsplit = [unsplit_parameters(each) if split else () for each in twins]
        return Chain(twins, unsplit, split, shared if any(shared) else ())

    def _run_bare(self, action: Action, chain: Chain) -> Callable[[StepState, int, Tensors], Tensors]:
        """A forward that leaves nothing for a backward but its inputs, and not even these inside a run of units.

        Its outputs require grad where the graph's would: those of a unit's first forward tell.
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
        """Gives a forward's outputs to whoever takes them: the next unit or stage here, a send, the step's result."""
        key, microbatch = (action.stage, action.microbatch), action.microbatch
        following = self._schedule.next_stage(action.stage, action.microbatch)
        closes = action.unit in (WHOLE, len(self._stages[action.stage].units) - 1)
        training = self._training
        target = key
        if closes and following is not None and following in self._stages:
            target = (following, microbatch)

        def run(step: StepState, outputs: Tensors) -> None:
            if not closes or following is not None:
                step.activations[target] = outputs
            elif training:
                step.loss_sums.append(outputs[0].detach())
            else:
                step.outputs[microbatch] = outputs

        return run
