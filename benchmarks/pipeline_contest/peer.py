"""torch.distributed.pipelining with the same sleeping stages."""

from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining import PipelineStage

from pipeline_contest.orders import Race, TorchOrder
from pipeline_contest.setting import Setting, Step
from pipeline_contest.sleeping import sleeping_loss

_COUNTED = {"F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"}


@dataclass(frozen=True)
class Peer:
    """torch's runtime of a schedule.

    order, actions: order and number of the actions in torch's list; None if torch does not make a list.
    """

    step: Step
    order: TorchOrder | None
    actions: int | None


def torch_pipelining(setting: Setting, race: Race) -> Peer:
    """Return a step of torch, which uses its default group.

    torch neither scales gradients nor keeps and concatenates outputs here, because megapipe does not.
    """
    num_stages = setting.num_ranks * race.chunks
    indices = race.stages_on(setting.rank, setting.num_ranks)
    device, x = setting.mesh.device, setting.x
    crossing = x.detach().requires_grad_()
    stages = [
        PipelineStage(
            setting.stage(), index, num_stages, device, input_args=crossing if index else x, output_args=crossing
        )
        for index in indices
    ]
    schedule = race.peer(
        stages if race.chunks > 1 else stages[0], setting.num_microbatches, loss_fn=sleeping_loss, scale_grads=False
    )
    batch = x.repeat(setting.num_microbatches, 1)
    inputs = (batch,) if 0 in indices else ()
    target = batch if num_stages - 1 in indices else None

    def step() -> None:
        losses: list[Any] | None = None if target is None else []
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)

    if race.chunks == 1:
        return Peer(step, None, None)
    with_transfers = schedule.pipeline_order_with_comms[setting.rank]
    actions = sum(str(action.computation_type.value) in _COUNTED for action in with_transfers)
    return Peer(step, schedule.pipeline_order, actions)
