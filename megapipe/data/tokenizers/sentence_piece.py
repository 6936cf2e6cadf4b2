"""SentencePiece models (BPE and unigram) in their own .model files."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megapipe.data.errors import DataError
from megapipe.data.tokenizers.protocol import fingerprint_of_files


class SentencePieceTokenizer:
    """A .model file. Its beginning and end pieces are never added to a text.

    Every text comes back whole from a model trained by `train_sentence_piece`, except that U+2581, which SentencePiece
    uses for the space, comes back as a space; other models may normalise more.

    The end of a document is the piece named by `end`, else the model's end-of-sentence piece, if any. Raises DataError
    for a file that is no model and for an unknown piece.
    """

    def __init__(self, path: Path, end: str | None = None) -> None:
        import sentencepiece

        content = path.read_bytes()
        if not content:  # the library takes it for "no model yet"
            raise DataError(f"{path} is not a SentencePiece model that can be read: it is empty")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise DataError(f"{path} is not a SentencePiece model that can be read: {error}") from error
        self._fingerprint = fingerprint_of_files(path)
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
                f"{self.spec} is a SentencePiece model, which reads the names of special tokens as text; use "
                "--special-tokens-in-text text or error"
            )

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        return ids

    def encode_array(self, text: str) -> np.ndarray:
        return np.array(self.encode(text), dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._processor.decode([int(token) for token in ids if token != self.end_of_document])
        return text

    @property
    def is_bpe(self) -> bool:
        """True for a BPE model; other models split a text by the best sum of scores."""
        from sentencepiece import sentencepiece_model_pb2

        messages: Any = sentencepiece_model_pb2  # its classes are created at run time
        proto = messages.ModelProto.FromString(self._processor.serialized_model_proto())
        return bool(proto.trainer_spec.model_type == proto.trainer_spec.BPE)

    def scores_equal(self, one: Sequence[int], other: Sequence[int]) -> bool:
        """Return whether two ways to split a text have equal scores, up to rounding of their sums; never for BPE."""
        sums = [math.fsum(self._processor.get_score(token) for token in ids) for ids in (one, other)]
        return not self.is_bpe and math.isclose(*sums, rel_tol=1e-5)

    def fingerprint(self) -> str:
        return self._fingerprint

    def _find_end(self, name: str | None) -> int | None:
        if name is None:
            end: int = self._processor.eos_id()
            return end if end >= 0 else None
        token: int = self._processor.piece_to_id(name)
        if self._processor.id_to_piece(token) != name:  # unknown pieces have the unknown piece's id
            raise DataError(f"{self.spec} has no piece {name!r} to end documents with; name one that it has")
        return token
