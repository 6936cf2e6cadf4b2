"""How the ranks of one start of a job find each other, and agree, before any process group exists.

Everything goes through one TCP store: torchrun's, or one that rank 0 serves. torchrun shares its store between all
starts of a job, so that a rank could read what a dead one left there and connect to it (pytorch#135712,
pytorch#167288; torch 2.13). Its count of restarts does not tell the starts apart, since each host has a count of its
own. So the ranks first agree on a name for their start, and keep everything else under that name.
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
from typing import NoReturn

import torch.distributed as dist

from megapipe.parallel.errors import LaunchError

GRACE_SECONDS = 5.0
"""How long rank 0 waits for further problems after the first one, and for the other ranks to read why a start
failed."""
_LONGEST_PAUSE_SECONDS = 0.25
_LISTED_PROBLEMS = 8
_MARGIN_SECONDS = 2.0
_BACKLOG = 4096


class StartError(LaunchError):
    """The reason why a start failed, the same on every rank."""


class Start:
    """The ranks of one start of a job, which agree in a series of exchanges that rank 0 answers.

    Attributes:
        rank, world_size: of this process, and of the job.
        store: holds nothing of an earlier start; process groups use it too.
        is_over: whether training has started, or an exchange failed; later errors are a rank's own.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: float) -> None:
        """Meet the other ranks. All ranks call this; where one did not, the first exchange fails.

        timeout: seconds that a rank waits for the others, here and in every exchange.

        Raises:
            LaunchError: rank 0 did not start in time.
        """
        self.rank, self.world_size, self.is_over = rank, world_size, False
        self._timeout = timeout
        self._exchanges = 0
        with _loss_named(rank):
            name, self._missing = _common_name(store, rank, world_size, timeout)
            self.store: dist.Store = dist.PrefixStore(name, store)

    def exchange(self, mine: str, answer: Callable[[list[str]], str]) -> str:
        """Return rank 0's answer to the values of all ranks, in rank order. All ranks call this, or `fail`.

        Raises:
            StartError: `answer` raised it, a rank failed, or did not come in time; the same on all ranks.
        """
        return self._exchange({"value": mine}, answer)

    def fail(self, problems: str) -> NoReturn:
        """Take part in the next exchange with problems, one a line, that end the start of all ranks.

        Raises:
            StartError: always, with the problems of all ranks and the ranks that have them.
        """
        self._exchange({"problem": problems}, lambda _: "")
        raise AssertionError("a reported problem always raises StartError")

    def wait_for_all(self) -> None:
        """Return once all ranks have come here. All ranks call this, or `fail`.

        Raises:
            StartError: as `exchange`.
        """
        self.exchange("", lambda _: "")

    def speaks_first(self) -> bool:
        """Whether no rank has said before why the job ends."""
        return bool(self.store.add("speakers", 1) == 1)

    def has_spoken(self, words: str) -> None:
        """Let the other ranks know what the first speaker said."""
        self.store.set("spoken", words)

    def spoken(self, patience: float) -> str | None:
        """Return what the first speaker said, None when it says nothing within `patience` seconds."""
        return self.store.get("spoken").decode() if self._appears("spoken", patience) else None

    def leave(self) -> None:
        """Return when this process may end: on rank 0, which may serve the store, after the others."""
        self.store.set(f"left {self.rank}", "")
        if self.rank == 0:
            others = [f"left {rank}" for rank in range(1, self.world_size) if rank not in self._missing]
            _until(lambda: self.store.check(others), GRACE_SECONDS)

    def _exchange(self, mine: dict[str, str], answer: Callable[[list[str]], str]) -> str:
        with _loss_named(self.rank):
            self.store.set(f"{self._exchanges}/{self.rank}", json.dumps(mine))
            if self.rank == 0:
                given = self._judged(answer)
                self.store.set(f"{self._exchanges}/answer", json.dumps(given))
            else:
                # Rank 0 may have come late, and then waits for others as long as it may.
                key = f"{self._exchanges}/answer"
                if not self._appears(key, 2 * self._timeout + GRACE_SECONDS):
                    self.is_over = True
                    raise LaunchError(f"rank {self.rank}: rank 0 did not respond; see the error of rank 0")
                given = json.loads(self.store.get(key))
        self._exchanges += 1
        if "problem" in given:
            self.is_over = True
            raise StartError(given["problem"])
        return str(given["value"])

    def _judged(self, answer: Callable[[list[str]], str]) -> dict[str, str]:
        """Rank 0's answer, once all ranks have said something, or one of them a problem a while ago."""
        if self._missing:
            return {"problem": f"{in_words(self._missing)} did not start within {_limit(self._timeout)}"}
        said: dict[int, dict[str, str]] = {}
        deadline = time.monotonic() + self._timeout
        failed = False

        def is_over() -> bool:
            nonlocal failed, deadline
            for rank in range(self.world_size):
                if rank not in said and self.store.check([f"{self._exchanges}/{rank}"]):
                    said[rank] = json.loads(self.store.get(f"{self._exchanges}/{rank}"))
            if not failed and any("problem" in each for each in said.values()):
                failed, deadline = True, min(deadline, time.monotonic() + GRACE_SECONDS)
            return len(said) == self.world_size or time.monotonic() >= deadline

        _until(is_over, math.inf)
        problems = {rank: each["problem"] for rank, each in said.items() if "problem" in each}
        if problems:
            return {"problem": _merged(problems, self.world_size)}
        silent = [rank for rank in range(self.world_size) if rank not in said]
        if silent:
            return {"problem": f"{in_words(silent)} did not respond within {_limit(self._timeout)}"}
        try:
            return {"value": answer([said[rank]["value"] for rank in range(self.world_size)])}
        except StartError as error:
            return {"problem": str(error)}

    def _appears(self, key: str, seconds: float) -> bool:
        return _until(lambda: self.store.check([key]), seconds)


