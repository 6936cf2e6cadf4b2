"""Compiles a rank's actions to closures over the state of a step."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from megapipe.engine.forwards import Closure, Forwards, Moves
from megapipe.engine.host_memory import Swaps
from megapipe.engine.reductions import Reductions
from megapipe.engine.stage import WHOLE, Stage, apart, backward, backward_input, unsplit_parameters
from megapipe.engine.step import Key, StepState
from megapipe.engine.transfers import ReceiveSlots, Sender, Shards, Transfers
from megapipe.layers.split import Tensors
from megapipe.parallel.unit_state import HostWeights, UnitState
from megapipe.schedules.actions import Action, Kind
from megapipe.schedules.schedule import SECTIONS, Schedule, SectionName


@dataclass(frozen=True)
class Instruction:
    """One compiled action.

    action: the action, with micro-batch and version counted from its own step. offset: that step, counted from the
    section's step, because a body that never flushes runs the rest of one step and the beginning of the next. number:
    index of the action among the rank's actions in its section. partner: the second action of a pair, which `run` runs
    too.
    """

    run: Closure
    action: Action
    offset: int
    number: int
    partner: "Instruction | None" = None


@dataclass(eq=False)
class Program:
    """Compiles one rank's actions of one schedule.

    updates: whether UPDATE changes weights; otherwise it only clears gradients. two_streams: the last modules of each
    stage are those of the side stream (`engine.pairs`).
    """

    schedule: Schedule
    rank: int
    stages: Mapping[int, Stage]
    transfers: Transfers
    reductions: Reductions
    swaps: Swaps | None = None
    updates: bool = True
    two_streams: bool = False

    def __post_init__(self) -> None:
        schedule, rank, transfers = self.schedule, self.rank, self.transfers
        self._header = schedule.header
        moves = self._moves = Moves(schedule, rank, self.stages, self.swaps)
        forwards = Forwards(schedule, rank, self.stages, transfers, moves, self.two_streams)
        # For each unit and update, the micro-batch of its last reduction.
        self._last_reduced = {
            self._in_update(action): action.microbatch
            for section in SECTIONS
            for _, action in map(self._counted_from_its_step, schedule.actions(section, rank))
            if action.kind == Kind.REDUCE_GRADIENTS
        }
        backward = self._on_shared_state(self._backward)
        self._makers: dict[Kind, Callable[[Action], Closure]] = {
            Kind.FORWARD: forwards.forward,
            Kind.RECOMPUTE: forwards.recompute,
            Kind.BACKWARD: lambda action: moves.backward(action, backward(action)),
            Kind.BACKWARD_INPUT: lambda action: moves.backward(action, backward(action)),
            Kind.BACKWARD_WEIGHT: self._on_shared_state(self._backward_weight),
            Kind.SEND_ACTIVATION: partial(self._send, transfers.send_activation, attrgetter("activations")),
            Kind.RECV_ACTIVATION: partial(self._receive, transfers.receive_activation),
            Kind.SEND_GRADIENT: partial(self._send, transfers.send_gradient, attrgetter("gradients")),
            Kind.RECV_GRADIENT: partial(self._receive, transfers.receive_gradient),
            Kind.GATHER_WEIGHTS: self._gather_weights,
            Kind.RELEASE_WEIGHTS: self._release_weights,
            Kind.REDUCE_COUNTS: lambda action: self.reductions.start_counts,
            Kind.REDUCE_GRADIENTS: self._reduce_gradients,
            Kind.REDUCE_TIED: self._reduce_tied,
            Kind.REDUCE_SCALARS: self._reduce_scalars,
            Kind.OFFLOAD: moves.offload,
            Kind.RELOAD: moves.reload,
            Kind.SNAPSHOT: moves.snapshot,
        }

    def compile(self, section: SectionName) -> Iterator[Instruction]:
        """Yield the instructions of a section in order. Adjacent updates to one version become one instruction."""
        run: list[Action] = []
        first = offset = 0
        for number, action in enumerate(self.schedule.actions(section, self.rank)):
            own, local = self._counted_from_its_step(action)
            if run and (local.kind != Kind.UPDATE or (own, local.version) != (offset, run[0].version)):
                yield Instruction(self._update(run), run[0], offset, first)
                run = []
            if local.kind == Kind.UPDATE:
                first, offset = (first if run else number), own
                run.append(local)
            else:
                yield Instruction(self._makers[local.kind](local), local, own, number)
        if run:
            yield Instruction(self._update(run), run[0], offset, first)

    def _counted_from_its_step(self, action: Action) -> tuple[int, Action]:
        """Return an action's step, counted from its section's step, and the action with its numbers counted from that
        step."""
        step, microbatch = divmod(action.microbatch, self._header.num_microbatches)
        version = action.version - step * self._header.updates_per_step if action.version >= 0 else -1
        return step, action._replace(microbatch=microbatch, version=version)

    def _state(self, action: Action) -> UnitState:
        return self.stages[action.stage].states[action.unit]

    def _on_shared_state(self, make: Callable[[Action], Closure]) -> Callable[[Action], Closure]:
        """Return closures that first wait for the gathered weights of their unit, and allocate its gradient if it is
        sharded."""

        def made(action: Action) -> Closure:
            run, stage = make(action), self.stages[action.stage]
            units = self._header.states_of(action.stage, action.unit) if action.unit != WHOLE else range(0)
            states = [(unit, stage.states[unit]) for unit in units if unit in stage.states]
            uses = [state for _, state in states if state.transient_weights and action.kind != Kind.BACKWARD_WEIGHT]
            halves = action.kind == Kind.BACKWARD_INPUT
            adds = [
                (state, int(self._header.state_sizes[action.stage, unit]))
                for unit, state in states
                if state.sharding.gradients
                and (not halves or any(unsplit_parameters([twin]) for twin in stage.units[action.unit]))
            ]
            if not uses and not adds:
                return run
            pool, number = self.reductions.gradient_pool, self._update_number(action)
            copy = self._copy(states[0][1], action)

            def run_on_shared_state(step: StepState) -> None:
                for state in uses:
                    state.await_weights(copy(step))
                for state, size in adds:
                    pool.open(state, number(step), size)
                run(step)

            return run_on_shared_state

        return made

    def _backward(self, action: Action) -> Closure:
        stage_id, microbatch, unit = place = action.stage, action.microbatch, action.unit
        key, slot = (stage_id, microbatch), action.slot
        enters = unit in (WHOLE, len(self.stages[stage_id].units) - 1)
        leaves = unit in (WHOLE, 0)
        previous = self.schedule.previous_stage(stage_id, microbatch)
        target = key
        if leaves and previous is not None and previous in self.stages:
            target = (previous, microbatch)
        last = enters and self.schedule.next_stage(stage_id, microbatch) is None
        slots = self.transfers.receive_gradient.get(stage_id) if enters and slot >= 0 else None
        half = action.kind == Kind.BACKWARD_INPUT
        output = self._shard(stage_id, self._header.outputs)
        word = self._shard(stage_id, self._header.inputs)
        end = self.transfers.ends.get(stage_id)
        summed = end if end is not None and enters and end.stage in self._header.outputs else None
        has_receiver = not leaves or previous is not None or end is not None

        def run(step: StepState) -> None:
            piece = step.pieces[place]
            if output is not None:
                output.end_broadcast(step, microbatch)
                output.end_others(step)
            if word is not None:
                word.end_all(step)
                own = step.gradients.pop((word.end, microbatch)) if word.is_home else None
                gradients: Tensors = word.broadcast(step, microbatch, own)
            elif summed is not None:
                gradients = summed.sum_of(step, microbatch)
            elif last:
                gradients = (step.loss_gradient(microbatch),)
            elif slots is None:
                gradients = step.gradients.pop(key)
            else:
                gradients = slots.take(slot)
            if half:
                passed = backward_input(piece, gradients)
                assert piece.tape is not None
                step.tapes[place] = piece.tape
            else:
                passed = backward(piece, gradients)
            # Not earlier, because the report of a failed step reads it.
            del step.pieces[place]
            if output is not None:
                output.start_sum(step, microbatch, passed)
            elif has_receiver and word is None:
                step.gradients[target] = passed if slots is None else apart(passed, gradients)

        return run

    def _shard(self, stage: int, kind: Collection[int]) -> Shards | None:
        """Return this rank's vocabulary shard of a kind, if the stage is one."""
        return self.transfers.shards.get(stage) if stage in kind else None

    def _backward_weight(self, action: Action) -> Closure:
        key = (action.stage, action.microbatch, action.unit)
        return lambda step: step.tapes.pop(key).backward_weight()

    def _send(
        self, senders: Mapping[int, Sender], left: Callable[[StepState], dict[Key, Tensors]], action: Action
    ) -> Closure:
        """Return the closure of a send. left: returns the tensors that actions of a step have left to be sent."""
        key, sender, part = (action.stage, action.microbatch), senders[action.stage], self._part(action)
        return lambda step: sender.send(left(step).pop(key), part)

    def _receive(self, receives: Mapping[int, ReceiveSlots], action: Action) -> Closure:
        slots, slot, part = receives[action.stage], action.slot, self._part(action)
        return lambda step: slots.post(slot, part)

    def _part(self, action: Action) -> int:
        """Return the number of the sequence slice that an action belongs to."""
        return action.microbatch % self._header.slices

    def _gather_weights(self, action: Action) -> Closure:
        state = self._state(action)
        if isinstance(state, HostWeights):
            return self._moves.bring_weights(state)
        copy = self._copy(state, action)
        return lambda step: self.reductions.gather_weights(state, copy(step))

    def _release_weights(self, action: Action) -> Closure:
        state = self._state(action)
        copy = self._copy(state, action)
        return lambda step: state.release_weights(copy(step))

    def _reduce_gradients(self, action: Action) -> Closure:
        state, number = self._state(action), self._update_number(action)
        last = self._last_reduced[self._in_update(action)] == action.microbatch
        return lambda step: self.reductions.reduce_gradients(step, state, number(step), last=last)

    def _reduce_tied(self, action: Action) -> Closure:
        state, group = self._state(action), self._header.tied_group(action.stage, action.unit)
        number = self._update_number(action)
        return lambda step: self.reductions.reduce_tied(step, state, group, number(step))

    def _reduce_scalars(self, action: Action) -> Closure:
        number, shards = self._update_number(action), self.transfers.shards.values()

        def run(step: StepState) -> None:
            for shard in shards:
                shard.end_all(step)
            self.reductions.reduce_scalars(step, number(step))

        return run

    def _update(self, actions: list[Action]) -> Closure:
        states = [self._state(action) for action in actions]
        version, number = actions[0].version, self._update_number(actions[0])
        if not self.updates:
            return self._moves.update(actions, lambda step: self.reductions.clear(step, states, number(step)))

        def run(step: StepState) -> None:
            absolute, update, copies = step.absolute(version), number(step), step.input.snapshot
            if copies is None:
                self.reductions.update(step, states, absolute, update)
                return
            for state in states:  # one by one, so that each waits only for its own copy
                self._moves.may_change(copies, state)
                self.reductions.update(step, [state], absolute, update)

        return self._moves.update(actions, run)

    def _in_update(self, action: Action) -> tuple[int, int, int]:
        """Return the stage and unit of an action, and the number of its update within its step."""
        return action.stage, action.unit, action.microbatch // self._header.microbatches_per_update

    def _copy(self, state: UnitState, action: Action) -> Callable[[StepState], int]:
        """Return a function from a step to the physical version of a state's weights that an action uses. Forward mode
        uses the newest."""
        version, copies = action.version, len(state.weights)
        if self._header.mode == "forward":
            return lambda step: state.newest % copies
        return lambda step: step.absolute(version) % copies

    def _update_number(self, action: Action) -> Callable[[StepState], int]:
        """Return a function from a step to the absolute number of an action's update."""
        within = action.microbatch // self._header.microbatches_per_update
        return lambda step: step.absolute(within)
