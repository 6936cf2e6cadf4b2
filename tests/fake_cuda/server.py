"""Runs functions in processes that have a CUDA device which is not there.

The shim has to be in a process before torch is, and the stand-ins change torch for good. So one process imports it
all, once, and every run is a fork of it; nothing reaches the process of the tests. Ranks of one run are forks that
exchange Python objects, and no tensors, through a folder.
"""

import atexit
import contextlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any


class FakeCudaError(RuntimeError):
    """A run on the fake device raised or died. The message holds its traceback."""


def run_fake(
    function: Callable[..., Any], *args: Any, ranks: int = 1, timeout: float = 120.0, **named: Any
) -> list[Any]:
    """Run `function(rank, *args, **named)` on each of `ranks` fake devices, and return their results in rank order.

    `function` is at the top level of a module whose import needs no device; arguments and results are pickled.

    Raises FakeCudaError: a rank raised, died or did not answer in time.
    """
    address = _server()
    payload = pickle.dumps((function, args, named))
    with tempfile.TemporaryDirectory(prefix="megapipe-fake-ranks-") as folder, contextlib.ExitStack() as pipes:
        connections = [pipes.enter_context(Client(address, "AF_UNIX")) for _ in range(ranks)]
        for rank, connection in enumerate(connections):
            connection.send((rank, ranks, folder, payload))
        return _collected(connections, timeout)


def _collected(connections: Sequence[Connection], timeout: float) -> list[Any]:
    """Results in rank order; the first failure ends the wait."""
    waiting = {connection: rank for rank, connection in enumerate(connections)}
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise FakeCudaError(f"rank {sorted(waiting.values())} did not answer within {timeout:g} s")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                succeeded, value = connection.recv()
            except EOFError:
                raise FakeCudaError(f"rank {rank} died") from None
            if not succeeded:
                raise FakeCudaError(f"rank {rank} raised\n{value}")
            answers[rank] = value
    return [answers[rank] for rank in range(len(connections))]


@cache
def _server() -> str:
    """The address of this process's own fork server, which ends with it."""
    folder = tempfile.mkdtemp(prefix="megapipe-fake-cuda-")
    address = str(Path(folder) / "server")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fake_cuda.server", address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env=environment,
    )
    atexit.register(_end, process, folder)
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        raise FakeCudaError("the process with the fake device did not start; its error is on standard error")
    return address


def _end(process: "subprocess.Popen[bytes]", folder: str) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()
    with contextlib.suppress(OSError):
        os.unlink(Path(folder) / "server")
        os.rmdir(folder)


def _serve(address: str) -> None:
    """Fork for every connection, until standard input ends."""
    from tests.fake_cuda.build import shim

    shim()
    from tests.fake_cuda import runs  # noqa: F401  # imports everything that runs need

    threading.Thread(target=_end_with_parent, daemon=True).start()
    with Listener(address, "AF_UNIX", backlog=64) as listener:
        print("ready", flush=True)
        while True:
            connection = listener.accept()
            if os.fork() == 0:
                _serve_one(connection)
            connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def _serve_one(connection: Connection) -> None:
    from tests.support.ranks import die_with_parent

    die_with_parent()
    try:
        rank, ranks, folder, payload = connection.recv()
        os.environ |= {"FAKE_CUDA_RANK": str(rank), "FAKE_CUDA_RANKS": str(ranks), "FAKE_CUDA_FOLDER": folder}
        function, args, named = pickle.loads(payload)
        answer = pickle.dumps((True, function(rank, *args, **named)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    with contextlib.suppress(BrokenPipeError, socket.error):
        connection.send_bytes(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1])
