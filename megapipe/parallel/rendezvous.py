"""Rendezvous: the ranks of one start of a job find each other and agree, before any process group exists.

All messages go through one TCP store: torchrun's, or one that rank 0 serves. torchrun uses the same store for all
starts of a job, so a rank could read the values of a dead rank and connect to it (pytorch#135712, pytorch#167288;
torch 2.13). Its restart count cannot identify a start, because each host counts separately. Therefore the ranks first
agree on a name for their start, and use it as a prefix of all other keys.
"""

import json
import math
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import groupby
from typing import NoReturn

import torch.distributed as dist

from megapipe.parallel.groups import LaunchError

GRACE_SECONDS = 5.0
"""Time that rank 0 waits for further problems after the first one, and for the other ranks to read why the start
failed."""
_LONGEST_PAUSE_SECONDS = 0.25
_LISTED_PROBLEMS = 8
_MARGIN_SECONDS = 2.0
"""Seconds after its timeout in which the connecting thread may still end by itself."""
_BACKLOG = 4096
"""Connections that wait at the store's socket: all ranks of a large job may connect at once."""


class StartError(LaunchError):
    """The reason why a start failed, the same on every rank."""


class Start:
    """The ranks of one start of a job. They agree in a series of exchanges that rank 0 answers.

    Attributes:
        rank, world_size: of this process, and of the job.
        store: contains no values of an earlier start; process groups use it too.
        is_over: whether training has started or an exchange has failed. Each rank reports later errors by itself.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: float) -> None:
        """Meet the other ranks. All ranks call this; if one does not, the first exchange fails.

        timeout: seconds that a rank waits for the others, here and in every exchange.

        Raises:
            LaunchError: rank 0 did not start in time.
        """
        self.rank, self.world_size, self.is_over = rank, world_size, False
        self._timeout = timeout
        self._exchanges = 0
        with _lost_store_as_launch_error(rank):
            name, self._missing = _common_name(store, rank, world_size, timeout)
            self.store: dist.Store = dist.PrefixStore(name, store)

    def exchange(self, mine: str, answer: Callable[[list[str]], str]) -> str:
        """Return rank 0's answer to the values of all ranks, in rank order. All ranks call this, or `fail`.

        Raises:
            StartError: `answer` raised it, or a rank failed or did not respond in time. The same on all ranks.
        """
        return self._exchange({"value": mine}, answer)

    def fail(self, problems: str) -> NoReturn:
        """Take part in the next exchange with problems, one per line, which end the start of all ranks.

        Raises:
            StartError: always, with the problems of all ranks and the ranks that have them.
        """
        self._exchange({"problem": problems}, lambda _: "")
        raise AssertionError("a reported problem always raises StartError")

    def wait_for_all(self) -> None:
        """Wait until all ranks have called this. All ranks call this, or `fail`.

        Raises:
            StartError: as `exchange`.
        """
        self.exchange("", lambda _: "")

    def reports_first(self) -> bool:
        """Return whether this rank is the first to report why the job ends. Call this once per rank."""
        return bool(self.store.add("reporters", 1) == 1)

    def publish_report(self, report: str) -> None:
        """Send the report of the first rank to the other ranks."""
        self.store.set("report", report)

    def first_report(self, patience: float) -> str | None:
        """Return the report of the first rank, or None if it publishes none within `patience` seconds."""
        return self.store.get("report").decode() if self._appears("report", patience) else None

    def leave(self) -> None:
        """Wait until this process may end: rank 0, which may serve the store, waits for the other ranks."""
        self.store.set(f"left {self.rank}", "")
        if self.rank == 0:
            left_keys = [f"left {rank}" for rank in range(1, self.world_size) if rank not in self._missing]
            _until(lambda: self.store.check(left_keys), GRACE_SECONDS)

    def _exchange(self, mine: dict[str, str], answer: Callable[[list[str]], str]) -> str:
        with _lost_store_as_launch_error(self.rank):
            self.store.set(f"{self._exchanges}/{self.rank}", json.dumps(mine))
            if self.rank == 0:
                response = self._answer_of_all(answer)
                self.store.set(f"{self._exchanges}/answer", json.dumps(response))
            else:
                # Rank 0 may itself arrive late, and then waits for the others for the whole timeout.
                key = f"{self._exchanges}/answer"
                if not self._appears(key, 2 * self._timeout + GRACE_SECONDS):
                    self.is_over = True
                    raise LaunchError(f"rank {self.rank}: rank 0 did not respond; see the error of rank 0")
                response = json.loads(self.store.get(key))
        self._exchanges += 1
        if "problem" in response:
            self.is_over = True
            raise StartError(response["problem"])
        return str(response["value"])

    def _answer_of_all(self, answer: Callable[[list[str]], str]) -> dict[str, str]:
        """Return rank 0's answer when all ranks have sent a value, or GRACE_SECONDS after one has sent a problem."""
        if self._missing:
            return {"problem": f"{in_words(self._missing)} did not start within {_limit(self._timeout)}"}
        values: dict[int, dict[str, str]] = {}
        deadline = time.monotonic() + self._timeout
        failed = False

        def is_over() -> bool:
            nonlocal failed, deadline
            for rank in range(self.world_size):
                if rank not in values and self.store.check([f"{self._exchanges}/{rank}"]):
                    values[rank] = json.loads(self.store.get(f"{self._exchanges}/{rank}"))
            if not failed and any("problem" in each for each in values.values()):
                failed, deadline = True, min(deadline, time.monotonic() + GRACE_SECONDS)
            return len(values) == self.world_size or time.monotonic() >= deadline

        _until(is_over, math.inf)
        problems = {rank: each["problem"] for rank, each in values.items() if "problem" in each}
        if problems:
            return {"problem": _merged(problems, self.world_size)}
        silent = [rank for rank in range(self.world_size) if rank not in values]
        if silent:
            return {"problem": f"{in_words(silent)} did not respond within {_limit(self._timeout)}"}
        try:
            return {"value": answer([values[rank]["value"] for rank in range(self.world_size)])}
        except StartError as error:
            return {"problem": str(error)}

    def _appears(self, key: str, seconds: float) -> bool:
        return _until(lambda: self.store.check([key]), seconds)


