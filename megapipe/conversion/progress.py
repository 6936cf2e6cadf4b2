"""A progress bar over the tensors of a checkpoint, on a terminal and for work that takes longer than two seconds."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from megapipe.checkpoint.tensor_file import DTYPES
from megapipe.conversion.contents import StoredTensor

SHOWN_AFTER = 2.0
"""Seconds."""


@contextmanager
def progress(tensors: Sequence[StoredTensor], what: str) -> Iterator[Iterator[StoredTensor]]:
    """Yield an iterator over tensors with a progress bar on stderr, which disappears at the end. what: its label."""
    with ExitStack() as stack:
        yield _counted(tensors, what, stack)


def _counted(tensors: Sequence[StoredTensor], what: str, stack: ExitStack) -> Iterator[StoredTensor]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(what, total=sum(map(_num_bytes, tensors)))
    start = time.monotonic()
    for tensor in tensors:
        yield tensor
        bar.advance(task, _num_bytes(tensor))
        if console.is_terminal and not bar.live.is_started and time.monotonic() - start > SHOWN_AFTER:
            stack.enter_context(bar)


def _num_bytes(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
