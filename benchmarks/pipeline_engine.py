"""Compare the overhead of megapipe's engine with torch.distributed.pipelining and with bare loops.

Stages sleep instead of computing, so that eight processes fit on two cores: the forward sleeps t, the backward 2t
(each half t). All contestants run the same kind of stage in the same order, with messages of the same size and one
thread per rank. They take turns, and times are medians of the repeats.

excess: percent by which a step takes longer than the schedule's order allows if only stages took time, after the time
that a rank overslept is subtracted. cpu: microseconds of a rank's thread per action (forward, backward or a half of
it, send, receive), without stage callables; "autograd alone" is the cost of the stages' graph without a pipeline. gloo
copies in a separate thread, which is not counted; shared-memory links copy in the rank's thread.

    python benchmarks/pipeline_engine.py             # 4 ranks, 8 micro-batches
    python benchmarks/pipeline_engine.py --full      # 2, 4 and 8 ranks, 2p and 4p micro-batches
    python benchmarks/pipeline_engine.py --json      # one JSON object as the last line
"""

import argparse
import json
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from pipeline_contest.bubble import Bubble
from pipeline_contest.gpt import GptFigure
from pipeline_contest.orders import RACES
from pipeline_contest.race import Size, Track
from pipeline_contest.report import GOALS, show_bubble, show_gpt, show_race

from megapipe.config.parallel import MeshShape
from megapipe.parallel.launch import connected_mesh


@dataclass(frozen=True)
class Programme:
    """The measurements of one pipeline.

    races: whether to race with sleeping stages. bubble: whether to compare 2bw with a single rank. gpt: whether to
    race with real stages, which need a core for each rank.
    """

    num_ranks: int
    schedules: Sequence[str]
    sizes: Sequence[Size]
    races: bool
    bubble: bool
    gpt: bool


def run_rank(rank: int, store: str, programme: Programme, pipe: Connection) -> None:
    """Run all measurements on one rank; rank 0 sends the figures."""
    torch.set_num_threads(1)
    files, world_size = dist.FileStore(store, programme.num_ranks), programme.num_ranks
    dist.init_process_group("gloo", store=files, rank=rank, world_size=world_size, timeout=timedelta(seconds=300))
    track = Track(connected_mesh(MeshShape({"pipeline": world_size}), torch.device("cpu")))
    for size in programme.sizes:
        for name in programme.schedules if programme.races else ():
            _send(rank, pipe, track.race(name, size))
        if programme.bubble:
            _send(rank, pipe, track.bubble(size))
    if programme.gpt:
        size = programme.sizes[0]
        for name in programme.schedules:
            if not RACES[name].takes_torch_order:
                _send(rank, pipe, track.gpt(name, size))
    pipe.send(None)
    dist.barrier()
    dist.destroy_process_group()


def _send(rank: int, pipe: Connection, figures: object) -> None:
    if rank == 0:
        pipe.send(figures)


def run(programme: Programme) -> list[dict[str, Any]]:
    """Start the ranks, print each table when it is ready, and return all figures."""
    context = multiprocessing.get_context("spawn")
    facts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes, processes = [], []
        for rank in range(programme.num_ranks):
            parent_end, child_end = context.Pipe()
            process = context.Process(target=run_rank, args=(rank, store, programme, child_end), daemon=True)
            process.start()
            child_end.close()
            pipes.append(parent_end)
            processes.append(process)
        for figures in iter(pipes[0].recv, None):
            facts += _show(figures)
        for process in processes:
            process.join()
    return facts


def _show(figures: object) -> list[dict[str, Any]]:
    if isinstance(figures, Bubble):
        show_bubble(figures)
        return [{"kind": "bubble", **asdict(figures), "ratio": figures.ratio, "bound": figures.bound}]
    if isinstance(figures, GptFigure):
        show_gpt(figures)
        return [{"kind": "gpt", **asdict(figures)}]
    assert isinstance(figures, list)
    show_race(figures)
    return [{"kind": "race", **asdict(figure)} for figure in figures]


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="2, 4 and 8 ranks, 2p and 4p micro-batches")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4], help="pipeline ranks")
    parser.add_argument("--multiples", type=int, nargs="+", default=[2], help="micro-batches over ranks")
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[10.0, 2.0], help="a stage's forward")
    parser.add_argument("--schedules", nargs="+", choices=list(RACES), default=list(RACES))
    parser.add_argument("--kilofloats", type=int, default=64, help="floats in a message, in units of 1024")
    parser.add_argument("--repeats", type=int, default=7, help="repeats, of which the median counts")
    parser.add_argument("--no-races", action="store_true", help="run only the comparison of 2bw with a single rank")
    parser.add_argument("--no-bubble", action="store_true", help="leave out the comparison of 2bw with a single rank")
    parser.add_argument("--gpt-ranks", type=int, nargs="*", default=[2], help="pipelines to run with real stages too")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    if options.full:
        options.ranks, options.multiples = [2, 4, 8], [2, 4]
    return options


def main() -> None:
    """Run the races and print the figures."""
    options = arguments()
    facts: list[dict[str, Any]] = []
    print(GOALS)
    for num_ranks in sorted({*options.ranks, *options.gpt_ranks}):
        sizes = [
            Size(num_ranks * multiple, milliseconds / 1e3, options.kilofloats * 1024, options.repeats)
            for multiple in options.multiples
            for milliseconds in options.milliseconds
        ]
        measured = num_ranks in options.ranks
        facts += run(
            Programme(
                num_ranks,
                options.schedules,
                sizes,
                races=measured and not options.no_races,
                bubble=measured and not options.no_bubble,
                gpt=num_ranks in options.gpt_ranks and not options.no_races,
            )
        )
    if options.json:
        head = {"benchmark": "pipeline_engine", "torch": torch.__version__, "kilofloats": options.kilofloats}
        print(json.dumps(head | {"figures": facts}))


if __name__ == "__main__":
    main()
