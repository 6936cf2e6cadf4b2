"""Text generation: prompts pass through the model in chunks, then each pass adds one token to every text.

Prompts are split into many micro-batches, so that pipeline ranks work at the same time. A pass of single tokens uses
only as many micro-batches as have enough tokens each, because a smaller one costs as much time (measured: 8 texts on
two ranks with a 10-million-parameter model take 10.8 ms per token as one micro-batch and 13.3 ms as two).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.training.passes import LoadedModel, Passes
from megapipe.training.sampling import SamplingSettings, pick, uniform

CHUNK = 256
"""Prompt tokens per pass at most: it limits the activations, and is enough for efficient matrix products."""


@dataclass
class Text:
    """A prompt and its continuation so far. prompt, sample: its numbers in the request."""

    prompt: int
    sample: int
    tokens: list[int]
    num_prompt_tokens: int
    finished: bool = False

    @property
    def generated(self) -> list[int]:
        """The new tokens, without an end-of-document token."""
        return self.tokens[self.num_prompt_tokens :]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Where texts end.

    max_new_tokens: per text, fewer if the model's positions run out. vocabulary_size: token ids from here on are never
    chosen. end_of_document: token that ends a text. batch_size: number of texts that are generated together.
    """

    max_new_tokens: int
    vocabulary_size: int
    end_of_document: int | None = None
    batch_size: int = 32


def generate(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    num_samples: int,
    settings: SamplingSettings,
    limits: Limits,
    report: Callable[[int], None] = lambda num_tokens: None,
) -> list[Text]:
    """Continue each prompt with `num_samples` texts, prompt by prompt; a collective call.

    The texts are the same on every rank. Layouts sum in different orders, so tokens whose logits differ only by
    rounding may be chosen differently. `report` is called after every pass with the number of new tokens.

    Raises ValueError for an empty prompt, or one that leaves no position to generate at.
    """
    longest = model.config.model.max_positions
    for number, prompt in enumerate(prompts):
        if not 0 < len(prompt) < longest:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens; a prompt has at least 1 and at most {longest - 1}, one "
                f"less than model.max_positions"
            )
    texts = [
        Text(number, sample, list(prompt), len(prompt))
        for number, prompt in enumerate(prompts)
        for sample in range(num_samples)
    ]
    if not texts:
        return []
    growth = _Growth(model, texts, settings, limits, report)
    for first in range(0, len(texts), growth.num_texts):
        growth.run(texts[first : first + growth.num_texts])
    return texts


class _Growth:
    """Extends texts token by token, as many at once as one pass holds."""

    def __init__(
        self,
        model: LoadedModel,
        texts: Sequence[Text],
        settings: SamplingSettings,
        limits: Limits,
        report: Callable[[int], None],
    ) -> None:
        self._report = report
        self._model = model
        self._settings = settings
        self._limits = limits
        self._positions = model.config.model.max_positions
        longest = max(len(text.tokens) for text in texts)
        self._chunk = min(CHUNK, longest)
        self.num_texts = min(limits.batch_size, len(texts))
        whole_chunks = -(-longest // self._chunk) * self._chunk
        capacity = max(whole_chunks, min(longest + limits.max_new_tokens, self._positions))
        self._passes = Passes(model, self.num_texts, capacity, {self._chunk, 1})

    def run(self, texts: Sequence[Text]) -> None:
        """Generate up to `num_texts` texts completely."""
        # A pass has a fixed number of texts; the rows that fill it up are computed and discarded.
        rows = [*texts, *[texts[0]] * (self.num_texts - len(texts))]
        self._extend(texts, self._read(rows))
        while not all(text.finished for text in texts):
            tokens = torch.tensor([text.tokens[-1:] for text in rows])
            positions = torch.tensor([[len(text.tokens) - 1] for text in rows])
            self._extend(texts, self._passes.run(tokens, positions, torch.zeros(len(rows), dtype=torch.int64)))

    def _read(self, rows: Sequence[Text]) -> Tensor | None:
        """Run the prompts, and return the logits [n, v] after each last token; None without the last stage."""
        ends = torch.tensor([len(text.tokens) - 1 for text in rows])
        ends_logits: Tensor | None = None
        for start in range(0, int(ends.max()) + 1, self._chunk):
            pieces = [text.tokens[start : start + self._chunk] for text in rows]
            # Shorter prompts are padded: no token attends to a padded position before a generated token replaces it.
            tokens = torch.tensor([piece + [0] * (self._chunk - len(piece)) for piece in pieces])
            positions = torch.arange(start, start + self._chunk).expand(len(rows), -1)
            logits = self._passes.run(tokens, positions, (ends - start).clamp(0, self._chunk - 1))
            if logits is not None:
                ends_here = (ends // self._chunk == start // self._chunk).to(logits.device).unsqueeze(1)
                ends_logits = logits if ends_logits is None else torch.where(ends_here, logits, ends_logits)
        return ends_logits

    def _extend(self, texts: Sequence[Text], logits: Tensor | None) -> None:
        """Append a token to every unfinished text, the same one on all ranks."""
        pending = sum(not text.finished for text in texts)
        mesh = self._model.mesh
        chosen = torch.zeros(len(texts), dtype=torch.int64, device=mesh.device)
        if logits is not None:
            numbers = [uniform(self._settings.seed, text.prompt, text.sample, len(text.tokens)) for text in texts]
            known = logits[: len(texts), : self._limits.vocabulary_size]
            chosen = pick(known, self._settings, numbers)
        mesh.world.broadcast(chosen, self._model.last_rank)
        for text, token in zip(texts, chosen.tolist(), strict=True):
            if text.finished:
                continue
            if token == self._limits.end_of_document:
                text.finished = True
                continue
            text.tokens.append(token)
            text.finished = len(text.generated) >= self._limits.max_new_tokens or len(text.tokens) >= self._positions
        self._report(pending)
