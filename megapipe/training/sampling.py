"""From logits to the next token: temperature, top-k, nucleus, and random numbers that no layout changes."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How a token is picked from its logits."""

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token, the lowest id among equals."""
    top_k: int | None = None
    """Only tokens as likely as the k-th most likely one or more; None keeps all."""
    top_p: float = 1.0
    """Only the most likely tokens that together reach this probability (1904.09751, section 3.1); 1 keeps all."""
    seed: int = 0
    """Keys the random numbers."""

    def problems(self) -> list[str]:
        """Every setting out of range, one message each."""
        found = []
        if not 0.0 <= self.temperature < float("inf"):
            found.append(f"temperature is {self.temperature}; it must be at least 0 (0: always the most likely token)")
        if self.top_k is not None and self.top_k < 1:
            found.append(f"top-k is {self.top_k}; it must be at least 1, or left out to keep every token")
        if not 0.0 < self.top_p <= 1.0:
            found.append(f"top-p is {self.top_p}; it must be above 0 and at most 1 (1 keeps every token)")
        if not 0 <= self.seed < 1 << 64:
            found.append(f"seed is {self.seed}; it must be at least 0 and below 2^64")
        return found


def pick(logits: Tensor, settings: SamplingSettings, uniforms: Sequence[float]) -> Tensor:
    """The next token of each row, int64 [n], for logits [n, v] and one number in [0, 1) a row.

    A token is where the cumulative probability, in order of token id, first exceeds the row's number: rounding in the
    logits moves a choice only where the number falls within it of such a step.
    """
    if settings.temperature == 0.0:
        return logits.argmax(dim=-1)
    steps = probabilities(logits, settings).cumsum(dim=-1)
    numbers = torch.tensor(uniforms, dtype=steps.dtype, device=steps.device).unsqueeze(-1)
    return torch.searchsorted(steps, numbers * steps[:, -1:], right=True).squeeze(-1)


def probabilities(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """What tokens are drawn from, float64 [n, v], for a temperature above 0: temperature, then top-k, then top-p."""
    scores = logits.double() / settings.temperature
    if settings.top_k is not None and settings.top_k < scores.shape[-1]:
        least = scores.topk(settings.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    shares = torch.softmax(scores, dim=-1)
    if settings.top_p == 1.0:
        return shares
    ranked, order = shares.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(dim=-1) - ranked
    # The most likely token has nothing before it, so at least one stays.
    kept = torch.zeros_like(ranked).scatter_(-1, order, ranked.masked_fill(before >= settings.top_p, 0.0))
    return kept / kept.sum(dim=-1, keepdim=True)


def uniform(seed: int, prompt: int, sample: int, position: int) -> float:
    """A number in [0, 1) for one token: a function of these four alone, whatever else is generated beside it.

    prompt, sample: numbers of the prompt in the request and of the sample of it. position: of the token in its text.
    The top 53 bits of the first word of Philox 4x64 (Salmon et al. 2011) at counter (0, position, sample, prompt).
    """
    counter = np.array([0, position, sample, prompt], dtype=np.uint64)
    word = int(np.random.Philox(key=np.array([seed, _DOMAIN], dtype=np.uint64), counter=counter).random_raw())
    return (word >> 11) * 2.0**-53


_DOMAIN = int.from_bytes(hashlib.blake2b(b"generation", digest_size=8).digest(), "little")
"""Keeps these numbers apart from every other use of a seed."""
