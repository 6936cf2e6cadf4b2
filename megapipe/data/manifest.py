"""The manifest beside a shard: what the .bin/.idx format does not say, tokenizer and vocabulary above all."""

import json
import reprlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from megapipe.config import untrusted
from megapipe.data.errors import DataError
from megapipe.data.hashed_file import checksum_of_file
from megapipe.data.indexed_dataset import IndexedDataset
from megapipe.data.shard_format import bin_path, idx_path

FORMAT_VERSION = 1
_REPAIR = "preprocess again, or remove it to use the shard without the manifest's checks"


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
    num_sequences: int | None = None
    """Sentences where documents were split, else non-empty documents. This and what follows: None where unknown."""
    special_tokens: dict[str, int] | None = None
    """Names and ids of the tokenizer's special tokens, for example [MASK]."""
    sentences: str | None = None
    """What split documents into sentences, one sequence each; None where a document is one sequence."""
    num_skipped: int | None = None
    """Documents left out because they could not be read."""
    num_duplicates: int | None = None
    """Documents left out because an equal one came before; None where duplicates were kept."""
    sources: dict[str, Any] | None = None
    """Number, bytes and one checksum of the input files, and up to LISTED_SOURCES of them by name."""
    tokenizer_copy: str | None = None
    """Name of the tokenizer's copy in `<prefix>.tokenizer`; None where the tokenizer has no files."""
    tokenizer_files: dict[str, str] | None = None
    """File of that copy -> its checksum."""
    num_special_tokens_in_text: int | None = None
    """Number of names of special tokens in the text of documents; None if they were not counted."""
    special_tokens_in_text: str | None = None
    """How they were tokenized: `text` (like any other text), `token` (as the special token) or `error` (refused)."""
    bin_checksum: str | None = None
    """`xxh128:<hex>` of the .bin file, as xxh128sum computes it."""
    idx_checksum: str | None = None

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

    def check_checksums(self, prefix: str | Path) -> None:
        """Reads both files. Raises DataError when one is not what was written."""
        for path, written in ((bin_path(prefix), self.bin_checksum), (idx_path(prefix), self.idx_checksum)):
            if written is not None and (found := checksum_of_file(path)) != written:
                raise DataError(
                    f"{path} is damaged: its checksum is {found}, but {written} was written; copy it again or "
                    "preprocess again"
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
    """Return the path of the manifest of the shard `prefix`."""
    return Path(f"{prefix}.manifest.json")


def read_manifest(prefix: str | Path) -> ShardManifest | None:
    """The manifest of a shard, None where there is none. Raises DataError for a damaged or newer one."""
    path = manifest_path(prefix)
    if not path.is_file():
        return None
    content = untrusted.read_json(path, lambda message: DataError(f"{message}; {_REPAIR}"))
    if not isinstance(content, dict) or "format_version" not in content:
        raise DataError(_damaged(path, "it has no format_version"))
    version = content.pop("format_version")
    if version != FORMAT_VERSION:
        raise DataError(f"{path} has format version {version}; only version {FORMAT_VERSION} can be read; {_REPAIR}")
    for name, declared in get_type_hints(ShardManifest).items():
        if name in content and not untrusted.is_of_type(content[name], declared):
            raise DataError(_damaged(path, f"its {name} is {reprlib.repr(content[name])}"))
    try:
        return ShardManifest(**content)
    except TypeError as error:
        raise DataError(_damaged(path, str(error))) from error


def _damaged(path: Path, problem: str) -> str:
    return f"{path} is damaged: {problem}; {_REPAIR}"
