"""Generate text with a trained model: continue prompts with a GPT, and fill gaps with a BERT.

Prompts pass through a GPT in chunks, then each pass adds one token to every text. Prompts are split into many
micro-batches, so that pipeline ranks work at the same time. A pass of single tokens uses fewer micro-batches, so that
each has enough tokens, because a smaller micro-batch takes the same time (measured: 8 texts on two ranks with a
10-million-parameter model take 10.8 ms per token as one micro-batch and 13.3 ms as two).
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megapipe.config.bert import BertPretrainConfig
from megapipe.data import DataError
from megapipe.data.tokenizers import Tokenizer
from megapipe.inference.settings import MASK, PromptError, SamplingSettings, check_gaps
from megapipe.inference.trained_model import LoadedModel, Passes
from megapipe.layers.context import BertContext


def pick(logits: Tensor, settings: SamplingSettings, uniforms: Sequence[float]) -> Tensor:
    """Return the next token of each row, int64 [n], for logits [n, v] and one number in [0, 1) per row.

    It is the first token, by id, whose cumulative probability exceeds the row's number. Rounding in the logits changes
    the choice only if the number is within that rounding of a cumulative probability.
    """
    if settings.temperature == 0.0:
        return logits.argmax(dim=-1)
    steps = probabilities(logits, settings).cumsum(dim=-1)
    numbers = torch.tensor(uniforms, dtype=steps.dtype, device=steps.device).unsqueeze(-1)
    return torch.searchsorted(steps, numbers * steps[:, -1:], right=True).squeeze(-1)


def probabilities(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """Return the probabilities of tokens, float64 [n, v], after temperature (above 0), top-k, top-p and min-p, in this
    order."""
    scores = logits.double() / settings.temperature
    if settings.top_k is not None and settings.top_k < scores.shape[-1]:
        threshold = scores.topk(settings.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    shares = torch.softmax(scores, dim=-1)
    if settings.top_p == 1.0 and settings.min_p == 0.0:
        return shares
    if settings.top_p < 1.0:
        ranked, order = shares.sort(dim=-1, descending=True, stable=True)
        before = ranked.cumsum(dim=-1) - ranked
        # The most likely token has no token before it, so at least one token remains.
        shares = torch.zeros_like(ranked).scatter_(-1, order, ranked.masked_fill(before >= settings.top_p, 0.0))
    shares = shares.masked_fill(shares < settings.min_p * shares.amax(-1, keepdim=True), 0.0)
    return shares / shares.sum(dim=-1, keepdim=True)


def penalized(logits: Tensor, seen: Sequence[Sequence[int]], penalty: float) -> Tensor:
    """Return the logits [n, v] after the repetition penalty, for the tokens `seen` in each of the n texts."""
    if penalty == 1.0:
        return logits
    repeated = torch.zeros_like(logits, dtype=torch.bool)
    for row, tokens in enumerate(seen):
        repeated[row, torch.tensor(tokens, device=logits.device)] = True
    scores = logits.double()
    return torch.where(repeated, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def uniform(seed: int, prompt: int, sample: int, position: int) -> float:
    """Return a number in [0, 1) for one token, which depends only on these four arguments.

    prompt, sample: index of the prompt in the request, and of the sample. position: index of the token in its text.
    It is the top 53 bits of the first word of Philox 4x64 (Salmon et al. 2011), counter (0, position, sample, prompt).
    """
    counter = np.array([0, position, sample, prompt], dtype=np.uint64)
    word = int(np.random.Philox(key=np.array([seed, _DOMAIN], dtype=np.uint64), counter=counter).random_raw())
    return (word >> 11) * 2.0**-53


_DOMAIN = int.from_bytes(hashlib.blake2b(b"generation", digest_size=8).digest(), "little")
"""Key that separates these random numbers from every other use of the seed."""


CHUNK = 256
"""Maximum number of prompt tokens per pass. It limits the activations, and matrix products are still efficient."""


@dataclass
class Text:
    """A prompt and its continuation so far. prompt, sample: their indices in the request."""

    prompt: int
    sample: int
    tokens: list[int]
    num_prompt_tokens: int
    finished: bool = False
    num_cut: int = 0
    """Number of characters at the end of the decoded tokens that are not part of the text: a stop string, and what the
    last token has after it."""

    @property
    def generated(self) -> list[int]:
        """The new tokens, without an end-of-document token."""
        return self.tokens[self.num_prompt_tokens :]

    def decoded(self, tokenizer: Tokenizer) -> str:
        """Return the prompt and its continuation, which ends before a stop string."""
        whole = tokenizer.decode(self.tokens)
        return whole[: len(whole) - self.num_cut]


@dataclass(frozen=True)
class StopStrings:
    """Strings that end a text. Only the new text is searched; a string may span tokens.

    strings: of at least one character each. tokenizer: decodes the tokens.
    """

    strings: tuple[str, ...]
    tokenizer: Tokenizer


class NewText:
    """The text that follows a prompt. A token's characters are decoded with few tokens before it, so that the time per
    token does not grow with the text."""

    _CONTEXT = 6
    """Number of tokens of the prompt that are decoded with new ones: a tokenizer may treat the start of a text
    differently."""

    def __init__(self, stop: StopStrings, prompt: Sequence[int]) -> None:
        self._stop = stop
        self._tail = ""
        self._start, self._end = max(0, len(prompt) - self._CONTEXT), len(prompt)

    def num_cut(self, tokens: Sequence[int]) -> int:
        """Return the number of characters after the start of the first stop string; 0 if there is none.

        tokens: the prompt and its continuation, with one token more than in the last call.
        """
        known = self._stop.tokenizer.decode(tokens[self._start : self._end])
        text = self._tail + self._stop.tokenizer.decode(tokens[self._start :])[len(known) :]
        starts = [start for string in self._stop.strings if (start := text.find(string)) >= 0]
        # After this character, the next token may complete its bytes.
        if not text.endswith("\ufffd"):
            longest = max(len(string) for string in self._stop.strings)
            self._tail = text[max(0, len(text) + 1 - longest) :]
            self._start, self._end = self._end, len(tokens)
        return len(text) - min(starts) if starts else 0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of generated texts.

    max_new_tokens: per text, fewer if the model's positions run out. vocabulary_size: token ids at or above it are
    never chosen. end_of_document: token that ends a text. stop: strings that end a text. batch_size: number of texts
    that are generated together.
    """

    max_new_tokens: int
    vocabulary_size: int
    end_of_document: int | None = None
    stop: StopStrings | None = None
    batch_size: int = 32


