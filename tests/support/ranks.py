"""Fresh ranks for one test: processes from a fork server that has torch imported, joined in a gloo world.

Every call starts new processes, so groups, random state, threads and default dtypes cannot leak from one test to
the next; the fork server makes that cheap (about 0.1 s for two ranks). A rank that raises, dies or hangs ends the call
with an error that names it, and no process outlives the call.
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist

FORK_SERVER = multiprocessing.get_context("forkserver")
# Imports alone: an operation in the server would start threads that a fork does not carry over.
FORK_SERVER.set_forkserver_preload(
    [
        "pytest",
        "hypothesis",
        "tests.support.ranks",
        "tests.support.meshes",
        "megapipe.training.pretrain",
        "megapipe.engine.pipeline",
        # What torch imports for its first operation on the meta device, such as a Pipeline's: 900 modules in 2 s.
        "torch.fx.experimental.symbolic_shapes",
        "torch._dynamo",
    ]
)

_START_SECONDS = 120.0
_GRACE_SECONDS = 2.0
_JOINED = b""
"""The first message of a rank, when all have started; its answer follows, which is never empty."""
_PR_SET_PDEATHSIG = 1


class RankError(RuntimeError):
    """A rank raised, died or hung. The message names the rank and holds its traceback."""


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0, may_die: Collection[int] = ()
) -> list[Any]:
    """Run `function(rank, *args)` on `world_size` fresh processes and return their results in rank order.

    Each rank runs with one thread, inside an initialised gloo world (torch.distributed). `function` is at the top
    level of its module; arguments and results are pickled, so no tensor is shared between ranks.

    Args:
        timeout: seconds after the last rank's start until ranks that have not answered are killed and named.
        may_die: ranks whose death is the point of the test; their result is None, the others run on.

    Raises:
        RankError: a rank raised, died without `may_die`, or did not answer in time.
    """
    payload = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory(prefix="megapipe-ranks-") as folder:
        store = os.path.join(folder, "store")
        ranks = [_start(rank, world_size, store, timeout, payload) for rank in range(world_size)]
        try:
            return _collect(ranks, timeout, frozenset(may_die))
        finally:
            for process, pipe in ranks:
                process.kill()
                process.join()
                pipe.close()


def free_port() -> int:
    """A port of this host that no program listens on now."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


def _start(
    rank: int, world_size: int, store: str, timeout: float, payload: bytes
) -> tuple[ForkServerProcess, connection.Connection]:
    ours, theirs = FORK_SERVER.Pipe()
    process = FORK_SERVER.Process(
        target=_rank_main, args=(rank, world_size, store, timeout, payload, theirs), name=f"rank {rank}", daemon=True
    )
    process.start()
    theirs.close()
    return process, ours


def _rank_main(
    rank: int, world_size: int, store: str, timeout: float, payload: bytes, pipe: connection.Connection
) -> None:
    die_with_parent()
    try:
        torch.set_num_threads(1)
        function, args = pickle.loads(payload)
        _join(rank, world_size, store, timeout)
        pipe.send_bytes(_JOINED)
        answer = pickle.dumps((True, function(rank, *args)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(answer)
    # Wait until every rank has answered, as a rank that leaves early closes sockets that its peers still use.
    pipe.poll(timeout)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def die_with_parent() -> None:
    """End this process with the fork server, which ends when the test run is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _join(rank: int, world_size: int, store: str, timeout: float) -> None:
    """Enter the gloo world and wait, outside of gloo, until all have: a test may kill a rank at its first line."""
    files = dist.FileStore(store, world_size)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout))
    if files.add("joined", 1) == world_size:
        files.set("all joined", "")
    files.wait(["all joined"])


def _collect(
    ranks: list[tuple[ForkServerProcess, connection.Connection]], timeout: float, may_die: frozenset[int]
) -> list[Any]:
    """Return results in rank order. After a first failure the other ranks get a short time to report theirs."""
    deadline, joined = time.monotonic() + _START_SECONDS + timeout, 0
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    while waiting:
        ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, connection.Connection)
            rank = waiting.pop(pipe)
            try:
                answer = pipe.recv_bytes()
                if answer == _JOINED:
                    waiting[pipe] = rank
                    joined += 1
                    deadline = time.monotonic() + timeout if joined == len(ranks) else deadline
                    continue
                succeeded, value = pickle.loads(answer)
            except (EOFError, ConnectionResetError):
                process = ranks[rank][0]
                process.join()
                succeeded, value = rank in may_die, None
                if not succeeded:
                    failures[rank] = f"rank {rank} died with exit code {process.exitcode}"
            else:
                if not succeeded:
                    failures[rank] = f"rank {rank} raised\n{value}"
            results[rank] = value if succeeded else None
        if failures:
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    if not failures and waiting:
        hung = ", ".join(str(rank) for rank in sorted(waiting.values()))
        raise RankError(f"rank {hung} did not answer within {timeout:g} s and was killed")
    if failures:
        raise RankError("\n".join(failures.values()))
    return [results[rank] for rank in range(len(ranks))]
