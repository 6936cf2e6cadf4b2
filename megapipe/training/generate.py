"""Generation: prompts pass through the model in chunks, then every text grows by a token a pass.

Prompts pass as many micro-batches, so that pipeline ranks work at the same time. A pass of single tokens has no more
of them than have enough tokens each: below that a second micro-batch costs as much as the first (measured: 8 texts on
two ranks with a 10-million-parameter model take 10.8 ms a token as one micro-batch and 13.3 ms as two).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.training.passes import LoadedModel, Passes
from megapipe.training.sampling import SamplingSettings, pick, uniform

CHUNK = 256
"""Most tokens of a prompt in one pass: bounds the activations, and is enough to keep matrix units busy."""


@dataclass
class Text:
    """A prompt and what has been generated behind it. prompt, sample: its numbers in the request."""

    prompt: int
    sample: int
    tokens: list[int]
    num_prompt_tokens: int
    finished: bool = False

    @property
    def generated(self) -> list[int]:
        """The new tokens, without an end of document."""
        return self.tokens[self.num_prompt_tokens :]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Where texts end.

    max_new_tokens: behind each prompt, fewer where the model's positions run out. vocabulary_size: tokens from here
    on are never picked. end_of_document: token that ends a text. batch_size: texts that grow together.
    """

    max_new_tokens: int
    vocabulary_size: int
    end_of_document: int | None = None
    batch_size: int = 32


def generate(
    model: LoadedModel, prompts: Sequence[Sequence[int]], num_samples: int, settings: SamplingSettings, limits: Limits
) -> list[Text]:
    """`num_samples` texts behind each prompt, prompt by prompt: the same ones on every rank and layout.

    Another layout adds in another order, so logits a rounding apart may rank differently there. A collective call.
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
    growth = _Growth(model, texts, settings, limits)
    for first in range(0, len(texts), growth.num_texts):
        growth.run(texts[first : first + growth.num_texts])
    return texts


class _Growth:
    """Grows texts, as many at once as one pass holds."""

    def __init__(self, model: LoadedModel, texts: Sequence[Text], settings: SamplingSettings, limits: Limits) -> None:
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
        """Grow up to `num_texts` texts to their ends."""
        # A pass has a fixed number of texts; what fills it up is computed and forgotten.
        rows = [*texts, *[texts[0]] * (self.num_texts - len(texts))]
        self._extend(texts, self._read(rows))
        while not all(text.finished for text in texts):
            tokens = torch.tensor([text.tokens[-1:] for text in rows])
            positions = torch.tensor([[len(text.tokens) - 1] for text in rows])
            self._extend(texts, self._passes.run(tokens, positions, torch.zeros(len(rows), dtype=torch.int64)))

    def _read(self, rows: Sequence[Text]) -> Tensor | None:
        """Pass the prompts, and return the logits [n, v] behind each one's last token where the last stage is."""
        ends = torch.tensor([len(text.tokens) - 1 for text in rows])
        found: Tensor | None = None
        for start in range(0, int(ends.max()) + 1, self._chunk):
            pieces = [text.tokens[start : start + self._chunk] for text in rows]
            # Shorter prompts are padded: nothing attends to a padded position before a token has taken it over.
            tokens = torch.tensor([piece + [0] * (self._chunk - len(piece)) for piece in pieces])
            positions = torch.arange(start, start + self._chunk).expand(len(rows), -1)
            logits = self._passes.run(tokens, positions, (ends - start).clamp(0, self._chunk - 1))
            if logits is not None:
                ends_here = (ends // self._chunk == start // self._chunk).to(logits.device).unsqueeze(1)
                found = logits if found is None else torch.where(ends_here, logits, found)
        return found

    def _extend(self, texts: Sequence[Text], logits: Tensor | None) -> None:
        """Append a token to every text that is not finished, agreed by all ranks."""
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
