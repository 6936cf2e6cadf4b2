"""A SentencePiece model as a tokenizer.json of Hugging Face, which transformers loads without SentencePiece."""

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_SPACE = "▁"
_UNIGRAM, _BPE = 1, 2
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""Kinds of models and of pieces, as sentencepiece_model.proto numbers them."""


def as_tokenizer(content: bytes) -> "tokenizers.Tokenizer":
    """Return the tokenizer of a .model file, with the same ids.

    Unigram models may differ where two ways to split a text have equal scores, since SentencePiece sums them in 32
    bits and the tokenizers library in 64. Raises ValueError for a model that the library cannot follow exactly.
    """
    import tokenizers
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import AddedToken, decoders, models

    messages: Any = sentencepiece_model_pb2  # its classes are made at run time
    proto = messages.ModelProto.FromString(content)
    pieces = [(piece.piece, piece.score, piece.type) for piece in proto.pieces]
    unknown = proto.trainer_spec.unk_id
    fallback = proto.trainer_spec.byte_fallback
    user_defined = [piece for piece, _, kind in pieces if kind == _USER_DEFINED]
    is_bpe = proto.trainer_spec.model_type == _BPE
    if proto.normalizer_spec.precompiled_charsmap:
        name = proto.normalizer_spec.name or "its own rules"
        raise ValueError(f"its normalization ({name}) differs in transformers where accents combine")
    if proto.trainer_spec.treat_whitespace_as_suffix:
        raise ValueError("it puts the mark of a space at the end of words")
    if is_bpe and any(len(piece) > 1 for piece in user_defined):
        raise ValueError("it has user-defined symbols of several characters")
    if is_bpe:
        model: Any = models.BPE(
            vocab={piece: number for number, (piece, _, _) in enumerate(pieces)},
            merges=_merges(pieces),
            unk_token=pieces[unknown][0],
            fuse_unk=True,
            byte_fallback=fallback,
        )
    elif proto.trainer_spec.model_type == _UNIGRAM:
        model = models.Unigram([(piece, score) for piece, score, _ in pieces], unk_id=unknown, byte_fallback=fallback)
    else:
        raise ValueError("it is neither BPE nor unigram")
    tokenizer = tokenizers.Tokenizer(model)
    _prepare(tokenizer, proto.normalizer_spec, user_defined)
    last = [decoders.Strip(" ", 1, 0)] if proto.normalizer_spec.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    tokenizer.add_special_tokens(
        [AddedToken(piece, normalized=False, special=True) for piece, _, kind in pieces if kind == _CONTROL]
    )
    return tokenizer


def _prepare(tokenizer: "tokenizers.Tokenizer", spec: Any, user_defined: list[str]) -> None:
    """Set how text is normalized, and split it at user-defined symbols."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    steps: list[Any] = []
    if spec.remove_extra_whitespaces:
        # SentencePiece treats its own mark as a space only at the end of a text.
        steps += [normalizers.Replace(Regex(r"\A +|[ ▁]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        # Metaspace would add no prefix to a text that starts with a space.
        steps.append(normalizers.Prepend(_SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    if user_defined:
        # Not by added tokens: each piece of text between them would get its own prefix.
        longest_first = sorted(user_defined, key=len, reverse=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated")


def _merges(pieces: list[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a third, the best of these first: what SentencePiece tries at each place."""
    ranks = {piece: number for number, (piece, _, kind) in enumerate(pieces) if kind == _NORMAL}
    found = []
    for piece, score, kind in pieces:
        if kind != _NORMAL:
            continue
        pairs = [
            (piece[:cut], piece[cut:]) for cut in range(1, len(piece)) if piece[:cut] in ranks and piece[cut:] in ranks
        ]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        found += [(score, pair) for pair in pairs]
    found.sort(key=lambda entry: -entry[0])
    return [pair for _, pair in found]
