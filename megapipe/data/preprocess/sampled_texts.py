"""Texts to train a tokenizer on: all of a small input, evenly chosen documents of a large one."""

import sys
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from megapipe.data.errors import DataError
from megapipe.data.preprocess.documents import Document, read_documents
from megapipe.data.preprocess.inputs import InputFile
from megapipe.data.preprocess.parts import cut_into_parts

SAMPLE_BYTES = 100_000_000


class SampledTexts:
    """Iterates over the texts of documents, each kept with probability sample_bytes / size of the input.

    Which ones is the same in every run. Raises DataError for a document that cannot be read, unless `on_error` is
    "skip"; then it is left out, with a word on stderr. None leaves it out silently, where others will complain. After
    the iteration num_texts and num_bytes tell what was read.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        json_keys: Sequence[str],
        on_error: Literal["stop", "skip"] | None,
        sample_bytes: int = SAMPLE_BYTES,
    ) -> None:
        self._files = files
        self._keys = json_keys
        self._on_error = on_error
        self._share = sample_bytes / max(1, sum(file.size for file in files))
        self.num_texts = self.num_bytes = 0

    def __iter__(self) -> Iterator[str]:
        self.num_texts = self.num_bytes = 0
        chance = np.random.Generator(np.random.Philox(0))
        for part in cut_into_parts(self._files):
            for piece in part.pieces:
                try:
                    for document in read_documents(piece, self._keys):
                        if chance.random() < self._share:
                            yield from self._texts(document)
                except DataError as error:
                    self._leave_out(error)

    def _texts(self, document: Document) -> list[str]:
        try:
            texts = document.texts(self._keys)
        except DataError as error:
            self._leave_out(error)
            return []
        self.num_texts += len(texts)
        self.num_bytes += sum(len(text.encode()) for text in texts)
        return texts

    def _leave_out(self, error: DataError) -> None:
        if self._on_error == "stop":
            raise error
        if self._on_error == "skip":
            print(f"skipped: {error}", file=sys.stderr)
