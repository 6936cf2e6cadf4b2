"""A SentencePiece model as a tokenizer.json of Hugging Face, which transformers loads without SentencePiece."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_SPACE = "▁"
_UNIGRAM, _BPE = 1, 2
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""Kinds of models and of pieces, as sentencepiece_model.proto numbers them."""


def as_tokenizer(content: bytes) -> "tokenizers.Tokenizer":
    """The tokenizer of a .model file. Whether it gives the same ids is for the caller to see.

    Raises ValueError for a kind of model other than BPE and unigram.
    """
    import tokenizers
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import AddedToken, decoders, models

    messages: Any = sentencepiece_model_pb2  # its classes are made at run time
    proto = messages.ModelProto.FromString(content)
    pieces = [(piece.piece, piece.score, piece.type) for piece in proto.pieces]
    unknown = proto.trainer_spec.unk_id
    fallback = proto.trainer_spec.byte_fallback
    if proto.trainer_spec.model_type == _BPE:
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
    dummy_prefix = proto.normalizer_spec.add_dummy_prefix
    _prepare(tokenizer, proto.normalizer_spec, dummy_prefix)
    last = [decoders.Strip(" ", 1, 0)] if dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece, _, kind in pieces if kind == _USER_DEFINED])
    tokenizer.add_special_tokens(
        [AddedToken(piece, normalized=False, special=True) for piece, _, kind in pieces if kind == _CONTROL]
    )
    return tokenizer


def _prepare(tokenizer: "tokenizers.Tokenizer", spec: Any, dummy_prefix: bool) -> None:
    """Normalisation, and a sign for the space."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    steps.append(normalizers.Replace(" ", _SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    if dummy_prefix:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)


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
