"""Pairs: a forward and a backward that are one action run on two streams of a GPU (`group` in `schedules.actions`).

The collectives of one half then overlap the kernels of the other one (DualPipe, arXiv 2412.19437, section 3.2.1). Each
half has a thread, but only one of them runs at a time: a half yields to the other one when it has started a collective
and is about to wait for it (`DistributedGroup.pause`), and when it ends. So all ranks of a group start its collectives
in the same order. The backward's thread waits in autograd, whose device thread runs the nodes and yields.

Autograd runs a node on the stream of its forward. Therefore, every micro-batch has one stream on each stage, for all
of its actions: the main stream, or the side stream if it is paired with one of the main stream. A parameter's
gradient is added on the stream on which the parameter was first used, so each stream has its own modules over the same
weights and gradients (`Assembly`). The side stream waits for the main stream before each of its actions, and the main
stream waits for the side stream after it, so that everything else in the engine stays on the main stream.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from megapipe.engine.program import Instruction
from megapipe.engine.step import StepState
from megapipe.schedules.actions import COMPUTE_STREAM, Action, Kind, on_side_stream, pairs_of


class HalfError(RuntimeError):
    """The second action of a pair failed; `__cause__` is its error."""


class AbandonedError(RuntimeError):
    """The other half of a pair failed."""


_ABANDONED = "the other half of this pair failed"


class Alternation:
    """Two functions on two threads, only one of which runs at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn: int | None = None
        self._ended = [True, True]
        self._failed = False

    def pause(self) -> None:
        """Let the other function run until it pauses or ends; return at once if it has ended, or if no pair is
        running.

        Any thread that works for the function whose turn it is may call this. Raises AbandonedError if the other
        function failed.
        """
        if self._turn is None:
            return
        own = self._turn
        if not self._ended[1 - own]:
            with self._changed:
                self._turn = 1 - own
                self._changed.notify_all()
            self._await(own)
        elif self._failed:
            raise AbandonedError(_ABANDONED)

    def run(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Run both functions; the first one starts, on this thread.

        Raises the exception of the first one, or HalfError from that of the second one.
        """
        errors: list[BaseException] = []

        def run_second() -> None:
            try:
                self._await(1)
                second()
            except BaseException as error:
                errors.append(error)
            finally:
                self._end(1, bool(errors))

        self._ended, self._failed, self._turn = [False, False], False, 0
        thread = threading.Thread(target=run_second, name="second half of a pair", daemon=True)
        thread.start()
        failed = True
        try:
            first()
            failed = False
        except AbandonedError:
            pass
        finally:
            self._end(0, failed)
            thread.join()
            self._turn = None
        if errors:
            raise HalfError from errors[0]

    def _await(self, own: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == own)
        if self._failed:
            raise AbandonedError(_ABANDONED)

    def _end(self, own: int, failed: bool) -> None:
        with self._changed:
            self._ended[own] = True
            self._failed = self._failed or failed
            self._turn = 1 - own
            self._changed.notify_all()


class TwoStreams:
    """The main stream, which is current while a step runs, and a side stream of one GPU. turns: alternate between the
    halves of a pair."""

    def __init__(self, device: torch.device) -> None:
        self.turns = Alternation()
        self._device = device
        self._side = torch.cuda.Stream(device)

    def instructions(self, compiled: Sequence[Instruction], *, in_order: bool = False) -> list[Instruction]:
        """Return the instructions of a section, each on its stream. A pair becomes one instruction, whose second half
        is its `partner`. in_order: keep the halves separate, one after the other."""
        actions = [each.action for each in compiled]
        side, on_streams = on_side_stream(actions), list[Instruction]()
        is_side = [(action.stage, action.microbatch) in side for action in actions]
        pairs = [] if in_order else pairs_of(actions)
        firsts = {first for first in pairs if is_side[first] != is_side[first + 1]}
        for index, (instruction, action) in enumerate(zip(compiled, actions, strict=True)):
            if index in firsts:
                on_streams.append(self._pair(instruction, compiled[index + 1], is_side[index]))
            elif index - 1 in firsts:
                continue
            elif action.kind in COMPUTE_STREAM:
                on_streams.append(replace(instruction, run=self._alone(instruction, is_side[index])))
            else:
                on_streams.append(instruction)
        return on_streams

    def _alone(self, instruction: Instruction, is_side: bool) -> Callable[[StepState], None]:
        action, run = instruction.action, instruction.run
        if not is_side:

            def on_main(step: StepState) -> None:
                self._keep_entering(step, action)
                run(step)

            return on_main

        def on_side(step: StepState) -> None:
            main = torch.cuda.current_stream(self._device)
            self._side.wait_stream(main)
            with torch.cuda.stream(self._side):
                self._keep_entering(step, action)
                run(step)
            main.wait_stream(self._side)

        return on_side

    def _pair(self, one: Instruction, other: Instruction, first_on_side: bool) -> Instruction:
        turns = self.turns

        def run(step: StepState) -> None:
            main = torch.cuda.current_stream(self._device)
            self._side.wait_stream(main)

            def half(instruction: Instruction, on_side: bool) -> None:
                with torch.cuda.device(self._device), torch.cuda.stream(self._side if on_side else main):
                    self._keep_entering(step, instruction.action)
                    instruction.run(step)

            turns.run(lambda: half(one, first_on_side), lambda: half(other, not first_on_side))
            main.wait_stream(self._side)

        return replace(one, run=run, partner=other)

    def _keep_entering(self, step: StepState, action: Action) -> None:
        """Let the allocator keep tensors that another stage of this rank left for an action until the action's stream
        has used them: their memory may belong to the other stream."""
        left = step.activations if action.kind == Kind.FORWARD else step.gradients
        stream = torch.cuda.current_stream(self._device)
        for tensor in left.get((action.stage, action.microbatch), ()):
            tensor.record_stream(stream)
