"""What a BERT would put in the gaps of a text."""

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
"""What stands for a gap, before a sample and behind it, as BERT's vocabularies name them."""
CONTINUATION = "##"


class Candidate(NamedTuple):
    """A piece of the vocabulary for a gap, and the probability that the model gives to it."""

    piece: str
    probability: float


class Filled(NamedTuple):
    """gaps: the likeliest pieces of each gap, best first. text: the given one with the best of each in its gap."""

    text: str
    gaps: list[list[Candidate]]


def encoded_gaps(text: str, tokenizer: Tokenizer, config: BertPretrainConfig) -> list[int]:
    """Token ids of one sample: [CLS], the text with its gaps, [SEP].

    Raises DataError for a tokenizer without the three special tokens, and PromptError for a text without a gap, one
    that cannot be encoded, and one longer than the samples that the model was trained on.
    """
    special = tokenizer.special_tokens
    missing = [token for token in (BEGIN, END, MASK) if token not in special]
    if missing:
        raise DataError(
            f"{tokenizer.spec} has no {', '.join(missing)}: name the vocabulary that the BERT was trained on"
        )
    pieces = text.split(MASK)
    if len(pieces) == 1:
        raise PromptError(f"{text!r} has no gap: write {MASK} where the model is to fill one in")
    if not is_utf8(text):
        raise PromptError(f"{text!r} is not UTF-8 text")
    tokens = [special[BEGIN]]
    for number, piece in enumerate(pieces):
        tokens += [special[MASK]] * (number > 0) + tokenizer.encode(piece)
    tokens.append(special[END])
    longest = config.data.sequence_length
    if len(tokens) > longest:
        raise PromptError(
            f"{text!r} has {len(tokens)} tokens with {BEGIN} and {END}, more than the {longest} of a sample that the "
            "model was trained on: shorten it"
        )
    if max(tokens) >= config.model.vocabulary_size:
        raise PromptError(
            f"{text!r} has token {max(tokens)} but the model knows {config.model.vocabulary_size}: name the tokenizer "
            "that it was trained with"
        )
    return tokens


def fill(model: LoadedModel, tokenizer: Tokenizer, text: str, tokens: Sequence[int], num_candidates: int) -> Filled:
    """Fill the gaps of one text, each by itself; the best pieces of two gaps need not go together.

    model: whole, on one rank. tokens: of `encoded_gaps`. num_candidates: of each gap.
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
    found = [
        [Candidate(tokenizer.decode([number]), share) for number, share in zip(numbers, shares, strict=True)]
        for numbers, shares in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    parts = text.split(MASK)
    pieces = [candidates[0].piece.removeprefix(CONTINUATION) for candidates in found]
    return Filled("".join(part + piece for part, piece in zip(parts, [*pieces, ""], strict=True)), found)
