"""Compare the cost of a message between two ranks of this host over shared-memory links and over gloo links.

Round trips give the latency of a message and its answer. One-way streams give the throughput of a sender that does not
wait for answers. CPU seconds are summed over both ranks, because on a busy host they are not available for
computation. The last line of the output is one JSON object.

    python benchmarks/link_speed.py --kilobytes 256
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from megapipe.config.parallel import MeshShape
from megapipe.parallel.launch import connected_mesh
from megapipe.parallel.links import Edge, LinkEnd
from megapipe.parallel.pipeline_links import LinkKind, make_links

KINDS: tuple[LinkKind, ...] = ("shared_memory", "gloo")


def round_trips(rank: int, there: LinkEnd, back: LinkEnd, tensor: torch.Tensor, count: int) -> None:
    """Send a message from rank 0 to rank 1 and back, `count` times."""
    for _ in range(count):
        if rank == 0:
            there.send(tensor).wait()
            back.receive(tensor).wait()
        else:
            there.receive(tensor).wait()
            back.send(tensor).wait()


def stream(rank: int, there: LinkEnd, back: LinkEnd, tensor: torch.Tensor, count: int) -> None:
    """Send `count` messages from rank 0 to rank 1, with two receives posted in advance, and an answer to the last
    one."""
    if rank == 0:
        for transfer in [there.send(tensor) for _ in range(count)]:
            transfer.wait()
        back.receive(tensor).wait()
        return
    posted = [there.receive(tensor), there.receive(tensor)]
    for _ in range(count - 2):
        posted.pop(0).wait()
        posted.append(there.receive(tensor))
    for transfer in posted:
        transfer.wait()
    back.send(tensor).wait()


def measure(rank: int, store: str, num_bytes: int, count: int, repeats: int, pipe: Connection) -> None:
    """Measure both kinds of links in turn, `repeats` times, so that a change of the host's load affects both."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    mesh = connected_mesh(MeshShape({"pipeline": 2}), torch.device("cpu"))
    edges = [Edge(0, 1, num_bytes), Edge(1, 0, num_bytes)]
    links = {kind: make_links(mesh, edges, kind, timeout=60) for kind in KINDS}
    tensor = torch.zeros(num_bytes, dtype=torch.uint8)
    for _ in range(repeats + 1):  # the first round is a warm-up, which `summary` drops
        for kind in KINDS:
            for work in (round_trips, stream):
                mesh.world.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                work(rank, links[kind][edges[0]], links[kind][edges[1]], tensor, count)
                pipe.send((kind, work.__name__, time.perf_counter() - wall, time.process_time() - cpu))
    pipe.send(None)
    mesh.world.barrier()
    dist.destroy_process_group()


def summary(rows: list[list[tuple[str, str, float, float]]], count: int, num_bytes: int) -> dict[str, float]:
    """Return the medians over the repeats, per message."""
    figures: dict[str, float] = {}
    for kind in KINDS:
        for work, messages in (("round_trips", 2 * count), ("stream", count)):
            chosen = [[row for row in rank_rows if row[:2] == (kind, work)][1:] for rank_rows in rows]
            wall = statistics.median(row[2] for row in chosen[0]) / messages
            cpu = statistics.median(a[3] + b[3] for a, b in zip(*chosen, strict=True)) / messages
            figures[f"{kind}_{work}_microseconds"] = round(wall * 1e6, 1)
            figures[f"{kind}_{work}_cpu_microseconds"] = round(cpu * 1e6, 1)
            figures[f"{kind}_{work}_gigabytes_per_second"] = round(num_bytes / wall / 1e9, 2)
    return figures


def main() -> None:
    """Run two ranks and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kilobytes", type=int, default=256, help="size of a message")
    parser.add_argument("--messages", type=int, default=500, help="messages per repeat")
    parser.add_argument("--repeats", type=int, default=7, help="repeats, of which the median counts")
    arguments = parser.parse_args()
    num_bytes = arguments.kilobytes * 1024
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes, processes = [], []
        for rank in range(2):
            parent_end, child_end = context.Pipe()
            process = context.Process(
                target=measure,
                args=(rank, store, num_bytes, arguments.messages, arguments.repeats, child_end),
                daemon=True,
            )
            process.start()
            pipes.append(parent_end)
            processes.append(process)
        rows = [list(iter(pipe.recv, None)) for pipe in pipes]
        for process in processes:
            process.join()
    figures = summary(rows, arguments.messages, num_bytes)
    for name, value in figures.items():
        print(f"{name:60} {value}")
    facts = {"benchmark": "link_speed", "kilobytes": arguments.kilobytes, "torch": torch.__version__}
    print(json.dumps(facts | figures))


if __name__ == "__main__":
    main()
