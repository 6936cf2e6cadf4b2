"""The least processor time that autograd takes for a schedule's compute actions: nothing else is done here."""

import torch
from torch import Tensor

from megapipe.layers.split import SplitTape
from megapipe.schedules import Schedule
from megapipe.schedules.actions import Action, Kind
from pipeline_contest.setting import Setting, Step


def compute_only(setting: Setting, schedule: Schedule) -> Step:
    """One rank's forwards and backwards in order, on tensors that are always there."""
    stages = {stage: setting.stage() for stage in schedule.header.stages_on(setting.rank)}
    actions = list(schedule.actions("body", setting.rank))
    split = any(action.kind == Kind.BACKWARD_INPUT for action in actions)
    alive: dict[tuple[int, int], tuple[Tensor, Tensor, SplitTape | None]] = {}
    gradient = setting.x

    def run(action: Action) -> None:
        key = (action.stage, action.microbatch)
        if action.kind == Kind.FORWARD:
            leaf = setting.x.detach().requires_grad_()
            tape = SplitTape() if split else None
            alive[key] = leaf, stages[action.stage](leaf, tape), tape
        elif action.kind == Kind.BACKWARD:
            torch.autograd.backward(alive.pop(key)[1], gradient)
        elif action.kind == Kind.BACKWARD_INPUT:
            leaf, y, tape = alive[key]
            assert tape is not None
            tape.backward_input((y,), (gradient,), (leaf,))
        elif action.kind == Kind.BACKWARD_WEIGHT:
            tape = alive.pop(key)[2]
            assert tape is not None
            tape.backward_weight()

    def step() -> None:
        for action in actions:
            run(action)

    return step
