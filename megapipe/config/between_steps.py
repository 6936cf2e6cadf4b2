"""What a run does between steps: evaluate, save, tell, trace."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class EvaluationConfig:
    """Loss and perplexity on the validation split."""

    every: int | None = None
    """Steps between evaluations, one more at the end; null never evaluates."""
    samples: int = 64
    """Validation samples per evaluation, always the same ones; rounded up to whole batches."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """Saving and resuming. A checkpoint can be resumed on any layout."""

    every: int | None = None
    """Steps between saves; one more is made at the end, on Ctrl-C and on SIGTERM. null saves nothing at all."""
    keep_last: int | None = 2
    """Newest checkpoints to keep; older ones are deleted once a newer one is durable; null keeps all."""
    resume: bool = True
    """Continue from the newest whole checkpoint under training.directory, if there is one."""


@dataclass(kw_only=True)
class TrackingConfig:
    """Where metrics go besides the terminal and metrics.jsonl."""

    tensorboard: bool = False
    """Write TensorBoard event files to training.directory/tensorboard."""
    wandb_project: str = ""
    """Weights & Biases project; empty turns it off. Runs offline unless an account is set up; never asks."""


@dataclass(kw_only=True)
class ProfileConfig:
    """What each rank really did in a few steps, to lay over the prediction (tools/schedule.py overlay)."""

    trace: str | None = None
    """Folder for one rank-N.json a rank and schedule.txt; null traces nothing and costs nothing."""
    first_step: int = 3
    """First traced step, counted from 1 where this start of the run begins; the steps before it warm up."""
    steps: int = 3
    """Steps in a row that are traced."""
