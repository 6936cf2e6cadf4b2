"""The manifest beside a shard: what the .bin/.idx format does not say, tokenizer and vocabulary above all."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megapipe.data.errors import DataError
from megapipe.data.indexed_dataset import IndexedDataset

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ShardManifest:
    """Describes one shard. A shard of another tool has none; then nothing can be checked."""

    tokenizer: str
    """The tokenizer as the user named it: `bytes` or a path."""
    tokenizer_fingerprint: str
    """Hash of the tokenizer's definition; two tokenizers with one fingerprint give the same ids."""
    vocabulary_size: int
    """Every token id is below this."""
    end_of_document: int | None
    """Token id that ends a document, None when the tokenizer has none."""
    end_of_document_appended: bool
    """Whether every non-empty document ends with that token."""
    dtype: str
    """Token type of the .bin file, for example uint16."""
    num_documents: int
    num_tokens: int

    def to_json(self) -> str:
        return json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, indent=2) + "\n"

    def check_vocabulary(self, vocabulary_size: int) -> None:
        """Raises DataError when the shard may hold ids that a model with this many embeddings does not know."""
        if self.vocabulary_size > vocabulary_size:
            raise DataError(
                f"the shard was tokenized with {self.tokenizer} of {self.vocabulary_size} ids, but the model's "
                f"vocabulary_size is {vocabulary_size}; set it to at least {self.vocabulary_size}"
            )

    def check_tokenizer(self, tokenizer: str, fingerprint: str) -> None:
        """Raises DataError when a tokenizer (its name and fingerprint) is not the one that wrote the shard."""
        if fingerprint != self.tokenizer_fingerprint:
            raise DataError(
                f"the shard was tokenized with {self.tokenizer} ({self.tokenizer_fingerprint[:19]}...), not with "
                f"{tokenizer} ({fingerprint[:19]}...): name the shard's tokenizer or preprocess again with this one"
            )

    def check_shard(self, dataset: IndexedDataset) -> None:
        """Raises DataError when the manifest lies beside a shard that it does not describe."""
        described = (self.dtype, self.num_documents, self.num_tokens)
        found = (dataset.dtype.name, dataset.num_documents, dataset.num_tokens)
        if described != found:
            raise DataError(
                f"{manifest_path(dataset.prefix)} describes another shard (dtype, documents, tokens: {described}, "
                f"found {found}); remove it or copy the right one"
            )


def manifest_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.manifest.json")


def read_manifest(prefix: str | Path) -> ShardManifest | None:
    """The manifest of a shard, None where there is none. Raises DataError for a damaged or newer one."""
    path = manifest_path(prefix)
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text("utf-8"))
        version = content.pop("format_version")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(_damaged(path, error)) from error
    if version != FORMAT_VERSION:
        raise DataError(f"{path} has format version {version}; this program knows version {FORMAT_VERSION}")
    try:
        return ShardManifest(**content)
    except TypeError as error:
        raise DataError(_damaged(path, error)) from error


def _damaged(path: Path, error: Exception) -> str:
    return f"{path} is damaged ({error!r}); preprocess again, or remove it to go without its checks"