def connect(address: str, port: int, rank: int, *, serve: bool, timeout: float) -> dist.Store:
    """Connect to the store of a job.

    Args:
        address, port: MASTER_ADDR and MASTER_PORT.
        serve: whether this process runs the store: rank 0, if the launcher does not.
        timeout: seconds.

    Raises:
        LaunchError: the port is in use, or no store responds within `timeout`.
    """
    deadline = time.monotonic() + timeout
    limit = timedelta(seconds=timeout)
    place = f"MASTER_ADDR={address} MASTER_PORT={port}"
    served: dist.Store | None = None
    if serve:
        try:
            listener = _listener(port)
        except OSError as error:
            raise LaunchError(
                f"rank 0 cannot listen on MASTER_PORT={port} of {os.uname().nodename}: "
                f"{os.strerror(error.errno or 0)}; another program or job uses it: "
                "set MASTER_PORT to a free port on every rank"
            ) from error
        # Pass a socket to torch, because torch prints warnings of its own when it cannot open one.
        served = dist.TCPStore(
            "localhost",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=limit,
            master_listen_fd=listener.detach(),
        )
    stores: list[dist.Store] = []
    problems = ["another program listens there, which does not answer like rank 0 of a job"]

    def reach() -> None:
        try:
            if _reaches(address, port, timeout, problems):
                if served is not None:
                    stores.append(served)
                    return
                left = timedelta(seconds=max(0.1, deadline - time.monotonic()))
                store = dist.TCPStore(address, port, is_master=False, timeout=left)
                store.set_timeout(limit)
                stores.append(store)
        except dist.DistError:
            pass  # another program listens there

    # In a thread, because torch waits without limit for a program that listens and does not answer. If the program
    # sends a wrong answer, torch retries until its timeout, which must not be during the interpreter's shutdown.
    thread = threading.Thread(target=reach, daemon=True)
    with _torch_silenced():
        thread.start()
        thread.join(timeout + _MARGIN_SECONDS)
    if not stores:
        raise LaunchError(
            f"rank {rank} on {os.uname().nodename} cannot reach the store of rank 0 at "
            f"{place} within {_limit(timeout)}: {problems[-1]}; on every rank, set "
            "MASTER_ADDR to rank 0's host and MASTER_PORT to a free port of that host"
        )
    return stores[0]


