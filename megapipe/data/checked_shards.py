"""Shards that a run may use: described by their manifests, of one tokenizer, within the model's vocabulary."""

import errno
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megapipe.data.errors import DataError
from megapipe.data.indexed_dataset import IndexedDataset
from megapipe.data.manifest import ShardManifest, read_manifest


def open_shards(
    prefixes: Sequence[str | Path], vocabulary_size: int | None
) -> tuple[list[IndexedDataset], list[ShardManifest]]:
    """Open shards, and return them with the manifests of those that have one.

    Raises DataError for unusable shards, different tokenizers, and one whose vocabulary exceeds `vocabulary_size`.
    """
    shards = [_open(prefix) for prefix in prefixes]
    manifests: list[ShardManifest] = []
    for shard in shards:
        manifest = read_manifest(shard.prefix)
        if manifest is not None:
            manifest.check_shard(shard)
            if vocabulary_size is not None:
                manifest.check_vocabulary(vocabulary_size)
            manifests.append(manifest)
    check_one_tokenizer(manifests)
    return shards, manifests


def _open(prefix: str | Path) -> IndexedDataset:
    try:
        return IndexedDataset(prefix)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise DataError(
            f"{prefix} cannot be opened: this process has reached its limit of open files, and each shard needs two; "
            "raise the limit with ulimit -n before the start, or merge shards"
        ) from error


def check_one_tokenizer(manifests: Sequence[ShardManifest]) -> None:
    """Raise DataError when two shards were written with different tokenizers."""
    for manifest in manifests[1:]:
        manifest.check_tokenizer(manifests[0].tokenizer, manifests[0].tokenizer_fingerprint)


def unknown_id(tokens: np.ndarray, vocabulary_size: int | None) -> int | None:
    """Return the index of the first token outside [0, vocabulary_size); None if there is none or the size is None."""
    if vocabulary_size is None or not tokens.size or (tokens.max() < vocabulary_size and tokens.min() >= 0):
        return None
    return int(np.argmax((tokens >= vocabulary_size) | (tokens < 0)))


def outside_vocabulary(shard: IndexedDataset, position: int, vocabulary_size: int | None) -> DataError:
    """Return the error for the shard's token at `position`."""
    return DataError(
        f"token {position} of {shard.prefix}.bin is {shard.tokens[position]}, outside the model's vocabulary of "
        f"{vocabulary_size}: raise vocabulary_size or preprocess with the model's tokenizer"
    )
