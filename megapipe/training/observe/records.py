"""The records of a run, the interface of the listeners that receive them, and writers of lines for terminals and
files."""

import contextlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

RANKS = "ranks"
"""Event with the measurement of one step on every rank: `step`, a list of seconds per part of TIME_PARTS, and a list
`peak_bytes`, all in the order of ranks."""

TIME_PARTS = ("forward", "backward", "optimizer", "communication", "waiting")
"""Parts of a rank's time in a step. backward: with recomputation. communication: starting transfers and collectives of
the schedule; those of tensor and context parallelism belong to the layers and count as forward and backward. waiting:
for other ranks and for transfers."""

SAVE_WAIT = "save_wait"
"""Event with the `seconds` for which training paused for the save after `step`."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One finished step. Rates are those of this step, over all ranks."""

    step: int
    """Number of steps done, including this one."""
    loss: float
    """Mean over the step's loss tokens, in nats; the sum of such means where the loss has several terms."""
    learning_rate: float
    gradient_norm: float
    """Before clipping."""
    skipped: bool
    """The loss or the gradients were not finite, so the weights were not changed."""
    samples: int
    consumed_samples: int
    """Samples since the start of the run, including those of this step."""
    tokens: int
    """Tokens that passed through the model."""
    loss_tokens: int
    """Tokens whose prediction counts in the loss; fewer than `tokens` where some are masked."""
    seconds: float
    """Seconds from the request for the batch to the updated weights."""
    data_seconds: float
    """Part of `seconds` in which rank 0 waited for the samples of the batch that it fed to the engine."""
    mfu: float
    """Model FLOPs of the step divided by the peak FLOPs of the devices in that time (Chowdhery et al., 2022, arXiv
    2204.02311, appendix B)."""
    terms: dict[str, float] = field(default_factory=dict)
    """Terms of a loss that has several, by name: mlm (masked tokens), sop (sentence order), nsp (next sentence)."""
    loss_scale: float | None = None
    """Loss scale of an fp16 run."""
    expert_load_variations: list[float] = field(default_factory=list)
    """For every block with balanced experts, in order: standard deviation divided by mean of the number of tokens per
    expert (Shazeer et al., 2017, arXiv 1701.06538, section 4), in the last update of the step."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """One pass over the validation samples, after `step` steps."""

    step: int
    loss: float
    """Mean over the samples' loss tokens, in nats; the sum of such means where the loss has several terms."""
    perplexity: float
    """Perplexity of the loss tokens of the first term."""
    loss_tokens: int
    seconds: float
    terms: dict[str, float] = field(default_factory=dict)
    """Terms of a loss that has several; see StepRecord."""
    accuracies: dict[str, float] = field(default_factory=dict)
    """Share of correct predictions by term, where the model reports them."""


class Listener:
    """Receives the records of a run. Every method does nothing here; a listener overrides those that it needs.

    Methods may raise anything: `Listeners` guards each listener.
    """

    def say(self, line: str) -> None:
        """Receive a line for people."""

    def event(self, name: str, **fields: Any) -> None:
        """Receive something that is not a step, such as the start of the run."""

    def step(self, record: StepRecord) -> None:
        """Receive a finished step."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """Receive a finished evaluation."""

    def close(self) -> None:
        """Close the listener, because the run has ended or failed, or because the listener has failed."""


def write_line(line: str, stream: TextIO | None = None) -> None:
    """Write a line to `stream`, by default standard output, and flush it. Raises OSError or ValueError if it is
    closed."""
    stream = sys.stdout if stream is None else stream
    if stream is None:  # the process was started without one
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()


def print_line(line: str) -> None:
    """Print a line on standard output if that still works; raises nothing."""
    with contextlib.suppress(OSError, ValueError):
        write_line(line)


def print_error(line: str) -> None:
    """Print a line on standard error if that still works; raises nothing."""
    with contextlib.suppress(OSError, ValueError):
        write_line(line, sys.stderr)


def leave_output() -> None:
    """Discard what a dead standard output or standard error does not accept. Call this before the process exits.

    Otherwise the interpreter fails to flush it, prints a traceback and changes the exit status to 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)


class LineFile:
    """Appends lines to a file, which the first line opens. A line is written completely or not at all: a line that a
    full disk cut short is removed again, and an incomplete line of a killed process is ended first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def write(self, line: str) -> None:
        """Append a line. Raises OSError."""
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._descriptor).st_size
        is_incomplete = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        content = (b"\n" if is_incomplete else b"") + line.encode("utf-8", "backslashreplace") + b"\n"
        try:
            while content:
                content = content[os.write(self._descriptor, content) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, size)
            raise

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)
