"""Configuration of the work between steps: evaluation, checkpoints, trackers, traces."""

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

    every: int | Literal["auto", "none"] | None = None
    """Steps between saves; a signal saves as well. auto measures the cost of a save and saves as often as max_overhead
    allows. none, or null: no save before the end, unless every_minutes is given."""
    every_minutes: float | None = None
    """Maximum time from one save to the next, in minutes of training steps, regardless of `every`; null means no
    limit."""
    at_end: bool = True
    """Save after the last step. With false, and without every and every_minutes, a run saves nothing at all, not even
    on a signal."""
    max_overhead: float = 0.035
    """For every auto: fraction of the training time that saves may add."""
    asynchronous: bool = True
    """Copy the state to host memory and continue training while it is written; false writes between two steps and
    needs no memory for a copy."""
    signal_deadline_seconds: float = 300.0
    """Seconds after which a save that SIGTERM, SIGINT or SIGHUP requested is abandoned; set it below the time that the
    cluster gives a job between its signal and its end."""
    retry_seconds: float = 600.0
    """Seconds for which a failed save at the end is retried, if the disk is full for example, before the run ends with
    an error; 0 means no retry."""
    keep_last: int | None = 2
    """Newest checkpoints to keep; older ones are deleted once a newer one is durable; null keeps all."""
    keep_every: int | None = None
    """Also keep every checkpoint whose step is a multiple of this number; null keeps none."""
    resume: bool = True
    """Continue from the newest complete checkpoint under training.directory, if there is one."""
    accept_other_data: bool = False
    """Resume also where the data, or fields that decide which samples a step sees, differ from the checkpoint's. The
    change is reported, and recorded in metrics.jsonl and in later checkpoints."""

    def __post_init__(self) -> None:
        if self.every == "none":
            self.every = None

    @property
    def saves_between(self) -> bool:
        """Whether the run saves before its end."""
        return self.every is not None or self.every_minutes is not None

    @property
    def saves(self) -> bool:
        """Whether the run saves at all."""
        return self.saves_between or self.at_end

    def problems(self) -> list[str]:
        """Return one message for every rule that a single field breaks."""
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
        if not self.retry_seconds >= 0:
            found.append(f"checkpoint.retry_seconds is {self.retry_seconds}; it must be at least 0")
        if self.keep_every is not None and self.keep_last is None:
            found.append(
                f"checkpoint.keep_every is {self.keep_every} and checkpoint.keep_last null, which keeps every "
                "checkpoint anyway; set checkpoint.keep_last to at least 1, or leave checkpoint.keep_every out"
            )
        return found


@dataclass(kw_only=True)
class TrackingConfig:
    """Where metrics go besides the terminal and metrics.jsonl. A tracker that fails never stops a run."""

    tensorboard: bool = False
    """Write TensorBoard event files to training.directory/tensorboard."""
    wandb_project: str = ""
    """Weights & Biases project; empty turns it off. The run is offline unless an account is set up, and never asks."""


@dataclass(kw_only=True)
class ProfileConfig:
    """Recording of what each rank does in a few steps, for megapipe schedule overlay."""

    trace: str | None = None
    """Folder for the recording: one rank-N.json per rank, and schedule.txt. null records nothing."""
    first_step: int = 3
    """First recorded step, counted from 1 at this start of the run; the steps before it warm up."""
    steps: int = 3
    """Number of consecutive steps to record."""
