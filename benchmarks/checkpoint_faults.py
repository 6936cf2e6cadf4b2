"""Compare checkpoints of megapipe and of torch.distributed.checkpoint (DCP) after kills and flipped bits.

A save of step 2, to another folder than step 1 or over it, is killed (SIGKILL) before every operation that changes the
disk, or after half of it if it is a write. Each rank in turn is the victim. Then the checkpoint is loaded and compared
with what both steps saved. After an undisturbed save, single bits are flipped in each file of step 2. Both systems
write the same rows of the same matrices, and operations are counted at each system's interface to the disk. The
results are counts, not times.

    python benchmarks/checkpoint_faults.py --ranks 1 2 --flips 20
"""

import argparse
import multiprocessing
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_faults_contest.systems import NAMES, SYSTEMS, TIMEOUT_SECONDS, Death, System, whole

# Each kill needs a process. Forks are cheap, because this process has imported all that they need. It has no threads.
PROCESSES = multiprocessing.get_context("fork")


def _saving(
    pipe: Connection,
    rank: int,
    ranks: int,
    store: str,
    system: System,
    directory: Path,
    steps: Sequence[int],
    at: int | None,
) -> None:
    """Save `steps` on one rank, and send the number of operations of the last save.

    at: operation of the last save at which the process is killed; None for none.
    """
    _quiet()
    files = dist.FileStore(store, ranks)
    dist.init_process_group(
        "gloo", store=files, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT_SECONDS)
    )
    for step in steps:
        death = Death(at if step == steps[-1] else None)
        system.save(rank, ranks, directory, step, death)
    pipe.send(death.count)
    os._exit(0)


def _quiet() -> None:
    """Use one thread, and drop messages about lost peers and damaged files, which would interrupt the table."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _loading(pipe: Connection, system: System, directory: Path) -> None:
    """Load the checkpoint, and send the result: old, new, mixed or unreadable."""
    _quiet()
    try:
        tensors = system.load(directory)
    except BaseException:  # a flipped bit in a pickle may raise anything
        pipe.send("unreadable")
        os._exit(0)
    for result, step in (("old", 1), ("new", 2)):
        if all(torch.equal(tensors[name], whole(name, step)) for name in NAMES):
            pipe.send(result)
            os._exit(0)
    pipe.send("mixed")
    os._exit(0)


def _answers(jobs: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> list[Any]:
    """Run all jobs at the same time, each in its own process, and return their answers; None for a job that died."""
    pipes = [PROCESSES.Pipe() for _ in jobs]
    processes = [
        PROCESSES.Process(target=function, args=(child_end, *args), daemon=True)
        for (function, args), (_, child_end) in zip(jobs, pipes, strict=True)
    ]
    for process, (_, child_end) in zip(processes, pipes, strict=True):
        process.start()
        child_end.close()
    answers = []
    for process, (parent_end, _) in zip(processes, pipes, strict=True):
        try:
            answers.append(parent_end.recv() if parent_end.poll(TIMEOUT_SECONDS) else None)
        except EOFError:
            answers.append(None)
        process.kill()
        process.join()
    return answers


def saved(
    system: System, ranks: int, directory: Path, steps: Sequence[int], at: Sequence[int | None] | None = None
) -> list[int | None]:
    """Save on all ranks, and return the number of operations of each rank; None for a rank that was killed.

    at: for each rank, the operation at which it is killed, or None.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        deaths = [None] * ranks if at is None else at
        arguments = [(rank, ranks, store, system, directory, steps, deaths[rank]) for rank in range(ranks)]
        return _answers([(_saving, each) for each in arguments])


def loaded(system: System, directory: Path) -> str:
    """Return the result of a load, see `_loading`. A process that dies in the load counts as unreadable."""
    (answer,) = _answers([(_loading, (system, directory))])
    return answer or "unreadable"


def kills(system: System, ranks: int, scratch: Path) -> Counter[str]:
    """Count the results of loads after every possible kill of one rank."""
    results: Counter[str] = Counter()
    template, directory = scratch / "template", scratch / "run"
    saved(system, ranks, template, (1,))
    for victim, count in enumerate(saved(system, ranks, scratch / "undisturbed", (1, 2))):
        assert count, "the undisturbed save failed"
        for operation in range(count):
            shutil.rmtree(directory, ignore_errors=True)
            shutil.copytree(template, directory)
            at = [operation if rank == victim else None for rank in range(ranks)]
            assert saved(system, ranks, directory, (2,), at)[victim] is None, "the victim lived"
            results[loaded(system, directory)] += 1
    return results


def flips(system: System, ranks: int, scratch: Path, count: int) -> Counter[str]:
    """Count the results of loads after one flipped bit, with `count` positions in each file of the newest
    checkpoint."""
    results: Counter[str] = Counter()
    template, directory = scratch / "undisturbed", scratch / "run"
    for file in sorted(system.newest(template).iterdir()):
        for number in range(count):
            shutil.rmtree(directory, ignore_errors=True)
            shutil.copytree(template, directory)
            path = system.newest(directory) / file.name
            content = bytearray(path.read_bytes())
            content[number * (len(content) - 1) // max(1, count - 1)] ^= 1 << number % 8
            path.write_bytes(content)
            results[loaded(system, directory)] += 1
    return results


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks that save")
    parser.add_argument("--flips", type=int, default=20, help="bits flipped in each file")
    arguments = parser.parse_args()
    killed, flipped = [], []
    for ranks in arguments.ranks:
        for system in SYSTEMS:
            with tempfile.TemporaryDirectory(prefix="checkpoint-faults-") as folder:
                after = kills(system, ranks, Path(folder))
                cells = [after[result] for result in ("old", "new", "mixed", "unreadable")]
                killed.append((system.name, ranks, after.total(), *cells))
                results = flips(system, ranks, Path(folder), arguments.flips)
                cells = [results["old"], results["unreadable"], results["new"], results["mixed"]]
                flipped.append((system.name, ranks, results.total(), *cells))
    print(f"torch {torch.__version__}\n")
    _print_table(("", "ranks", "kills", "old step", "new step", "mixed", "nothing readable"), killed)
    _print_table(
        ("", "ranks", "flips", "noticed, older step taken", "noticed", "without effect", "other values, unnoticed"),
        flipped,
    )
    return 0


def _print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(str(cell) for cell in row) + " |")
    print()


if __name__ == "__main__":
    raise SystemExit(main())
