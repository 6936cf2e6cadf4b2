"""From a rank's actions to closures over the step's state."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from megapipe.engine.compute import WHOLE, Piece, as_leaves, backward, backward_input, requires_grad_flags, run_units
from megapipe.engine.errors import EngineError
from megapipe.engine.reductions import Reductions
from megapipe.engine.stage import Stage
from megapipe.engine.step import StepState
from megapipe.engine.transfers import Transfers
from megapipe.layers.split import SplitTape
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules.actions import Action, Kind
from megapipe.schedules.schedule import Schedule, SectionName

Closure = Callable[[StepState], None]


class Program:
    """Compiles one rank's actions of one schedule."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, Stage],
        transfers: Transfers,
        reductions: Reductions,
    ) -> None:
        self._schedule = schedule
        self._header = schedule.header
        self._rank = rank
        self._stages = stages
        self._transfers = transfers
        self._reductions = reductions
        self._training = schedule.header.mode == "train"
        self._split = {
            (action.stage, action.microbatch)
            for action in schedule.actions("body", rank)
            if action.kind == Kind.BACKWARD_INPUT
        }
        self._makers: dict[Kind, Callable[[Action], Closure]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.RECV_ACTIVATION: self._receive_activation,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.RECV_GRADIENT: self._receive_gradient,
            Kind.REDUCE_COUNTS: lambda action: self._reductions.start_counts,
            Kind.REDUCE_GRADIENTS: self._reduce_gradients,
            Kind.REDUCE_TIED: self._reduce_tied,
            Kind.REDUCE_SCALARS: lambda action: self._reductions.reduce_scalars,
        }

    def compile(self, section: SectionName) -> Iterator[tuple[Closure, Action]]:
        """Closures of a section in order; neighbouring updates to one version become one."""
        run: list[Action] = []
        for action in self._schedule.actions(section, self._rank):
            if run and (action.kind != Kind.UPDATE or action.version != run[0].version):
                yield self._update(run), run[0]
                run = []
            if action.kind == Kind.UPDATE:
                run.append(action)
            elif action.kind in self._makers:
                yield self._makers[action.kind](action), action
            else:
                raise EngineError(f"the engine does not run {action.kind.name} actions yet (rank {self._rank})")
        if run:
            yield self._update(run), run[0]

    def _state(self, action: Action) -> UnitState:
        return self._stages[action.stage].states[action.unit]

    def _forward(self, action: Action) -> Closure:
        stage_id, unit, microbatch, slot = action.stage, action.unit, action.microbatch, action.slot
        stage, key = self._stages[stage_id], (stage_id, microbatch)
        flags = requires_grad_flags(stage.inputs)
        enters = unit in (WHOLE, 0)
        leaves = unit in (WHOLE, len(stage.units) - 1)
        next_stage = self._schedule.next_stage(stage_id, microbatch)
        local_next = next_stage if next_stage in self._stages else None
        copies, split, training = len(stage.units[0]), key in self._split, self._training
        slots = self._transfers.receive_activation.get(stage_id)

        def run(step: StepState) -> None:
            if not enters:
                inputs = as_leaves(*_with_flags(step.pieces[key][-1].outputs))
            elif slots is not None and slot >= 0:
                inputs = as_leaves(slots.take(slot), flags)
            else:
                inputs = as_leaves(step.activations.pop(key, ()), flags)
            version = (step.input.step * self._header.updates_per_step + action.version) % copies
            context = step.input.contexts[microbatch]
            if split:
                context = replace(context, tape=SplitTape())
            with torch.set_grad_enabled(training):
                outputs = run_units(stage, unit, version, inputs, context)
            step.pieces.setdefault(key, []).append(Piece(inputs, outputs, context.tape if split else None))
            if leaves:
                self._hand_on(step, key, outputs, next_stage, local_next)

        return run

    def _hand_on(
        self,
        step: StepState,
        key: tuple[int, int],
        outputs: tuple[torch.Tensor, ...],
        next_stage: int | None,
        local_next: int | None,
    ) -> None:
        """Give a stage's outputs to whoever takes them: the next stage here, a send, or the step's result."""
        if local_next is not None:
            step.activations[local_next, key[1]] = outputs
        elif next_stage is not None:
            step.activations[key] = outputs
        elif self._training:
            step.loss_sums.append(outputs[0].detach())
        else:
            step.outputs[key[1]] = outputs
        if not self._training:
            del step.pieces[key]

    def _backward(self, action: Action) -> Closure:
        stage_id, unit, microbatch, slot = action.stage, action.unit, action.microbatch, action.slot
        key = (stage_id, microbatch)
        enters = unit in (WHOLE, len(self._stages[stage_id].units) - 1)
        leaves = unit in (WHOLE, 0)
        previous = self._schedule.previous_stage(stage_id, microbatch)
        last = self._schedule.next_stage(stage_id, microbatch) is None
        slots = self._transfers.receive_gradient.get(stage_id)
        half = action.kind == Kind.BACKWARD_INPUT

        def run(step: StepState) -> None:
            pieces = step.pieces[key]
            piece = pieces[-1] if not half else next(p for p in reversed(pieces) if p.outputs)
            if not enters:
                gradients = step.gradients.pop(key)
            elif last:
                gradients = (step.loss_gradient(piece.outputs[0]),)
            elif slots is not None and slot >= 0:
                gradients = slots.take(slot)
            else:
                gradients = step.gradients.pop(key)
            if half:
                passed = backward_input(piece, gradients)
                piece.outputs = ()
            else:
                passed = backward(piece, gradients)
                pieces.pop()
            if not leaves:
                step.gradients[key] = passed
            elif previous is not None:
                target = previous if previous in self._stages else stage_id
                step.gradients[target, microbatch] = passed
            if leaves and not half:
                del step.pieces[key]

        return run

    def _backward_weight(self, action: Action) -> Closure:
        key, unit = (action.stage, action.microbatch), action.unit
        num_units = len(self._stages[action.stage].units)

        def run(step: StepState) -> None:
            pieces = step.pieces[key]
            piece = pieces[0] if unit == WHOLE else pieces[unit]
            assert piece.tape is not None
            piece.tape.backward_weight()
            piece.tape = None
            if unit == WHOLE or (len(pieces) == num_units and all(other.tape is None for other in pieces)):
                del step.pieces[key]

        return run

    def _send_activation(self, action: Action) -> Closure:
        key, sender = (action.stage, action.microbatch), self._transfers.send_activation[action.stage]
        return lambda step: sender.send(step.activations.pop(key))

    def _send_gradient(self, action: Action) -> Closure:
        key, sender = (action.stage, action.microbatch), self._transfers.send_gradient[action.stage]
        return lambda step: sender.send(step.gradients.pop(key))

    def _receive_activation(self, action: Action) -> Closure:
        slots, slot = self._transfers.receive_activation[action.stage], action.slot
        return lambda step: slots.post(slot)

    def _receive_gradient(self, action: Action) -> Closure:
        slots, slot = self._transfers.receive_gradient[action.stage], action.slot
        return lambda step: slots.post(slot)

    def _reduce_gradients(self, action: Action) -> Closure:
        state = self._state(action)
        return lambda step: self._reductions.reduce_gradients(step, state)

    def _reduce_tied(self, action: Action) -> Closure:
        state, group = self._state(action), action.unit - self._header.units_per_stage[action.stage]
        return lambda step: self._reductions.reduce_tied(step, state, group)

    def _update(self, actions: list[Action]) -> Closure:
        states = [self._state(action) for action in actions]
        version, per_step = actions[0].version, self._header.updates_per_step
        return lambda step: self._reductions.update(step, states, step.input.step * per_step + version)


def _with_flags(outputs: tuple[torch.Tensor, ...]) -> tuple[tuple[torch.Tensor, ...], tuple[bool, ...]]:
    return outputs, tuple(output.requires_grad for output in outputs)
