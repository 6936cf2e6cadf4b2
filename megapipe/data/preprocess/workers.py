"""A bounded pool of processes whose results come back in the order of the tasks."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from megapipe.data.errors import DataError

Result = TypeVar("Result")


def map_in_order(
    function: Callable[..., Result], tasks: Iterable[tuple[Any, ...]], workers: int
) -> Generator[Result, None, None]:
    """`function(*task)` for each task, in order, at most two tasks per worker ahead; one worker runs in this process.

    Raises what a task raises, in its turn, and DataError when a worker process dies.
    """
    if workers == 1:
        yield from (function(*task) for task in tasks)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    pending: deque[Future[Result]] = deque()
    try:
        for task in tasks:
            with interrupts_put_off():  # a task may start a process
                pending.append(pool.submit(function, *task))
            if len(pending) >= 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            f"one of {workers} worker processes died; if memory ran out, use fewer with --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def interrupts_put_off() -> Iterator[None]:
    """Ctrl-C comes when the block is over. Processes that the block starts have it blocked from their beginning, so
    that they neither print a traceback while they import nor find half a message from here.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if came:
        signal.raise_signal(signal.SIGINT)


def _start_worker() -> None:
    """Ctrl-C is the parent's to handle; a worker whose parent was killed must not live on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)
