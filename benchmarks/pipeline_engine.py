"""What a pipeline runtime costs: megapipe's engine beside torch.distributed.pipelining and bare loops, in one run.

Stages sleep, so that eight processes fit on two cores: forward t, backward 2t (each half t), no arithmetic. All
contestants run the same kind of stage in the same order, over messages of the same size, one thread a rank, in turns;
medians of the repeats.

excess: step time over what the schedule's order allows if only stages took time, less what a rank overslept, percent.
cpu: microseconds of a rank's thread for an action (forward, backward or a half of it, send, receive), stage callables
excluded; "autograd alone" is what the graph of the stages costs without any pipeline.

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
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from megapipe.parallel.launch import connected_mesh
from megapipe.parallel.mesh import MeshShape
from pipeline_contest.orders import RACES
from pipeline_contest.race import Figure, Size, Track


def run_rank(rank: int, num_ranks: int, store: str, schedules: Sequence[str], sizes: Sequence[Size], pipe: Connection) -> None:
    """One rank through all races; rank 0 sends the figures."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks, timeout=timedelta(seconds=300)
    )
    track = Track(connected_mesh(MeshShape({"pipeline": num_ranks}), torch.device("cpu")))
    for size in sizes:
        for name in schedules:
            figures = track.race(name, size)
            if rank == 0:
                pipe.send(figures)
    pipe.send(None)
    dist.barrier()
    dist.destroy_process_group()


def race(num_ranks: int, schedules: Sequence[str], sizes: Sequence[Size]) -> list[Figure]:
    """Start the ranks, print each race's table as it ends, and return all figures."""
    context = multiprocessing.get_context("spawn")
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes, processes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            arguments = (rank, num_ranks, store, schedules, sizes, theirs)
            process = context.Process(target=run_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for found in iter(pipes[0].recv, None):
            show(found)
            figures += found
        for process in processes:
            process.join()
    return figures


def show(figures: Sequence[Figure]) -> None:
    """One race as a table."""
    first = figures[0]
    print(f"\n{first.schedule}, {first.num_ranks} ranks, {first.num_microbatches} micro-batches, {first.milliseconds:g} ms")
    print(f"  {'contestant':24} {'step ms':>9} {'allowed':>9} {'overslept':>9} {'excess %':>9} {'cpu us':>8}")
    for figure in figures:
        print(
            f"  {figure.contestant:24} {figure.seconds * 1e3:9.1f} {figure.finish * 1e3:9.1f} {figure.late * 1e3:9.2f} "
            f"{figure.excess:9.2f} {figure.processor:8.1f}",
            flush=True,
        )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="2, 4 and 8 ranks, 2p and 4p micro-batches")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4], help="pipeline ranks")
    parser.add_argument("--multiples", type=int, nargs="+", default=[2], help="micro-batches over ranks")
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[10.0, 2.0], help="a stage's forward")
    parser.add_argument("--schedules", nargs="+", choices=list(RACES), default=list(RACES))
    parser.add_argument("--kilofloats", type=int, default=64, help="floats in a message, in units of 1024")
    parser.add_argument("--repeats", type=int, default=7, help="repeats, of which the median counts")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    found = parser.parse_args()
    if found.full:
        found.ranks, found.multiples = [2, 4, 8], [2, 4]
    return found


def main() -> None:
    """Run the races and print the figures."""
    chosen = arguments()
    figures: list[Figure] = []
    for num_ranks in chosen.ranks:
        sizes = [
            Size(num_ranks * multiple, milliseconds / 1e3, chosen.kilofloats * 1024, chosen.repeats)
            for multiple in chosen.multiples
            for milliseconds in chosen.milliseconds
        ]
        figures += race(num_ranks, chosen.schedules, sizes)
    if chosen.json:
        facts = {"benchmark": "pipeline_engine", "torch": torch.__version__, "kilofloats": chosen.kilofloats}
        print(json.dumps(facts | {"figures": [figure.facts() for figure in figures]}))


if __name__ == "__main__":
    main()