def connect(address: str, port: int, rank: int, *, serve: bool, timeout: float) -> dist.Store:
    """Connect to the store of a job.

    Args:
        address, port: MASTER_ADDR and MASTER_PORT.
        serve: whether this process runs the store: rank 0, where the launcher does not.
        timeout: seconds.

    Raises:
        LaunchError: the port is in use, or no store answers within `timeout`.
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
                f"{os.strerror(error.errno or 0)}; another program or job uses it: set MASTER_PORT to a free port "
                "on every rank"
            ) from error
        # A socket of our own, since torch writes its own warnings about one that cannot be had.
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
            pass  # it listens, and is something else

    # In a thread, since torch waits without limit for something that listens and does not answer; where it answers
    # wrongly torch tries until its time is up, and that must not be while the interpreter shuts down.
    thread = threading.Thread(target=reach, daemon=True)
    with _torch_silenced():
        thread.start()
        thread.join(timeout + _MARGIN_SECONDS)
    if not stores:
        raise LaunchError(
            f"rank {rank} on {os.uname().nodename} cannot reach the store of rank 0 at {place} within "
            f"{_limit(timeout)}: {problems[-1]}; set MASTER_ADDR to the address of rank 0's host and MASTER_PORT to "
            "a free port of that host on every rank"
        )
    return stores[0]


def in_words(ranks: Iterable[int]) -> str:
    """Name ranks in compact ranges: `rank 1`, `ranks 0, 2-5`."""
    ordered = sorted(ranks)
    parts: list[str] = []
    first = last = ordered[0]
    for rank in (*ordered[1:], None):
        if rank == last + 1:
            last = rank
            continue
        parts.append(str(first) if first == last else f"{first}-{last}")
        if rank is not None:
            first = last = rank
    return f"rank{'s' * (len(ordered) > 1)} {', '.join(parts)}"


def _merged(problems: dict[int, str], world_size: int) -> str:
    """One line for every problem, with the ranks that have it unless all do."""
    ranks: dict[str, list[int]] = {}
    for rank, problem in sorted(problems.items()):
        for line in problem.splitlines():
            ranks.setdefault(line, []).append(rank)
    lines = [line if len(where) == world_size else f"{in_words(where)}: {line}" for line, where in ranks.items()]
    more = len(lines) - _LISTED_PROBLEMS
    return "\n".join(lines[:_LISTED_PROBLEMS] + ([f"and {more} more problems"] if more > 0 else []))


def _common_name(store: dist.Store, rank: int, world_size: int, timeout: float) -> tuple[str, Sequence[int]]:
    """A name that the ranks of this start share, whatever those of earlier ones left, and on rank 0 who is missing.

    Rank 0 makes it up. Every other rank asks under a word of its own, which no process has answered before; what rank
    0 answers to those who are dead by now does no harm.
    """
    if rank == 0:
        return _name_others(store, world_size, timeout)
    word = uuid.uuid4().hex
    store.set(f"start/asks {rank}", word)
    answer = f"start/answer {word}"
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


def _until(true: Callable[[], bool], seconds: float) -> bool:
    """Whether a condition comes true in time. Asks often at first, later less: thousands of ranks ask one store.

    Not the store's own `wait`, which writes warnings when it times out.
    """
    deadline = time.monotonic() + seconds
    pause = 0.002
    while not true():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(left, pause))
        pause = min(1.2 * pause, _LONGEST_PAUSE_SECONDS)
    return True


@contextmanager
def _torch_silenced() -> Iterator[None]:
    """Drop what is written to this process's stderr, where torch prints its C++ stack for each failed attempt."""
    if sys.stderr is None:  # the process was started without one, and descriptor 2 may be another file
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
def _loss_named(rank: int) -> Iterator[None]:
    """Turn the loss of the store into a LaunchError."""
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
    """Whether something listens at an address in time; what prevented that is added to `problems`."""

    def listens() -> bool:
        try:
            socket.create_connection((address, port), timeout=min(timeout, 5.0)).close()
        except OSError as error:
            problems[1:] = [error.strerror or str(error)]
            return False
        return True

    found = _until(listens, timeout)
    if found:
        del problems[1:]
    return found


def _limit(timeout: float) -> str:
    return f"{timeout:g} s (parallel.timeout_seconds)"
