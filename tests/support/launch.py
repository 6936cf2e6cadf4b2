"""Starting pretrain_gpt.py as a user does: plain, or under torchrun."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

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
    """What a started one says from here on, to its end; its session is killed after so long.

    Not `communicate`, which loses the lines that a reader of single ones has read ahead.
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


def launch(
    num_processes: int, *arguments: str, folder: Path, timeout: float = 120.0, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run to the end and return exit status and output."""
    return subprocess.run(
        command(num_processes, *arguments),
        cwd=folder,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
