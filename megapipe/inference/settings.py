"""Sampling settings and prompts. This module does not import torch, so that wrong ones are refused quickly."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megapipe.config import InputError


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How a token is chosen from its logits."""

    temperature: float = 1.0
    """Divisor of the logits; 0 chooses the most likely token, and the one with the lowest id among equals."""
    top_k: int | None = None
    """Only tokens at least as likely as the k-th most likely one can be chosen; None keeps all."""
    top_p: float = 1.0
    """Only the most likely tokens with this total probability can be chosen (arXiv 1904.09751, section 3.1); 1 keeps
    all."""
    min_p: float = 0.0
    """Only tokens with at least this part of the most likely token's probability can be chosen (arXiv 2407.01082,
    section 3); 0 keeps all."""
    repetition_penalty: float = 1.0
    """Divisor of the positive logits, and factor of the negative ones, of all tokens that a text already has, with its
    prompt (arXiv 1909.05858, section 4.1, as transformers' RepetitionPenaltyLogitsProcessor); 1 changes nothing."""
    seed: int = 0
    """Seed of the random numbers."""

    def problems(self) -> list[str]:
        """Return a message for each setting that is out of range."""
        problems = []
        if not 0.0 <= self.temperature < float("inf"):
            problems.append(
                f"temperature is {self.temperature}; it must be at least 0 (0: always the most likely token)"
            )
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"top-k is {self.top_k}; it must be at least 1, or left out to keep every token")
        if not 0.0 < self.top_p <= 1.0:
            problems.append(f"top-p is {self.top_p}; it must be above 0 and at most 1 (1 keeps every token)")
        if not 0.0 <= self.min_p <= 1.0:
            problems.append(f"min-p is {self.min_p}; it must be at least 0 (0 keeps every token) and at most 1")
        if not 0.0 < self.repetition_penalty < float("inf"):
            problems.append(f"repetition-penalty is {self.repetition_penalty}; it must be above 0 (1: no penalty)")
        if not 0 <= self.seed < 1 << 64:
            problems.append(f"seed is {self.seed}; it must be at least 0 and below 2^64")
        return problems


MASK = "[MASK]"
"""A gap in a text, for every tokenizer."""


def stop_problems(strings: Sequence[str]) -> list[str]:
    """Return a message for each string that cannot end a text."""
    return [
        f"stop string {number} is {string!r}; it must be UTF-8 text of at least one character"
        for number, string in enumerate(strings, start=1)
        if not string or not is_utf8(string)
    ]


class PromptError(InputError, ValueError):
    """A prompt that the model cannot continue. The message names the prompt, the rule, and how to fix it."""


def all_prompts(texts: Iterable[str], files: Iterable[str]) -> list[str]:
    """Return the prompts of a command line, then those in files. Raises PromptError for none, for an unreadable
    file and for text that is not UTF-8."""
    prompts = [*texts, *(_content(Path(file)) for file in files)]
    if not prompts:
        raise PromptError("nothing to generate: give a prompt with --prompt or --prompt-file")
    for number, prompt in enumerate(prompts, start=1):
        if not is_utf8(prompt):
            raise PromptError(f"prompt {number} is not UTF-8 text")
    return prompts


def check_gaps(text: str) -> None:
    """Raise PromptError for a text that has no gap to fill in, or is not UTF-8."""
    if MASK not in text:
        raise PromptError(f"{text!r} has no gap: write {MASK} where a token is missing")
    if not is_utf8(text):
        raise PromptError(f"{text!r} is not UTF-8 text")


def _content(file: Path) -> str:
    try:
        return file.read_text("utf-8-sig").removesuffix("\n")
    except OSError as error:
        raise PromptError(f"cannot read {file}: {error.strerror}; choose a UTF-8 text file") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def is_utf8(text: str) -> bool:
    """Return whether a text has no lone surrogates, which stand for invalid UTF-8 bytes of a command line."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
