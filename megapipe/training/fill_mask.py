"""Fill in the gaps of a text with a BERT."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megapipe.config.bert import BertPretrainConfig
from megapipe.data.errors import DataError
from megapipe.data.tokenizers import Tokenizer
from megapipe.layers.context import BertContext
from megapipe.training.generation_request import PromptError, is_utf8
from megapipe.training.passes import LoadedModel

MASK, BEGIN, END = "[MASK]", "[CLS]", "[SEP]"
"""Special tokens of BERT vocabularies: for a gap, at the start of a sample, and at its end."""
CONTINUATION = "##"


class Candidate(NamedTuple):
    """A vocabulary entry for a gap, and its probability."""

    piece: str
    probability: float


class Filled(NamedTuple):
    """text: the given one with the most likely piece in each gap. gaps: the candidates of each gap, best first."""

    text: str
    gaps: list[list[Candidate]]


def encoded_gaps(text: str, tokenizer: Tokenizer, config: BertPretrainConfig) -> list[int]:
    """Return the token ids of one sample: [CLS], the text with its gaps, [SEP].

    Raises DataError for a tokenizer without the three special tokens, and PromptError for a text that has no gap,
    cannot be encoded, or is longer than the samples that the model was trained on.
    """
    special = tokenizer.special_tokens
    missing = [token for token in (BEGIN, END, MASK) if token not in special]
    if missing:
        raise DataError(
            f"{tokenizer.spec} has no {', '.join(missing)}: set --tokenizer to the vocabulary that the BERT was "
            "trained with"
        )
    pieces = text.split(MASK)
    if len(pieces) == 1:
        raise PromptError(f"{text!r} has no gap: write {MASK} where the model should fill in a token")
    if not is_utf8(text):
        raise PromptError(f"{text!r} is not UTF-8 text")
    tokens = [special[BEGIN]]
    for number, piece in enumerate(pieces):
        tokens += [special[MASK]] * (number > 0) + tokenizer.encode(piece)
    tokens.append(special[END])
    longest = config.data.sequence_length
    if len(tokens) > longest:
        raise PromptError(
            f"{text!r} has {len(tokens)} tokens with {BEGIN} and {END}, but the model was trained on samples of "
            f"{longest}: shorten it"
        )
    if max(tokens) >= config.model.vocabulary_size:
        raise PromptError(
            f"{text!r} has token {max(tokens)} but the model's vocabulary is {config.model.vocabulary_size}: set "
            "--tokenizer to the one that it was trained with"
        )
    return tokens


def fill(model: LoadedModel, tokenizer: Tokenizer, text: str, tokens: Sequence[int], num_candidates: int) -> Filled:
    """Fill the gaps of one text independently of each other.

    model: complete, on one rank. tokens: from `encoded_gaps`. num_candidates: per gap.
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
        for stage in sorted(model.layers):
            for layer in model.layers[stage]:
                outputs = layer(*outputs, context=context)
    logits = outputs[0][0, :, : tokenizer.vocabulary_size]
    gaps = (row[0] == tokenizer.special_tokens[MASK]).nonzero().flatten()
    best = logits[gaps].float().softmax(dim=-1).topk(min(num_candidates, logits.shape[1]))
    gaps_filled = [
        [Candidate(tokenizer.decode([number]), share) for number, share in zip(numbers, shares, strict=True)]
        for numbers, shares in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    parts = text.split(MASK)
    pieces = [candidates[0].piece.removeprefix(CONTINUATION) for candidates in gaps_filled]
    return Filled("".join(part + piece for part, piece in zip(parts, [*pieces, ""], strict=True)), gaps_filled)
