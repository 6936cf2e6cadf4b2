"""The engine: a flat loop over a rank's actions, compiled to closures once.

Nothing here depends on a schedule's name. Every action of the lowered Schedule becomes one closure; a step runs
them in order. GPipe (1811.06965), PipeDream-Flush (2006.09503 section 3.2) and similar schedules differ only in their
actions. So does PipeDream-2BW (2006.09503 section 3.1), whose pipeline stays full from step to step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from megapipe.engine.host_memory import Swaps
from megapipe.engine.pairs import HalfError, TwoStreams
from megapipe.engine.program import Instruction, Program
from megapipe.engine.reductions import Reductions
from megapipe.engine.stage import WHOLE, Stage, UnitError, unit_states
from megapipe.engine.step import EngineError, StepInput, StepResult, StepState, action_words, finished
from megapipe.engine.trace import Recorder
from megapipe.engine.transfers import Transfers
from megapipe.schedules.actions import Kind
from megapipe.schedules.memory import with_snapshots
from megapipe.schedules.schedule import SECTIONS, Schedule, SectionName

SPARE = (64 * 2**20, *[2**19] * 32)
"""Block sizes in bytes of the two pools of torch's allocator: for large tensors, and for those of at most 1 MiB."""


@dataclass(eq=False)
class Engine:
    """Runs one rank's part of a schedule.

    schedule: lowered, mode "train" or "forward". rank: pipeline rank. stages: stage id -> Stage, exactly the stages
    that the schedule places on this rank.

    swaps: moves tensors to host memory and back, for schedules that offload. wrap: replaces each instruction, for
    example by one that reports the rank's progress. streams: run the halves of pairs at the same time; stages then
    have modules for the side stream after the others. None: one half after the other, on the current stream.

    A schedule that flushes runs a step at each `feed`. A schedule that never flushes has a step in progress between
    calls: `feed` runs the rest of it and the start of the next one, and `drain` ends it. Draining takes time, but
    changes no result.

    After a failed step an engine runs no other step, because gradients and messages are incomplete.
    """

    schedule: Schedule
    rank: int
    stages: Mapping[int, Stage]
    transfers: Transfers
    reductions: Reductions
    swaps: Swaps | None = None
    wrap: Callable[[Instruction], Instruction] | None = None
    streams: TwoStreams | None = None

    def __post_init__(self) -> None:
        """Compile the schedule. Raises EngineError when stages and schedule do not belong together."""
        schedule, rank, stages = self.schedule, self.rank, self.stages
        expected = set(schedule.header.stages_on(rank))
        if set(stages) != expected:
            raise EngineError(
                f"schedule {schedule.header.name} places stages {sorted(expected)} on "
                f"pipeline rank {rank}, but stages {sorted(stages)} were given"
            )
        self._header = schedule.header
        self._flushes = schedule.flushes
        two_streams = self.streams is not None
        self._program = partial(Program, schedule, rank, stages, swaps=self.swaps, two_streams=two_streams)
        program = self._program(self.transfers, self.reductions)
        self._compiled = {name: self._overlapped(self._wrapped(program.compile(name))) for name in SECTIONS}
        self._sections = self._compiled
        self._under_way: StepState | None = None
        self._unread: list[StepState] = []
        self._broken_by: str | None = None

    def record(self, recorder: Recorder | None) -> None:
        """Attach a recorder that was made for this schedule and rank, or detach it.

        Recorded steps run a separate program, so that other steps have no overhead. In recorded steps the halves of a
        pair run one after the other, so that each can be timed.
        """
        if self.swaps is not None:
            self.swaps.watch(None if recorder is None else recorder.stopwatch.wait)
        if recorder is None:
            self._sections = self._compiled
            return
        program = self._program(recorder.transfers(self.transfers), self.reductions.through(recorder.group))
        recorded = {name: recorder.instructions(name, self._wrapped(program.compile(name))) for name in SECTIONS}
        self._sections = {name: self._overlapped(each, in_order=True) for name, each in recorded.items()}

    def _overlapped(self, instructions: Iterable[Instruction], *, in_order: bool = False) -> list[Instruction]:
        compiled = list(instructions)
        return compiled if self.streams is None else self.streams.instructions(compiled, in_order=in_order)

    def _wrapped(self, instructions: Iterable[Instruction]) -> Iterable[Instruction]:
        return instructions if self.wrap is None else map(self.wrap, instructions)

    def run(self, step_input: StepInput) -> StepResult:
        """Run one whole step (in train mode, including the optimizer update); the pipeline is empty before and after
        it.

        Raises as `feed`, and EngineError if a step is in progress.
        """
        if self._under_way is not None:
            raise EngineError(f"step {self._under_way.input.step} is in progress; drain the engine first")
        (result,) = (*self.feed(step_input), *self.drain())
        return result

    def rehearse(self, step_input: StepInput) -> StepResult:
        """Run a step without messages between stages and without updating weights.

        This loads every kernel of the step and allocates its memory. On a GPU, loading a kernel or allocating memory
        can wait for everything that runs on the device. If that is a receive whose sender waits for this rank, the
        wait never ends (docs/nccl.md). Collectives run, so all ranks must call this. It changes neither weights nor
        optimizer state nor the gradients of later steps.

        step_input: of the next step. Returns the result of a step, whose numbers have no meaning. Raises EngineError
        if a step is in progress.
        """
        self._check(step_input)
        if self._under_way is not None:
            raise EngineError("a rehearsal needs an empty pipeline; drain the engine first")
        self.reductions.rehearse(unit_states(self.stages))
        state, compiled = StepState(step_input, self._header.updates_per_step), self._sections
        transfers = self.transfers.without_peers()
        program = self._program(transfers, self.reductions, updates=False)
        names: list[SectionName] = ["body"] if self._flushes else ["prologue", "epilogue"]
        # Later steps also hold the samples of the previous step, and prefetched samples.
        spare = [torch.empty(size, dtype=torch.uint8, device=self.reductions.device) for size in SPARE]
        try:
            self._sections = {name: self._overlapped(program.compile(name)) for name in names}
            for name in names:
                self._execute(name, (state,))
            transfers.drain()  # frees tensors that would live until Python collects garbage
        finally:
            self._sections = compiled
            spare.clear()
        return finished(state)  # a thread computes the sums of a schedule that never flushes

    def feed(self, step_input: StepInput) -> tuple[StepResult, ...]:
        """Start the next step, and run it as far as possible before the step after it is known.

        Returns the steps that ended, in order: the step itself if the schedule flushes, otherwise the step before it,
        and none at first. Raises EngineError, which names rank, step and action.
        """
        self._check(step_input)
        state = StepState(step_input, self._header.updates_per_step)
        copies = () if step_input.snapshot is None else self._snapshot_instructions
        if self._flushes:
            self._execute("body", (state,), copies)
            self._await_sends(step_input.step)
            return (finished(state),)
        if self._under_way is None:
            self._execute("prologue", (state,), copies)
            self._under_way = state
            return ()
        ended, self._under_way = self._under_way, state
        self._execute("body", (ended, state))
        return self._ended(ended)

    def drain(self) -> tuple[StepResult, ...]:
        """End all steps in progress and return their results.

        Raises as `feed`.
        """
        self._require_whole()
        if self._under_way is None:
            return ()
        ended, self._under_way = self._under_way, None
        self._execute("epilogue", (ended,))
        self._await_sends(ended.input.step)
        results = (*self._ended(ended), *map(self._checked_result, self._unread))
        self._unread = []
        return results

    def _check(self, step_input: StepInput) -> None:
        """Raise EngineError if a step does not fit the schedule or does not follow the step in progress."""
        self._require_whole()
        expected = self._header.num_microbatches
        if len(step_input.contexts) != expected:
            raise EngineError(
                f"step {step_input.step} has {len(step_input.contexts)} micro-batches, "
                f"and schedule {self._header.name} was built for {expected}"
            )
        if self._under_way is None:
            return
        step, current = step_input.step, self._under_way.input.step
        if step != current + 1:
            raise EngineError(
                f"step {step} does not follow step {current}, which is in progress; "
                "run the steps in order, or drain the engine between them"
            )
        if step_input.snapshot is not None:
            raise EngineError(
                f"step {step} copies the state for a checkpoint, and step {current}, "
                "which is in progress, changes it; drain the engine before"
            )

    def _require_whole(self) -> None:
        if self._broken_by is not None:
            raise EngineError(
                "a step of this engine failed and left partial gradients "
                f"({self._broken_by}); create a new engine from the last good weights"
            )

    def _ended(self, state: StepState) -> tuple[StepResult, ...]:
        """Return the results that are ready. If updates do not wait for the scalars of a step, waiting for them here
        would empty the pipeline: such a result is returned with that of the next step."""
        if self._header.updates_per_step == 1:
            return (finished(state),)
        unread, self._unread = self._unread, [state]
        return tuple(map(self._checked_result, unread))

    def _checked_result(self, state: StepState) -> StepResult:
        """Return the result of a step whose updates could not be skipped. Raises EngineError if they should have
        been."""
        result = finished(state)
        if result.skipped:
            raise EngineError(
                f"the gradients of step {result.step} were not finite, "
                f"and {self._header.name} updates after every micro-batch, before that "
                "is known; continue from the last checkpoint with a lower learning rate"
            )
        return result

    @cached_property
    def _snapshot_instructions(self) -> Sequence[Instruction]:
        """Instructions at the start of a step that copies its state; the other instructions are unchanged."""
        schedule = with_snapshots(self.schedule)
        program = Program(schedule, self.rank, self.stages, self.transfers, self.reductions, self.swaps)
        compiled = self._wrapped(program.compile("body" if self._flushes else "prologue"))
        return [each for each in compiled if each.action.kind == Kind.SNAPSHOT]

    def _execute(self, section: SectionName, steps: Sequence[StepState], before: Sequence[Instruction] = ()) -> None:
        """Run the actions of a section. steps: those in progress, its own first. before: instructions to run first."""
        for instruction in (*before, *self._sections[section]):
            try:
                instruction.run(steps[instruction.offset])
            except Exception as error:
                raised: BaseException | None = error
                failed, unit = instruction, None
                if isinstance(error, HalfError):
                    assert instruction.partner is not None
                    raised, failed = error.__cause__, instruction.partner
                if isinstance(raised, UnitError):
                    unit, raised = raised.unit, raised.__cause__
                raise self._failure(failed, steps, raised, unit) from raised
            except BaseException as error:
                self._broken_by = f"step {steps[instruction.offset].input.step}: {error!r}"
                raise
        if self.swaps is not None:
            self.swaps.end_section()

    def _await_sends(self, step: int) -> None:
        try:
            self.transfers.drain()
        except Exception as error:
            place = f"pipeline rank {self.rank}, step {step}, after the last action of {self._header.name}"
            self._broken_by = f"{place}: {error}"
            raise EngineError(self._broken_by) from error

    def _failure(
        self, instruction: Instruction, steps: Sequence[StepState], error: BaseException | None, unit: int | None
    ) -> EngineError:
        action, step = instruction.action, steps[instruction.offset].input.step
        if unit is not None and action.unit != WHOLE:
            unit += action.unit
        states = self.stages[action.stage].states if unit is not None else {}
        name = "" if unit is None else f", unit {states[unit].name if unit in states else unit}"
        place = f"pipeline rank {self.rank}, step {step}, action {instruction.number} of {self._header.name}"
        self._broken_by = f"{place}: {action_words(action)}{name}: {error}"
        return EngineError(self._broken_by, action, steps, unit)
