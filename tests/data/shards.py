"""Shards for tests, written with the project's own writer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megapipe.data.manifest import ShardManifest
from megapipe.data.shard_writer import ShardWriter

Document = Sequence[Sequence[int]]


def shard_manifest(**fields: Any) -> ShardManifest:
    """The manifest of a shard of one document of three bytes; `fields` override."""
    about = {"tokenizer": "bytes", "tokenizer_fingerprint": "sha256:1234", "vocabulary_size": 257, "dtype": "uint16"}
    counts = {"end_of_document": 256, "end_of_document_appended": True, "num_documents": 1, "num_tokens": 3}
    return ShardManifest(**{**about, **counts, **fields})


def write_shard(prefix: Path, documents: Sequence[Document], dtype: str = "<u2") -> Path:
    """Documents are lists of sequences of token ids."""
    with ShardWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add_document(document)
        writer.commit()
    return prefix


def numbered_documents(lengths: Sequence[int], first: int = 1) -> list[list[list[int]]]:
    """One sequence per document, token ids counting up through all of them; none for length 0."""
    documents, start = [], first
    for length in lengths:
        documents.append([list(range(start, start + length))] if length else [])
        start += length
    return documents


def joined(document: Document) -> list[int]:
    return [token for sequence in document for token in sequence]
