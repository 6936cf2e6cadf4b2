"""The protocol of tokenizers, and those without the Hugging Face library: one token per byte, the model files of
SentencePiece (.model), which can also be learned from texts, and those of OpenAI's tiktoken (.tiktoken).

A tokenizer of another kind of file is a class here, and an entry of `OPENERS`.
"""

import base64
import hashlib
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from megapipe.data import DataError


class Tokenizer(Protocol):
    """Converts text to token ids and back. Neither direction adds or interprets tokens for the beginning or end of a
    text."""

    spec: str
    """A name with which `open_tokenizer` opens the tokenizer: `bytes`, a path, or a path with a kind before it."""
    vocabulary_size: int
    """Every id is below this number, which is the number of embedding rows that a model needs."""
    end_of_document: int | None
    """Id of the token that ends a document; None if the vocabulary has no such token."""

    special_tokens: dict[str, int]
    """Names and ids of tokens that do not represent text, for example [MASK]."""
    fingerprint: str
    """`sha256:<hex>` of the definition. Equal fingerprints give equal ids."""

    def read_special_tokens(self, as_tokens: bool) -> None:
        """Set whether the name of a special token in a text becomes that token, or is tokenized like any other text.

        By default, tokenizers of Hugging Face read names as tokens, and all others read them as text. Raises DataError
        if the tokenizer does not support the setting.
        """

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, which must not contain lone surrogates."""

    def encode_array(self, text: str) -> np.ndarray:
        """Return the ids of a text as an integer array [number of tokens]. This uses the fast core if there is one."""
        return np.array(self.encode(text), dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids without the end of a document. Bytes that are not UTF-8 become U+FFFD."""


def fingerprint_of_files(*paths: Path, extra: str = "") -> str:
    """Return `sha256:<hex>` of the text `extra` followed by the files' bytes."""
    digest = hashlib.sha256(extra.encode())
    for path in paths:
        digest.update(path.read_bytes())
    return f"sha256:{digest.hexdigest()}"


_END_OF_DOCUMENT = 256


class ByteTokenizer:
    """Ids 0 to 255 are bytes; 256 ends a document."""

    spec = "bytes"
    vocabulary_size = 257
    end_of_document: int | None = _END_OF_DOCUMENT
    fingerprint = f"sha256:{hashlib.sha256(b'bytes, 256 ends a document').hexdigest()}"

    def __init__(self) -> None:
        self.special_tokens: dict[str, int] = {}

    def read_special_tokens(self, as_tokens: bool) -> None:
        """Do nothing, because no special token has a name."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token != _END_OF_DOCUMENT).decode("utf-8", errors="replace")


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer from a .model file. Its pieces for the beginning and end are never added to a text.

    With a model of `train_sentence_piece`, decoding restores every text, except that U+2581, SentencePiece's mark for
    a space, becomes a space; other models may normalize more.

    The end of a document is the piece named `end`, or else the model's end-of-sentence piece, if any. Raises DataError
    for a file that is not a model, and for an unknown piece.
    """

    def __init__(self, path: Path, end: str | None = None) -> None:
        import sentencepiece

        content = path.read_bytes()
        if not content:  # the library would treat it as "no model yet"
            raise DataError(f"{path} is not a SentencePiece model that can be read: it is empty")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise DataError(f"{path} is not a SentencePiece model that can be read: {error}") from error
        self.fingerprint = fingerprint_of_files(path)
        self.spec = str(path)
        self.vocabulary_size: int = self._processor.get_piece_size()
        self.unknown: int = self._processor.unk_id()
        self.end_of_document = self._find_end(end)
        self.special_tokens: dict[str, int] = {
            self._processor.id_to_piece(token): token
            for token in range(self.vocabulary_size)
            if self._processor.is_control(token) or self._processor.is_unknown(token)
        }

    def read_special_tokens(self, as_tokens: bool) -> None:
        if as_tokens:
            raise DataError(
                f"{self.spec} is a SentencePiece model, which reads the names of special "
                "tokens as text; use --special-tokens-in-text text or error"
            )

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([int(token) for token in ids if token != self.end_of_document])

    @property
    def is_bpe(self) -> bool:
        """Whether this is a BPE model. Other models split a text by the best sum of scores."""
        trainer = self.proto.trainer_spec
        return bool(trainer.model_type == trainer.BPE)

    @property
    def normalizes(self) -> bool:
        """Whether characters of a text are replaced before it is split, as by the rules nmt_nfkc."""
        return bool(self.proto.normalizer_spec.precompiled_charsmap)

    @property
    def proto(self) -> Any:
        """The content of the model file."""
        from sentencepiece import sentencepiece_model_pb2

        messages: Any = sentencepiece_model_pb2  # its classes are created at run time
        return messages.ModelProto.FromString(self._processor.serialized_model_proto())

    def scores_equal(self, one: Sequence[int], other: Sequence[int]) -> bool:
        """Return whether two ways to split a text have equal scores, up to rounding of their sums; False for BPE."""
        sums = [math.fsum(self._processor.get_score(token) for token in ids) for ids in (one, other)]
        return not self.is_bpe and math.isclose(*sums, rel_tol=1e-5)

    def _find_end(self, name: str | None) -> int | None:
        if name is None:
            end: int = self._processor.eos_id()
            return end if end >= 0 else None
        token: int = self._processor.piece_to_id(name)
        # Unknown names have the id of the unknown piece.
        if self._processor.id_to_piece(token) != name:
            raise DataError(f"{self.spec} has no piece {name!r} to end documents with; name one that it has")
        return token