def generate(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    num_samples: int,
    settings: SamplingSettings,
    limits: Limits,
    report: Callable[[int], None] = lambda num_tokens: None,
) -> list[Text]:
    """Continue each prompt `num_samples` times, and return the texts, prompt by prompt. A collective call.

    The texts are the same on every rank. Layouts sum in different orders, so tokens whose logits differ only by
    rounding may be chosen differently. `report` is called after every pass with the number of new tokens.

    Raises ValueError for an empty prompt, or one that leaves no position to generate at.
    """
    longest = model.config.model.max_positions
    for number, prompt in enumerate(prompts):
        if not 0 < len(prompt) < longest:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens; a prompt has at least 1 and at "
                f"most {longest - 1}, one less than model.max_positions"
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


@dataclass
class _Growth:
    """Extends texts token by token, in groups of the size of a pass. texts: all of them."""

    model: LoadedModel
    texts: InitVar[Sequence[Text]]
    settings: SamplingSettings
    limits: Limits
    report: Callable[[int], None]

    def __post_init__(self, texts: Sequence[Text]) -> None:
        model, limits = self.model, self.limits
        self._positions = model.config.model.max_positions
        longest = max(len(text.tokens) for text in texts)
        self._chunk = min(CHUNK, longest)
        self.num_texts = min(limits.batch_size, len(texts))
        whole_chunks = -(-longest // self._chunk) * self._chunk
        capacity = max(whole_chunks, min(longest + limits.max_new_tokens, self._positions))
        self._passes = Passes(model, self.num_texts, capacity, {self._chunk, 1})

    def run(self, texts: Sequence[Text]) -> None:
        """Generate up to `num_texts` texts completely."""
        # A pass has a fixed number of texts; rows that only fill it are computed and discarded.
        rows = [*texts, *[texts[0]] * (self.num_texts - len(texts))]
        stop = self.limits.stop
        self._new = [NewText(stop, text.tokens) for text in texts] if stop is not None and stop.strings else []
        self._extend(texts, self._read(rows))
        while not all(text.finished for text in texts):
            tokens = torch.tensor([text.tokens[-1:] for text in rows])
            positions = torch.tensor([[len(text.tokens) - 1] for text in rows])
            self._extend(texts, self._passes.run(tokens, positions, torch.zeros(len(rows), dtype=torch.int64)))

    def _read(self, rows: Sequence[Text]) -> Tensor | None:
        """Run the prompts, and return the logits [n, v] after their last tokens; None if another rank has the last
        stage."""
        ends = torch.tensor([len(text.tokens) - 1 for text in rows])
        ends_logits: Tensor | None = None
        for start in range(0, int(ends.max()) + 1, self._chunk):
            pieces = [text.tokens[start : start + self._chunk] for text in rows]
            # Shorter prompts are padded; padding does not get into caches.
            tokens = torch.tensor([piece + [0] * (self._chunk - len(piece)) for piece in pieces])
            positions = torch.arange(start, start + self._chunk).expand(len(rows), -1)
            logits = self._passes.run(tokens, positions, ends - start)
            if logits is not None:
                ends_here = (ends // self._chunk == start // self._chunk).to(logits.device).unsqueeze(1)
                ends_logits = logits if ends_logits is None else torch.where(ends_here, logits, ends_logits)
        return ends_logits

    def _extend(self, texts: Sequence[Text], logits: Tensor | None) -> None:
        """Append a token to every unfinished text, the same one on all ranks."""
        pending = sum(not text.finished for text in texts)
        mesh = self.model.mesh
        chosen = torch.zeros(len(texts), dtype=torch.int64, device=mesh.device)
        if logits is not None:
            numbers = [uniform(self.settings.seed, text.prompt, text.sample, len(text.tokens)) for text in texts]
            seen = [text.tokens for text in texts]
            scores = penalized(logits[: len(texts)], seen, self.settings.repetition_penalty)
            chosen = pick(scores[:, : self.limits.vocabulary_size], self.settings, numbers)
        mesh.world.broadcast(chosen, self.model.last_rank)
        for index, (text, token) in enumerate(zip(texts, chosen.tolist(), strict=True)):
            if text.finished:
                continue
            if token == self.limits.end_of_document:
                text.finished = True
                continue
            text.tokens.append(token)
            text.num_cut = self._new[index].num_cut(text.tokens) if self._new else 0
            full = len(text.generated) >= self.limits.max_new_tokens or len(text.tokens) >= self._positions
            text.finished = full or text.num_cut > 0
        self.report(pending)


CONTINUATION = "##"


class Ends(NamedTuple):
    """Names of special tokens: for a gap, for the start of a sample, and for its end."""

    mask: str
    begin: str
    end: str

    def missing(self, tokenizer: Tokenizer) -> list[str]:
        """Return the names that a tokenizer lacks."""
        return [name for name in (self.begin, self.end, self.mask) if name not in tokenizer.special_tokens]


BERTS, ROBERTAS = Ends(MASK, "[CLS]", "[SEP]"), Ends("<mask>", "<s>", "</s>")


class Candidate(NamedTuple):
    """A vocabulary entry for a gap, and its probability."""

    piece: str
    probability: float


class Filled(NamedTuple):
    """A filled text. text: with the most likely piece in each gap. gaps: the candidates of each gap, best first."""

    text: str
    gaps: list[list[Candidate]]


def ends_of(tokenizer: Tokenizer) -> Ends:
    """Return the names of a tokenizer's special tokens, BERT's or RoBERTa's. Raises DataError if it lacks one."""
    ends = BERTS if ROBERTAS.missing(tokenizer) else ROBERTAS
    if missing := ends.missing(tokenizer):
        raise DataError(
            f"{tokenizer.spec} has no {', '.join(missing)}: "
            "set --tokenizer to the vocabulary that the BERT was trained with"
        )
    return ends


def encoded_gaps(text: str, tokenizer: Tokenizer, config: BertPretrainConfig) -> list[int]:
    """Return the token ids of one sample: [CLS], the text with its gaps, [SEP], or RoBERTa's tokens in their place.

    Raises DataError if the tokenizer lacks a special token, and PromptError for a text that has no gap,
    cannot be encoded, or is longer than the samples that the model was trained on.
    """
    special, ends = tokenizer.special_tokens, ends_of(tokenizer)
    check_gaps(text)
    # In one call, because the token of a gap may include the space before it.
    tokens = [special[ends.begin], *tokenizer.encode(text.replace(MASK, ends.mask)), special[ends.end]]
    longest = config.data.sequence_length
    if len(tokens) > longest:
        raise PromptError(
            f"{text!r} has {len(tokens)} tokens with {ends.begin} and {ends.end}, "
            f"but the model was trained on samples of {longest}: shorten it"
        )
    if max(tokens) >= config.model.vocabulary_size:
        raise PromptError(
            f"{text!r} has token {max(tokens)} but the model's vocabulary is "
            f"{config.model.vocabulary_size}: set --tokenizer to the one it was trained with"
        )
    return tokens


def fill(model: LoadedModel, tokenizer: Tokenizer, text: str, tokens: Sequence[int], num_candidates: int) -> Filled:
    """Fill the gaps of one text independently of each other.

    model: a whole BERT on one rank. tokens: result of `encoded_gaps`. num_candidates: number per gap.
    """
    row = torch.tensor([list(tokens)], device=model.mesh.device)
    context = BertContext(
        tokens=row,
        token_types=torch.zeros_like(row),
        lengths=torch.tensor([len(tokens)], device=row.device),
        training=False,
    )
    outputs: tuple[torch.Tensor, ...] = ()
    with torch.inference_mode():
        for _, twins in model.assembly.layers():
            outputs = twins[0](*outputs, context=context)
    logits = outputs[0][0, :, : tokenizer.vocabulary_size]
    gaps = (row[0] == tokenizer.special_tokens[ends_of(tokenizer).mask]).nonzero().flatten()
    best = logits[gaps].float().softmax(dim=-1).topk(num_candidates)
    gaps_filled = [
        [Candidate(tokenizer.decode([number]), share) for number, share in zip(numbers, shares, strict=True)]
        for numbers, shares in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    filled, *parts = text.split(MASK)
    for part, candidates in zip(parts, gaps_filled, strict=True):
        piece = candidates[0].piece.removeprefix(CONTINUATION)
        # A piece of a byte-level vocabulary includes the space before its word.
        filled += piece.removeprefix(" ") + part if filled.endswith(" ") else piece + part
    return Filled(filled, gaps_filled)
