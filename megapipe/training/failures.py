"""What a run that failed says, and the status it exits with."""

import os
import signal
import time
import traceback

from megapipe.checkpoint.errors import CheckpointError
from megapipe.config.errors import ConfigError
from megapipe.data.errors import DataError
from megapipe.engine.errors import EngineError
from megapipe.optim.loss_scale import LossScaleError
from megapipe.parallel.errors import CommunicationError, LaunchError
from megapipe.training.consistency import ReplicasDifferError
from megapipe.training.exit_codes import ExitCode
from megapipe.training.guards import NonFiniteError
from megapipe.training.memory_report import OutOfMemory
from megapipe.training.output import print_error
from megapipe.training.spikes import SpikeError

_ALIKE: dict[type[Exception], ExitCode] = {
    LossScaleError: ExitCode.NOT_FINITE,
    NonFiniteError: ExitCode.NOT_FINITE,
    SpikeError: ExitCode.SPIKES,
    ReplicasDifferError: ExitCode.REPLICAS_DIFFER,
}
"""Errors that every rank raises at the same step."""


PATIENCE_SECONDS = 20.0
"""What a first rank is given to come to, and tell of, what another one has come to already."""


def status_of(error: Exception) -> ExitCode | None:
    """Tell of an error on stderr, and return the exit status; None for a defect, whose traceback is to be seen."""
    if isinstance(error, ConfigError | DataError | LaunchError | CheckpointError):
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # The ranks of a host make the same mistake: the first one tells of it, and torchrun ends the others for
            # its exit. They must not be quicker, and it may be late; but where it goes on, they tell themselves.
            _await_the_end()
        _tell(error)
        return ExitCode.WRONG_INPUT
    alike = next((code for kind, code in _ALIKE.items() if isinstance(error, kind)), None)
    if alike is not None:
        if os.environ.get("RANK", "0") == "0":
            _tell(error)
        else:
            _await_the_end()  # torchrun ends all ranks as soon as one is gone: not before rank 0 has told
        return alike
    if isinstance(error, OutOfMemory):
        _tell(error)
        return ExitCode.FAILED
    if _lost_a_peer(error):
        traceback.print_exception(error)
        return ExitCode.PEER_LOST
    return None


def _await_the_end() -> None:
    """Until a launcher ends this process for the exit of another rank, or for so long."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(PATIENCE_SECONDS)


def _lost_a_peer(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, CommunicationError):
            return True
        error = error.__cause__ if isinstance(error, EngineError) else None
    return False


def _tell(error: Exception) -> None:
    for line in str(error).splitlines():
        print_error(f"error: {line}")
