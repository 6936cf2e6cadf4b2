"""Only the compute actions of a schedule, on sleeping stages: the time that autograd takes by itself."""

import torch
from torch import Tensor

from megapipe.layers.split import SplitTape
from megapipe.schedules import Schedule
from megapipe.schedules.actions import Action, Kind
from pipeline_contest.setting import Setting, Step


class Compute:
    """The stages of one rank, and the autograd graphs that are alive."""

    def __init__(self, setting: Setting, schedule: Schedule) -> None:
        self._stages = {stage: setting.stage() for stage in schedule.header.stages_on(setting.rank)}
        halves = (a for a in schedule.actions("body", setting.rank) if a.kind == Kind.BACKWARD_INPUT)
        self._split = {(action.stage, action.microbatch) for action in halves}
        self._alive: dict[tuple[int, int], tuple[Tensor, Tensor, SplitTape | None]] = {}

    def run(self, action: Action, incoming: Tensor) -> Tensor | None:
        """Run a compute action and return the tensor for the next stage, if any. incoming: the input, or the gradient
        of the output."""
        key = (action.stage, action.microbatch)
        if action.kind == Kind.FORWARD:
            leaf, tape = incoming.detach().requires_grad_(), SplitTape() if key in self._split else None
            y = self._stages[action.stage](leaf, tape)
            self._alive[key] = leaf, y, tape
            return y
        if action.kind == Kind.BACKWARD:
            leaf, y, _ = self._alive.pop(key)
            torch.autograd.backward(y, incoming)
            return leaf.grad
        if action.kind == Kind.BACKWARD_INPUT:
            leaf, y, tape = self._alive[key]
            assert tape is not None
            return tape.backward_input((y,), (incoming,), (leaf,))[0]
        tape = self._alive.pop(key)[2]
        assert tape is not None
        tape.backward_weight()
        return None


COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def compute_only(setting: Setting, schedule: Schedule) -> Step:
    """Return a step that runs one rank's forwards and backwards in order, on tensors that need no transfer."""
    compute = Compute(setting, schedule)
    actions = [action for action in schedule.actions("body", setting.rank) if action.kind in COMPUTE]

    def step() -> None:
        for action in actions:
            compute.run(action, setting.x)

    return step
