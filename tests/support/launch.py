"""Start pretrain_gpt.py as a user does, plain or under torchrun; or its ranks alone from the fork server.

A torchrun start imports torch in every rank, which takes 4 s of processor time a rank. `launch` forks the ranks from
the server of tests/support/ranks.py instead, with the environment that torchrun would give them, so it costs what the
run itself does. Use `start` or `launch_with_torchrun` where the launcher, signals or kills are the point.
"""

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing import connection
from pathlib import Path

import torch

from tests.support.ranks import FORK_SERVER, die_with_parent, free_port

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "pretrain_gpt.py"

TINY = [
    "--model.vocabulary_size=61",
    "--model.num_layers=2",
    "--model.hidden_size=32",
    "--model.num_heads=4",
    "--model.max_positions=16",
    "--data.sequence_length=16",
    "--data.split=90,5,5",
    "--batch.global_size=4",
    "--parallel.device=cpu",
]


def command(num_processes: int, *arguments: str, program: Path = PROGRAM) -> list[str]:
    """The command line; one process runs plain python, more run under torchrun on a free port."""
    started = [str(program), *TINY, *arguments]
    if num_processes == 1:
        return [sys.executable, *started]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    return [*launcher, *started]


def environment(**extra: str) -> dict[str, str]:
    """The environment of a launched run: one thread a rank, no launcher variables inherited."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **extra}


def start(
    num_processes: int,
    *arguments: str,
    folder: Path,
    program: Path = PROGRAM,
    errors: int = subprocess.PIPE,
    **extra: str,
) -> subprocess.Popen[str]:
    """Start in a session of its own, which a test can signal as a terminal does.

    errors: where stderr goes, as Popen has it. extra: variables of the environment.
    """
    return subprocess.Popen(
        command(num_processes, *arguments, program=program),
        cwd=folder,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
    )


def rest_of(process: subprocess.Popen[str], seconds: float) -> str:
    """Return the remaining output of a started process; its session is killed after `seconds`.

    `communicate` would lose lines that are in the buffer of a reader of single lines.
    """
    assert process.stdout is not None
    limit = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
    limit.start()
    try:
        said = process.stdout.read()
        process.wait()
    finally:
        limit.cancel()
    return said


def launch_with_torchrun(
    num_processes: int, *arguments: str, folder: Path, timeout: float = 120.0, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run to the end as a user does, and return the exit status and the output."""
    return subprocess.run(
        command(num_processes, *arguments),
        cwd=folder,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def launch(
    num_processes: int, *arguments: str, folder: Path, timeout: float = 120.0, program: Path = PROGRAM, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run `program` to its end in forked ranks, and return the exit status and the output of all of them.

    As under torchrun, the first rank that fails ends the others by SIGTERM, and the status is then 1; one process
    keeps its own status.

    Raises:
        subprocess.TimeoutExpired: a rank still ran after `timeout` seconds.
    """
    argv = [str(program), *TINY, *arguments]
    port = str(free_port())
    with tempfile.TemporaryDirectory(prefix="megapipe-launch-") as outputs:
        files = [Path(outputs) / name for name in ("stdout", "stderr")]
        ranks = []
        for rank in range(num_processes):
            variables = environment(**extra)
            if num_processes > 1:
                variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_processes)}
                variables |= {"LOCAL_WORLD_SIZE": str(num_processes), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
            process = FORK_SERVER.Process(target=_rank, args=(argv, str(folder), variables, *map(str, files)))
            process.start()
            ranks.append(process)
        try:
            status = _end_of(ranks, time.monotonic() + timeout)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        output, errors = (path.read_text() if path.exists() else "" for path in files)
    if status is None:
        raise subprocess.TimeoutExpired(argv, timeout, output, errors)
    return subprocess.CompletedProcess(argv, status, output, errors)


def _end_of(ranks: list, deadline: float) -> int | None:
    """Return the exit status once all ranks have ended, or None at the deadline."""
    failed = False
    while waiting := [process for process in ranks if process.exitcode is None]:
        if not connection.wait([process.sentinel for process in waiting], max(0.0, deadline - time.monotonic())):
            return None
        if not failed and any(process.exitcode for process in ranks):
            failed = True
            for process in ranks:
                if process.exitcode is None:
                    process.terminate()
    return ranks[0].exitcode if len(ranks) == 1 else int(failed)


def _rank(argv: list[str], folder: str, variables: dict[str, str], output: str, errors: str) -> None:
    die_with_parent()
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    for path, stream in ((output, sys.stdout), (errors, sys.stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), stream.fileno())
    torch.set_num_threads(1)
    sys.argv = argv
    sys.path.insert(0, os.path.dirname(argv[0]))
    status: object = 0
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)
