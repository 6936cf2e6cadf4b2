"""What a run tells of itself, and who listens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One finished step. Rates are the step's own, over all ranks."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Mean over the step's loss tokens, in nats; the sum of such means where the loss has several terms."""
    learning_rate: float
    gradient_norm: float
    """Before clipping."""
    skipped: bool
    """The loss or the gradients were not finite and the weights stayed."""
    samples: int
    consumed_samples: int
    """Samples since the beginning of the run, this step's included."""
    tokens: int
    """Tokens that went through the model."""
    loss_tokens: int
    """Tokens whose prediction counts; fewer where some are masked."""
    seconds: float
    """From asking for the batch to the updated weights."""
    mfu: float
    """Model FLOPs of the step over what the devices could have done in that time (Chowdhery et al., 2022, arXiv
    2204.02311, appendix B)."""
    terms: dict[str, float] = field(default_factory=dict)
    """Of a loss that has several, by name: mlm (masked tokens), sop (sentence order), nsp (next sentence)."""
    loss_scale: float | None = None
    """What an fp16 run multiplied the step's loss by."""
    expert_load_variations: list[float] = field(default_factory=list)
    """Of every block whose experts are balanced, in order: standard deviation of how many tokens its experts got over
    their mean (Shazeer et al., 2017, arXiv 1701.06538, section 4); of the last update in a step of several."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """One pass over the validation samples, after `step` steps."""

    step: int
    loss: float
    """Mean over the samples' loss tokens, in nats; the sum of such means where the loss has several terms."""
    perplexity: float
    """Of the loss tokens, those of the first term."""
    loss_tokens: int
    seconds: float
    terms: dict[str, float] = field(default_factory=dict)
    """As in StepRecord."""
    accuracies: dict[str, float] = field(default_factory=dict)
    """Share of right predictions by term, where the model tells."""


class Listener:
    """Hears what a run tells. Every method does nothing here; a listener overrides what it is interested in."""

    def say(self, line: str) -> None:
        """A line for people."""

    def event(self, name: str, **fields: Any) -> None:
        """Something that is not a step, such as the start of the run."""

    def step(self, record: StepRecord) -> None:
        """A finished step."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """A finished evaluation."""

    def close(self) -> None:
        """The run is over, or broken off."""


class Listeners(Listener):
    """Tells everything to several listeners; none on ranks that have nothing to tell. Closes them with its block."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = listeners

    def say(self, line: str) -> None:
        for listener in self._listeners:
            listener.say(line)

    def event(self, name: str, **fields: Any) -> None:
        for listener in self._listeners:
            listener.event(name, **fields)

    def step(self, record: StepRecord) -> None:
        for listener in self._listeners:
            listener.step(record)

    def evaluation(self, record: EvaluationRecord) -> None:
        for listener in self._listeners:
            listener.evaluation(record)

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()

    def __enter__(self) -> "Listeners":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