def in_words(ranks: Iterable[int]) -> str:
    """Name ranks in compact ranges: `rank 1`, `ranks 0, 2-5`."""
    ordered = sorted(ranks)
    # Consecutive ranks have the same distance from their places in the list.
    groups = groupby(enumerate(ordered), key=lambda place_and_rank: place_and_rank[1] - place_and_rank[0])
    runs = [[rank for _, rank in group] for _, group in groups]
    ranges = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' * (len(ordered) > 1)} {', '.join(ranges)}"


def _merged(problems: dict[int, str], world_size: int) -> str:
    """Return one line per problem, with the ranks that have it unless all ranks do."""
    ranks: dict[str, list[int]] = {}
    for rank, problem in sorted(problems.items()):
        for line in problem.splitlines():
            ranks.setdefault(line, []).append(rank)
    lines = [line if len(where) == world_size else f"{in_words(where)}: {line}" for line, where in ranks.items()]
    more = len(lines) - _LISTED_PROBLEMS
    return "\n".join(lines[:_LISTED_PROBLEMS] + ([f"and {more} more problems"] if more > 0 else []))


def _common_name(store: dist.Store, rank: int, world_size: int, timeout: float) -> tuple[str, Sequence[int]]:
    """Return a name that the ranks of this start share, and on rank 0 the missing ranks.

    Rank 0 creates the name. Every other rank asks for it with a random token, which no process has answered before, so
    values of earlier starts do not matter. An answer to a rank that has died does no harm.
    """
    if rank == 0:
        return _name_others(store, world_size, timeout)
    token = uuid.uuid4().hex
    store.set(f"start/asks {rank}", token)
    answer = f"start/answer {token}"
    if not _until(lambda: store.check([answer]), timeout):
        raise LaunchError(f"rank {rank}: rank 0 did not start within {_limit(timeout)}")
    name = store.get(answer).decode()
    store.set(f"{name}/has {rank}", "")
    return name, []


def _name_others(store: dist.Store, world_size: int, timeout: float) -> tuple[str, Sequence[int]]:
    name = f"start {uuid.uuid4().hex}"
    waiting = list(range(1, world_size))

    def all_have_it() -> bool:
        for rank in waiting:
            if store.check([f"start/asks {rank}"]):
                store.set(f"start/answer {store.get(f'start/asks {rank}').decode()}", name)
        waiting[:] = [rank for rank in waiting if not store.check([f"{name}/has {rank}"])]
        return not waiting

    _until(all_have_it, timeout)
    return name, waiting


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll a condition, and return whether it became true in time. The pauses grow, because thousands of ranks poll
    one store.

    The store's own `wait` is not used, because it prints warnings when it times out.
    """
    deadline = time.monotonic() + seconds
    pause = 0.002
    while not condition():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(left, pause))
        pause = min(1.2 * pause, _LONGEST_PAUSE_SECONDS)
    return True


@contextmanager
def _torch_silenced() -> Iterator[None]:
    """Discard what this process writes to stderr: torch prints its C++ stack there for each failed attempt."""
    # If the process was started without stderr, descriptor 2 may be another file.
    if sys.stderr is None:
        yield
        return
    with suppress(OSError, ValueError):  # a dead terminal
        sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


@contextmanager
def _lost_store_as_launch_error(rank: int) -> Iterator[None]:
    """Raise a LaunchError when the connection to the store is lost."""
    try:
        yield
    except dist.DistError as error:
        raise LaunchError(
            f"rank {rank}: lost the connection to the store of rank 0; see the error of rank 0"
        ) from error


def _listener(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)


def _reaches(address: str, port: int, timeout: float, problems: list[str]) -> bool:
    """Return whether a program listens at an address in time. Adds the last error to `problems`."""

    def listens() -> bool:
        try:
            socket.create_connection((address, port), timeout=min(timeout, 5.0)).close()
        except OSError as error:
            problems[1:] = [error.strerror or str(error)]
            return False
        return True

    reached = _until(listens, timeout)
    if reached:
        del problems[1:]
    return reached


def _limit(timeout: float) -> str:
    return f"{timeout:g} s (parallel.timeout_seconds)"
