"""All contestants in one world of processes, taking turns with the same state."""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from gloo_ranks import in_ranks

from megapipe.config.parallel import MeshShape
from megapipe.parallel.launch import connected_mesh
from megapipe.parallel.mesh import Mesh

from .contestants import Contestant, contestants
from .state import expected, fill, make_states, state_bytes, tensors_of

RANKS = 2


@dataclass(frozen=True)
class Figure:
    """Seconds of the slower rank: medians over the rounds, except for the first save.

    In its first save, DCP allocates the memory of its copy. megapipe allocates it in the background of the first steps
    of training, so here it is allocated before the first save.

    first_stall, stall: seconds until training could continue, in the first save and in later ones. durable: seconds
    until everything is on the disk. load, resharded: seconds to load from the page cache, with the same split and with
    another one; None if the contestant cannot do this.
    """

    name: str
    first_stall: float
    stall: float
    durable: float
    load: float
    resharded: float | None


@dataclass(frozen=True)
class Race:
    """Result of all contestants.

    bytes: bytes of the state, over all ranks. copy: seconds of a copy of the state to memory that was used before.
    """

    bytes: int
    copy: float
    figures: tuple[Figure, ...]


def race(matrices: int, rounds: int, folder: Path) -> Race:
    """Start the ranks, run, and return what they measured. folder: folder on the disk to measure."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        return in_ranks(RANKS, _measured, matrices, rounds, Path(place))


def _measured(rank: int, matrices: int, rounds: int, place: Path) -> Race:
    mesh = connected_mesh(MeshShape({"tensor": RANKS}), torch.device("cpu"))
    return measure(mesh, contestants(mesh), matrices, rounds, place)


def measure(mesh: Mesh, contestants: Sequence[Contestant], matrices: int, rounds: int, place: Path) -> Race:
    """Run rounds of all contestants, after one round of warm-up, of which only `first_stall` is used.

    The contestants change their order from round to round.
    """
    rows, columns = make_states(mesh, matrices, 0), make_states(mesh, matrices, 1)
    copies = [torch.empty_like(tensor) for tensor in tensors_of(rows).values()]
    times: dict[str, list[dict[str, float]]] = {each.name: [] for each in contestants}
    copy_seconds = []
    for each in contestants:
        each.prepare(_parent(place, each), rows)
    for number in range(1 + rounds):
        turn = number % len(contestants)
        for each in [*contestants[turn:], *contestants[:turn]]:
            fill(rows, 0, mesh.rank, RANKS)
            times[each.name].append(_saved_and_loaded(mesh, each, rows, columns, place, number))
        fill(rows, 0, mesh.rank, RANKS)
        pairs = list(zip(copies, tensors_of(rows).values(), strict=True))
        copy_seconds.append(_slower(mesh, lambda pairs=pairs: [to.copy_(of) for to, of in pairs]))
    return Race(
        state_bytes(matrices),
        statistics.median(copy_seconds[1:]),
        tuple(_figure(each, times[each.name]) for each in contestants),
    )


def _saved_and_loaded(
    mesh: Mesh, contestant: Contestant, rows: Sequence, columns: Sequence, place: Path, number: int
) -> dict[str, float]:
    parent = _parent(place, contestant)
    if mesh.rank == 0:
        parent.mkdir(exist_ok=True)
    folder = parent / str(number)
    seconds = {}
    waits = []
    seconds["stall"] = _slower(mesh, lambda: waits.append(contestant.save(folder, rows)))
    seconds["durable"] = seconds["stall"] + _slower(mesh, waits[0])
    for name, states, axis in (("load", rows, 0), ("resharded", columns, 1)):
        if axis and not contestant.reshards:
            continue
        for tensor in tensors_of(states).values():
            tensor.zero_()
        seconds[name] = _slower(mesh, lambda states=states, axis=axis: contestant.load(folder, states, axis))
        for key, tensor in tensors_of(states).items():
            if not torch.equal(tensor, expected(key, axis, mesh.rank, RANKS)):
                raise RuntimeError(f"{contestant.name}: {key} is not what was saved")
    mesh.world.barrier()
    if mesh.rank == 0:
        shutil.rmtree(parent)
    mesh.world.barrier()
    return seconds


def _parent(place: Path, contestant: Contestant) -> Path:
    return place / contestant.name.replace(", ", "-").replace(" ", "-")


def _slower(mesh: Mesh, work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes on the slower rank."""
    mesh.world.barrier()
    start = time.perf_counter()
    work()
    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    mesh.world.all_reduce(seconds, "max")
    return float(seconds)


def _figure(contestant: Contestant, times: list[dict[str, float]]) -> Figure:
    first, *rounds = times

    def middle(name: str) -> float:
        return statistics.median(seconds[name] for seconds in rounds)

    resharded = middle("resharded") if contestant.reshards else None
    return Figure(contestant.name, first["stall"], middle("stall"), middle("durable"), middle("load"), resharded)
