"""What a run does between steps: evaluate, save, report and trace."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class EvaluationConfig:
    """Loss and perplexity on the validation split."""

    every: int | None = None
    """Steps between evaluations, with another one at the end; null means no evaluation."""
    samples: int = 64
    """Validation samples per evaluation, always the same ones, rounded up to whole batches."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """Saving and resuming. A checkpoint can be resumed on any layout."""

    every: int | Literal["auto"] | None = None
    """Steps between saves; one more is made at the end and on a signal, SIGUSR1 included. auto measures what a save
    costs and saves as often as max_overhead lets it; null saves nothing at all, unless every_minutes is given."""
    every_minutes: float | None = None
    """Longest time from one save to the next, in minutes of training steps, whatever `every` says; null: no limit."""
    max_overhead: float = 0.035
    """every auto: share of the training time that saves may add."""
    asynchronous: bool = True
    """Copy the state to host memory and train on while it is written; false writes between two steps, for no memory
    beside the state."""
    signal_deadline_seconds: float = 300.0
    """Give up the save that SIGTERM or SIGINT asked for after so long; set it below the time that the cluster leaves a
    job between its signal and its end."""
    keep_last: int | None = 2
    """Newest checkpoints to keep; older ones are deleted once a newer one is durable; null keeps all."""
    keep_every: int | None = None
    """Keep, beside these, every checkpoint whose step is a multiple of this one; null keeps none."""
    resume: bool = True
    """Continue from the newest whole checkpoint under training.directory, if there is one."""

    @property
    def saves(self) -> bool:
        """Whether the run saves at all."""
        return self.every is not None or self.every_minutes is not None

    def problems(self) -> list[str]:
        """Every rule that single fields break, one message each."""
        found = [
            f"checkpoint.{name} is {value}; it must be at least 1"
            for name, value in (("every", self.every), ("keep_last", self.keep_last), ("keep_every", self.keep_every))
            if isinstance(value, int) and value < 1
        ]
        above_zero = {
            "every_minutes": self.every_minutes,
            "max_overhead": self.max_overhead,
            "signal_deadline_seconds": self.signal_deadline_seconds,
        }
        found += [
            f"checkpoint.{name} is {value}; it must be above 0"
            for name, value in above_zero.items()
            if value is not None and not value > 0
        ]
        if self.keep_every is not None and self.keep_last is None:
            found.append(
                f"checkpoint.keep_every is {self.keep_every} and checkpoint.keep_last null, which keeps every "
                "checkpoint anyway; set checkpoint.keep_last to at least 1, or leave checkpoint.keep_every out"
            )
        return found


@dataclass(kw_only=True)
class TrackingConfig:
    """Where metrics go besides the terminal and metrics.jsonl."""

    tensorboard: bool = False
    """Write TensorBoard event files to training.directory/tensorboard."""
    wandb_project: str = ""
    """Weights & Biases project; empty turns it off. It works offline unless an account is set up, and never asks for
    one."""


@dataclass(kw_only=True)
class ProfileConfig:
    """Recording of what each rank does in a few steps, for tools/schedule.py overlay."""

    trace: str | None = None
    """Folder for the recording: one rank-N.json per rank, and schedule.txt. null records nothing."""
    first_step: int = 3
    """First recorded step, counted from 1 at this start of the run; the steps before it warm up."""
    steps: int = 3
    """Number of consecutive steps to record."""
