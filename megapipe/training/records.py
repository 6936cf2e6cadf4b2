"""The records of a run, and the interface of the listeners that receive them."""

from dataclasses import dataclass, field
from typing import Any

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
    """From the request for the batch to the updated weights."""
    data_seconds: float
    """Part of `seconds` in which rank 0 waited for the samples of the batch that it fed to the engine."""
    mfu: float
    """Model FLOPs of the step divided by the peak FLOPs of the devices in that time (Chowdhery et al., 2022, arXiv
    2204.02311, appendix B)."""
    terms: dict[str, float] = field(default_factory=dict)
    """Terms of a loss that has several, by name: mlm (masked tokens), sop (sentence order), nsp (next sentence)."""
    loss_scale: float | None = None
    """Factor of the loss in an fp16 run."""
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
    """As in StepRecord."""
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
