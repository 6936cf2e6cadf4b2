"""A .tiktoken file as a tokenizer.json of Hugging Face, which transformers loads without tiktoken."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
LETTERS = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(0x100 + number) for number, byte in enumerate(_OTHERS)}
"""Byte -> what stands for it in byte-level vocabularies (GPT-2): itself where it can be printed."""


def as_tokenizer(
    ranks: Mapping[bytes, int], pattern: str, special_tokens: Mapping[str, int]
) -> "tokenizers.Tokenizer":
    """The tokenizer of a .tiktoken file. Whether it gives the same ids is for the caller to see.

    ranks: token -> its id, which is also when it is merged. pattern: how text is cut before merging.
    """
    import tokenizers
    from tokenizers import Regex, decoders, models, pre_tokenizers

    vocabulary = {spelled(token): rank for token, rank in ranks.items()} | dict(special_tokens)
    merges = [
        pair for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1 for pair in _merge(token, ranks)
    ]
    model = models.BPE(
        vocab=vocabulary,
        merges=[(spelled(left), spelled(right)) for left, right in merges],
        # A piece that is a token is one, however its merges lie: as tiktoken has it.
        ignore_merges=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_in_other_words(pattern)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(sorted(special_tokens, key=special_tokens.__getitem__))
    return tokenizer


def spelled(token: bytes) -> str:
    """A token's bytes as byte-level vocabularies spell them."""
    return "".join(LETTERS[byte] for byte in token)


def _merge(token: bytes, ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The two tokens that become this one when only earlier ones have been merged; none if that never comes about."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        joined = [ranks.get(parts[place] + parts[place + 1]) for place in range(len(parts) - 1)]
        best = min((rank for rank in joined if rank is not None and rank < ranks[token]), default=None)
        if best is None:
            return []
        place = joined.index(best)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [(parts[0], parts[1])]


def _in_other_words(pattern: str) -> str:
    """The pattern for the library's regular expressions, in which `{1,3}+` repeats and `$` ends any line.

    Possessive repetition only saves time in these patterns: what follows could not match what it gave back.
    """
    return re.sub(r"([+*?]|\{\d+,\d+\})\+", r"\1", pattern).replace("$", r"\z")
