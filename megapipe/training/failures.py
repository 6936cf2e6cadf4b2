"""Failures of a run: the message, the rank that prints it, and the exit status."""

import signal
import traceback
from collections.abc import Callable

import torch.distributed as dist

from megapipe.checkpoint.errors import CheckpointError
from megapipe.config.errors import ConfigError
from megapipe.data.errors import DataError
from megapipe.engine.errors import EngineError
from megapipe.optim.loss_scale import LossScaleError
from megapipe.parallel.errors import CommunicationError, LaunchError
from megapipe.parallel.rendezvous import Start
from megapipe.training.consistency import ReplicasDifferError
from megapipe.training.exit_codes import ExitCode
from megapipe.training.guards import NonFiniteError
from megapipe.training.memory_report import OutOfMemory
from megapipe.training.output import print_error
from megapipe.training.spikes import SpikeError
from megapipe.training.watchdog_process import record_reason

_STATUSES: dict[type[Exception], ExitCode] = {
    ConfigError: ExitCode.WRONG_INPUT,
    DataError: ExitCode.WRONG_INPUT,
    LaunchError: ExitCode.WRONG_INPUT,
    CheckpointError: ExitCode.WRONG_INPUT,
    LossScaleError: ExitCode.NOT_FINITE,
    NonFiniteError: ExitCode.NOT_FINITE,
    SpikeError: ExitCode.SPIKES,
    ReplicasDifferError: ExitCode.REPLICAS_DIFFER,
    OutOfMemory: ExitCode.FAILED,
}
"""Errors whose message says all that a user needs."""

PATIENCE_SECONDS = 10.0
"""Time that a rank waits for the report of the first rank that failed."""


def status_of(error: Exception, start: Start | None = None) -> ExitCode:
    """Report an error on stderr and to torchrun, and return the exit status.

    All ranks give their reason to torchrun, and the first rank that fails prints it. Another rank prints its own
    reason if it is a different one, unless this rank only lost a peer that failed before.

    start: the ranks of this start; None for one process, or if the ranks have not met.
    """
    # torchrun sends SIGTERM to all ranks as soon as one ends; ignore it, so that each ends with its own status.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    starting = start is not None and not start.is_over
    if start is not None and starting:
        error = _end_start_of_all(error, start)
    status = next((code for kind, code in _STATUSES.items() if isinstance(error, kind)), None)
    lost = status is None and _lost_a_peer(error)
    words = str(error) if status is not None or lost else "".join(traceback.format_exception(error)).rstrip()
    record_reason(words)

    def say() -> None:
        if status is not None:
            print_error("\n".join(f"error: {line}" for line in words.splitlines()))
        else:
            print_error(words)

    if start is None:
        say()
    else:
        _report_once(start, words, lost, say, alike=starting or status not in (None, ExitCode.FAILED))
    if status is None:
        return ExitCode.PEER_LOST if lost else ExitCode.FAILED
    return status


def _end_start_of_all(error: Exception, start: Start) -> Exception:
    """End the start of all ranks because of an error on this one, and return the error that all ranks report."""
    known = isinstance(error, tuple(_STATUSES))
    try:
        start.fail(str(error) if known else f"{type(error).__name__}: {error}")
    except LaunchError as shared:
        return shared if known else error


def _report_once(start: Start, words: str, lost: bool, say: Callable[[], None], *, alike: bool) -> None:
    """Print on the first rank that calls this; the other ranks wait until it has printed.

    alike: all ranks fail for the same reason.
    """
    try:
        if start.reports_first():
            say()
            start.publish_report(words)
        else:
            report = start.first_report(PATIENCE_SECONDS)
            if report is None or (report != words and not lost):
                say()
        if alike:
            start.leave()
    except dist.DistError:  # the process that served the store has ended, and the report may be lost
        say()


def _lost_a_peer(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, CommunicationError):
            return True
        error = error.__cause__ if isinstance(error, EngineError) else None
    return False
