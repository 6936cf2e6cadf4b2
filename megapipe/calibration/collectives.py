"""Times of collectives and of messages between ranks, over what training sends them with.

Collectives are measured as layers meet them: behind computation, from which ranks come at slightly different times,
with caches full of other things and a peer to be woken. One right behind the other they take a fraction of that.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megapipe.config.mesh_shape import MeshShape
from megapipe.layout.hardware.measured import MeasuredCollective, Transport
from megapipe.parallel.collectives import all_to_all
from megapipe.parallel.groups import Group
from megapipe.parallel.launch import connected_mesh
from megapipe.parallel.links import Edge, LinkEnd, LinkKind, make_links
from megapipe.parallel.mesh import Mesh

SIZES = (2**12, 2**16, 2**19, 2**21, 2**23)
"""Bytes of the whole buffer."""
REPEATS = 7
WORK = 512
"""Size of the matrix product ahead of every collective: milliseconds on a processor's core."""
LINK_TIMEOUT = 120.0
LEAST = 1e-7
"""Seconds that anything takes."""


class Call(NamedTuple):
    """One size of one operation: seconds of a call on the slowest rank, and processor seconds of all ranks' mean."""

    seconds: float
    processor: float


Timings = dict[int, Call]
"""By bytes."""


def measured_collectives(mesh: Mesh) -> dict[str, Timings]:
    """Operation -> times of calls among all ranks of the mesh. A collective call."""
    work = _product(mesh)
    return {
        operation: {size: _timed(mesh, _call(operation, mesh, size), _calls(size), work) for size in SIZES}
        for operation in _CALLS
    }


def measured_sends(mesh: Mesh, kinds: Sequence[LinkKind]) -> dict[str, Timings]:
    """Transport -> times of messages between two ranks, half a round trip each. A collective call of two."""
    pair = connected_mesh(MeshShape({"pipeline": 2}), mesh.device, LINK_TIMEOUT)
    edges = [Edge(0, 1, max(SIZES)), Edge(1, 0, max(SIZES))]
    found: dict[str, Timings] = {}
    for kind in kinds:
        links = make_links(pair, edges, kind, LINK_TIMEOUT)
        there, back = links[edges[0]], links[edges[1]]
        found[kind] = {
            size: _halved(_timed(mesh, partial(_round_trip, pair, there, back, _buffer(pair, size)), _calls(size)))
            for size in SIZES
        }
    return found


def fitted(operation: str, ranks: int, over: Transport, timings: Timings) -> MeasuredCollective:
    """Latency and bandwidth that come nearest to measured seconds by size.

    Least squares of relative errors, so that small messages count as much as large ones; neither may be negative. busy
    is the largest size's: a GPU's collectives do without the processor.
    """
    sizes = np.array(list(timings), dtype=np.float64)
    times = np.array([each.seconds for each in timings.values()])
    weights = np.stack([np.ones_like(sizes), sizes], axis=1) / times[:, None]
    latency, per_byte = np.linalg.lstsq(weights, np.ones_like(times), rcond=None)[0]
    if latency < 0 or per_byte <= 0:
        # On the border only the rate is left: the best line through the origin.
        latency, per_byte = 0.0, float((sizes / times).sum() / ((sizes / times) ** 2).sum())
    largest = timings[max(timings)]
    busy = 0.0 if over == "nccl" else largest.processor / largest.seconds
    return MeasuredCollective(operation, ranks, over, float(latency), float(1.0 / per_byte), busy)


def _calls(size: int) -> int:
    """In one timed loop: more where a call is over in a blink."""
    return 20 if size <= 2**16 else 4


def _timed(mesh: Mesh, call: Callable[[], None], calls: int, work: Callable[[], None] | None = None) -> Call:
    """Medians over some loops of calls. work: done ahead of every call, and its own time taken off again."""
    loops = [call] if work is None else [_both(work, call), work]
    rounds = [[_once(mesh, loop, calls) for loop in loops] for _ in range(REPEATS + 1)]  # the first one warms up
    middle = [
        Call(median(each[at].seconds for each in rounds[1:]), median(each[at].processor for each in rounds[1:]))
        for at in range(len(loops))
    ]
    own = tuple(max(value - sum(rest), LEAST) for value, *rest in zip(*middle, strict=True))
    every = mesh.world.all_gather_object(own)
    return Call(max(each for each, _ in every), sum(each for _, each in every) / len(every))


def _once(mesh: Mesh, loop: Callable[[], None], calls: int) -> Call:
    """One loop of calls, by the call."""
    mesh.world.barrier()
    start, used = time.perf_counter(), time.process_time()
    for _ in range(calls):
        loop()
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
    return Call((time.perf_counter() - start) / calls, (time.process_time() - used) / calls)


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def loop() -> None:
        first()
        second()

    return loop


def _product(mesh: Mesh) -> Callable[[], None]:
    left, right, out = (torch.ones(WORK, WORK, device=mesh.device) for _ in range(3))

    def product() -> None:
        torch.mm(left, right, out=out)

    return product


def _halved(there_and_back: Call) -> Call:
    return Call(there_and_back.seconds / 2, there_and_back.processor / 2)


def _buffer(mesh: Mesh, size: int) -> Tensor:
    return torch.zeros(size // 4, dtype=torch.float32, device=mesh.device)


def _call(operation: str, mesh: Mesh, size: int) -> Callable[[], None]:
    group, whole = mesh.world, _buffer(mesh, size)
    return partial(_CALLS[operation], group, whole)


def _all_reduce(group: Group, whole: Tensor) -> None:
    group.all_reduce(whole)


def _all_gather(group: Group, whole: Tensor) -> None:
    group.gather_into(whole, group.own_part(whole)).wait()


def _reduce_scatter(group: Group, whole: Tensor) -> None:
    group.reduce_into_part(whole).wait()


def _all_to_all(group: Group, whole: Tensor) -> None:
    all_to_all(whole.view(group.size, -1), group)


_CALLS = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def _round_trip(mesh: Mesh, there: LinkEnd, back: LinkEnd, tensor: Tensor) -> None:
    if mesh.rank == 0:
        there.send(tensor).wait()
        back.receive(tensor).wait()
    else:
        there.receive(tensor).wait()
        back.send(tensor).wait()