def train_sentence_piece(
    texts: Iterable[str], vocabulary_size: int, special_tokens: Sequence[str], model_type: Literal["bpe", "unigram"]
) -> bytes:
    """Return a SentencePiece .model of exactly `vocabulary_size` pieces, from which decoding restores every text.

    Important settings: texts are not normalized, trimmed or prefixed; line ends are separate pieces, and sequences of
    spaces may be pieces (without these two settings, source code has over 50% more tokens); characters without a piece
    are split into bytes. Raises DataError if there is too little text for the vocabulary.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocabulary_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n"],
            control_symbols=list(special_tokens),
            max_sentence_length=2**30,
            bos_id=-1,
            pad_id=-1,
            # Fixed, because the number changes the sums of unigram training, and so the model.
            num_threads=16,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _sentence_piece_error(error, vocabulary_size) from error
    return model.getvalue()


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from filter(None, text.split("\n"))


def _sentence_piece_error(error: RuntimeError, vocabulary_size: int) -> DataError:
    """Return an error that says how to fix a wrong size. For other errors, it contains the library's message."""
    if largest := re.search(r"value <= (\d+)", str(error)):
        return too_few_texts(vocabulary_size, int(largest[1]))
    if smallest := re.search(r"required_chars. \d+ vs (\d+)", str(error)):
        return DataError(
            f"a vocabulary of {vocabulary_size} is too small for the single characters of the "
            f"input, which need {smallest[1]}; raise --vocabulary-size"
        )
    if "sentences_.empty()" in str(error):
        return DataError("the input contains no text to learn from: check --input")
    return DataError(f"SentencePiece cannot train on this input: {error}")


def too_few_texts(vocabulary_size: int, largest: int) -> DataError:
    return DataError(
        f"the input is too small for a vocabulary of {vocabulary_size}: it allows at most "
        f"{largest}; lower --vocabulary-size or add more text"
    )


OPENERS: dict[str, Callable[[Path, str | None], Tokenizer]] = {".model": SentencePieceTokenizer}
"""Opener of each file suffix. Its arguments: path, and name of the token that ends documents or None."""

END_OF_DOCUMENT = "<|endoftext|>"


class Encoding(NamedTuple):
    """Properties of an encoding that a .tiktoken file does not contain: the pattern that splits a text before merging,
    and the special tokens."""

    pattern: str
    special_tokens: dict[str, int]


_GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"""
    r"""\s+(?!\S)|\s"""
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _CONTRACTION,
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
_FILL_IN_THE_MIDDLE = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")

ENCODINGS = {
    "r50k_base": Encoding(_GPT2, {END_OF_DOCUMENT: 50256}),
    "p50k_base": Encoding(_GPT2, {END_OF_DOCUMENT: 50256}),
    "cl100k_base": Encoding(
        _CL100K,
        {END_OF_DOCUMENT: 100257, "<|endofprompt|>": 100276}
        | {name: 100258 + number for number, name in enumerate(_FILL_IN_THE_MIDDLE)},
    ),
    "o200k_base": Encoding(_O200K, {END_OF_DOCUMENT: 199999, "<|endofprompt|>": 200018}),
}
"""Encodings by the names of the files that OpenAI publishes."""


class TiktokenTokenizer:
    """A tokenizer from a .tiktoken file.

    pattern: splits a text before merging. ranks: token -> id, without special tokens.

    Raises DataError for a file in another format, and if `end` is not a special token.
    """

    def __init__(self, path: Path, spec: str, encoding: str, end: str | None = None) -> None:
        import tiktoken

        pattern, special_tokens = ENCODINGS[encoding]
        ranks = _read_ranks(path)
        if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
            raise DataError(f"{path} has no token for byte {missing[0]}: incomplete, or not a byte-level vocabulary")
        clash = set(ranks.values()) & set(special_tokens.values())
        if clash:
            raise DataError(f"{path} gives a token the id {min(clash)}, which a special token has in {encoding}")
        self.pattern = pattern
        self.ranks = ranks
        self._encoding = tiktoken.Encoding(
            encoding, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
        )
        self.fingerprint = fingerprint_of_files(path, extra=encoding)
        self.spec = spec
        self._allowed: set[str] = set()
        self.special_tokens = dict(special_tokens)
        self.vocabulary_size = self._encoding.n_vocab
        name = END_OF_DOCUMENT if end is None else end
        if name not in special_tokens:
            raise DataError(f"{spec} has no special token {name!r}; it has {', '.join(special_tokens)}")
        self.end_of_document: int | None = special_tokens[name]

    def read_special_tokens(self, as_tokens: bool) -> None:
        self._allowed = set(self.special_tokens) if as_tokens else set()

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode(text, allowed_special=self._allowed, disallowed_special=())

    def encode_array(self, text: str) -> np.ndarray:
        return self._encoding.encode_to_numpy(text, allowed_special=self._allowed, disallowed_special=())

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode([int(token) for token in ids if token != self.end_of_document])


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Return the id of each token. The library's loader is not used, because it caches files by path and would not
    notice a change."""
    try:
        lines = (line.split() for line in path.read_bytes().splitlines() if line)
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise DataError(f"{path} is not a .tiktoken file (a base64 token and its rank per line): {error}") from error


def encoding_of(path: Path) -> str:
    """Return the name of the encoding for a file name. Raises DataError if the file name is unknown."""
    if path.stem not in ENCODINGS:
        raise DataError(
            f"{path} does not say how it splits text: put its encoding before the path, for "
            f"example cl100k_base:{path}; supported are {', '.join(ENCODINGS)}"
        )
    return path.stem
