"""Exit statuses of the pretraining programs, all of them; docs/reliability.md explains each."""

import signal
from enum import IntEnum

_END_SIGNAL = 44


class ExitCode(IntEnum):
    """What a rank's process ends with. torchrun prints that of the first rank to fail, and itself ends with 1."""

    FINISHED = 0
    FAILED = 1
    """Any other error: too little memory, or a defect, with its traceback."""
    WRONG_INPUT = 2
    """A configuration, data, layout or checkpoint that cannot be used; said before training starts where possible."""
    NOT_FINITE = 10
    """Too many steps in a row whose loss or gradients were not finite."""
    SPIKES = 11
    """The loss keeps jumping up after one checkpoint."""
    REPLICAS_DIFFER = 12
    """Ranks hold different bits of what has to be equal."""
    PEER_LOST = 13
    """Another rank died or stopped responding; the output of that rank gives the reason."""
    STALLED = _END_SIGNAL
    """The watchdog saw no progress. The number is that of the signal whose handler ends the process, see
    `watchdog.Watchdog`."""
    HUNG_UP = 128 + signal.SIGHUP
    """SIGHUP, such as a closed terminal; the run was saved."""
    INTERRUPTED = 128 + signal.SIGINT
    """Ctrl-C, or a signal to another rank; the run was saved."""
    TERMINATED = 128 + signal.SIGTERM
    """SIGTERM; the run was saved."""
