"""Times that the simulator runs a schedule with, in any one unit of time."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.schedule import Header


@dataclass(frozen=True)
class Link:
    """One direction between two ranks: a message keeps it busy for ``transfer`` and arrives ``latency`` later."""

    latency: float = 0.0
    transfer: float = 0.0


@dataclass(frozen=True)
class Costs:
    """How long each action takes.

    ``forward``, ``recompute``, ``backward``, ``backward_input``, ``backward_weight``, ``update``, ``reduce_gradients``
    and ``gather_weights`` have one entry a stage, for the whole chunk. Gathers and reductions of a rank share one
    stream beside its compute. ``offload``: the activations of a micro-batch, one way between device and host memory;
    ``offload_state``: the optimizer state; both, too, by stage for the whole chunk, and without entries they take no
    time. Each rank has one copy stream a direction beside its compute; gathers of weights from host memory are copies
    on it. ``links`` replaces ``link`` for pairs of ranks
    (from, to). Sends run beside the compute, one after another on each link; with ``blocking_sends`` they hold the
    sender until the message arrived, and start only when the receive is posted.
    """

    forward: tuple[float, ...]
    recompute: tuple[float, ...]
    backward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    update: tuple[float, ...]
    reduce_gradients: tuple[float, ...]
    gather_weights: tuple[float, ...]
    reduce_tied: float = 0.0
    reduce_scalars: float = 0.0
    link: Link = Link()
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    blocking_sends: bool = False
    offload: tuple[float, ...] = ()
    offload_state: tuple[float, ...] = ()


def rank_costs(
    header: Header,
    *,
    forward: float = 1.0,
    recompute: float | None = None,
    backward: float | None = None,
    backward_input: float | None = None,
    backward_weight: float | None = None,
    update: float = 0.0,
    reduce_gradients: float = 0.0,
    gather_weights: float = 0.0,
    reduce_tied: float = 0.0,
    reduce_scalars: float = 0.0,
    link: Link = Link(),
    blocking_sends: bool = False,
    offload: float = 0.0,
    offload_state: float = 0.0,
) -> Costs:
    """Return costs from the times of one rank's layers of one copy of the model, which its stages share equally.

    A whole backward takes ``backward`` or the sum of its halves; halves not given are equal parts of it. Without any
    of the three a backward takes twice the forward. What runs again takes ``recompute``, or as long as the forward.
    """
    recompute = forward if recompute is None else recompute
    if backward_input is None and backward_weight is None:
        backward = 2.0 * forward if backward is None else backward
        backward_input = backward_weight = backward / 2.0
    if backward_input is None or backward_weight is None:
        raise ScheduleError("set both halves of the backward (input and weight), or neither")
    backward = backward_input + backward_weight if backward is None else backward
    times = (
        forward, recompute, backward, backward_input, backward_weight, update, reduce_gradients, gather_weights,
        offload, offload_state,
    )  # fmt: skip
    if min(*times, reduce_tied, reduce_scalars, link.latency, link.transfer) < 0 or forward + backward <= 0:
        raise ScheduleError(f"times must be at least 0 and compute times above 0, got {times}")
    per_stage = [tuple(time / count for count in header.stages_sharing) for time in times]
    return Costs(
        forward=per_stage[0],
        recompute=per_stage[1],
        backward=per_stage[2],
        backward_input=per_stage[3],
        backward_weight=per_stage[4],
        update=per_stage[5],
        reduce_gradients=per_stage[6],
        gather_weights=per_stage[7],
        reduce_tied=reduce_tied,
        reduce_scalars=reduce_scalars,
        link=link,
        blocking_sends=blocking_sends,
        offload=per_stage[8],
        offload_state=per_stage[9],
    )
