"""The manifest and the tokenizer of a shard, which the .bin/.idx format does not contain, and checks of both."""

import errno
import json
import reprlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from megapipe.config.files import flush_folder, is_of_type, read_json, write_whole
from megapipe.data import DataError
from megapipe.data.files import checksum_of_file
from megapipe.data.shards import FloatTokens, IndexedDataset, bin_path, first_outside, idx_path
from megapipe.data.tokenizers import definition_of, kind_and_path

FORMAT_VERSION = 1
_REPAIR = "preprocess again, or remove it to use the shard without the manifest's checks"


@dataclass(frozen=True, kw_only=True)
class ShardManifest:
    """Description of one shard. Shards from other tools have no manifest, so they cannot be checked."""

    tokenizer: str
    """The tokenizer as the user named it: `bytes` or a path."""
    tokenizer_fingerprint: str
    """Hash of the tokenizer's definition; two tokenizers with the same fingerprint give the same ids."""
    vocabulary_size: int
    """Every token id is below this number."""
    end_of_document: int | None
    """Token id that ends a document; None if the tokenizer has no such token."""
    end_of_document_appended: bool
    """Whether every non-empty document ends with that token."""
    dtype: str
    """Token type of the .bin file, for example uint16."""
    num_documents: int
    num_tokens: int
    num_sequences: int | None = None
    """Number of sentences if documents were split, else of non-empty documents. In this and all later fields, None may
    also mean unknown."""
    special_tokens: dict[str, int] | None = None
    """Names and ids of the tokenizer's special tokens, for example [MASK]."""
    sentences: str | None = None
    """Name of the sentence splitter; None if each document is one sequence."""
    num_skipped: int | None = None
    """Number of documents that were skipped because they could not be read."""
    num_duplicates: int | None = None
    """Number of documents that were removed because an earlier one was equal; None if duplicates were kept."""
    sources: dict[str, Any] | None = None
    """Number, total bytes and one checksum of the input files, and a list of up to LISTED_SOURCES of them."""
    tokenizer_copy: str | None = None
    """Name of the tokenizer's copy in `<prefix>.tokenizer`; None if the tokenizer has no files."""
    tokenizer_files: dict[str, str] | None = None
    """Checksum of each file of that copy, by file name."""
    num_special_tokens_in_text: int | None = None
    """Number of names of special tokens in the text of documents; None if they were not counted."""
    special_tokens_in_text: str | None = None
    """How these names were tokenized: `text` (like other text), `token` (as special tokens) or `error` (refused)."""
    bin_checksum: str | None = None
    """Checksum of the .bin file, `xxh128:<hex>`, as xxh128sum computes it."""
    idx_checksum: str | None = None

    def to_json(self) -> str:
        return json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, indent=2) + "\n"

    def check_vocabulary(self, vocabulary_size: int) -> None:
        """Raise DataError if the shard may contain ids that a model with this number of embeddings does not have."""
        if self.vocabulary_size > vocabulary_size:
            raise DataError(
                f"the shard was tokenized with {self.tokenizer} of {self.vocabulary_size} ids, but the model's "
                f"vocabulary_size is {vocabulary_size}; set it to at least {self.vocabulary_size}"
            )

    def check_tokenizer(self, tokenizer: str, fingerprint: str) -> None:
        """Raise DataError if a tokenizer (its name and fingerprint) is not the one that wrote the shard."""
        if fingerprint != self.tokenizer_fingerprint:
            raise DataError(
                f"the shard was tokenized with {self.tokenizer} ({self.tokenizer_fingerprint[:19]}...), not with "
                f"{tokenizer} ({fingerprint[:19]}...): name the shard's tokenizer or preprocess again with this one"
            )

    def check_checksums(self, prefix: str | Path) -> None:
        """Read both files, and raise DataError if a checksum differs."""
        for path, written in ((bin_path(prefix), self.bin_checksum), (idx_path(prefix), self.idx_checksum)):
            if written is not None and (checksum := checksum_of_file(path)) != written:
                raise DataError(
                    f"{path} is damaged: its checksum is {checksum}, but {written} was "
                    "written; copy it again or preprocess again"
                )

    def check_shard(self, dataset: IndexedDataset) -> None:
        """Raise DataError if the manifest does not describe this shard."""
        described = (self.dtype, self.num_documents, self.num_tokens)
        actual = (dataset.dtype.name, dataset.num_documents, dataset.num_tokens)
        if described != actual:
            raise DataError(
                f"{manifest_path(dataset.prefix)} describes another shard (dtype, documents, "
                f"tokens: {described}, not {actual}); remove it or copy the correct one"
            )


def manifest_path(prefix: str | Path) -> Path:
    """Return the path of the manifest of the shard `prefix`."""
    return Path(f"{prefix}.manifest.json")


def read_manifest(prefix: str | Path) -> ShardManifest | None:
    """Return the manifest of a shard, or None. Raises DataError for a damaged manifest or another format version."""
    path = manifest_path(prefix)
    if not path.is_file():
        return None
    content = read_json(path, lambda message: DataError(f"{message}; {_REPAIR}"))
    if not isinstance(content, dict) or "format_version" not in content:
        raise DataError(_damaged(path, "it has no format_version"))
    version = content.pop("format_version")
    if version != FORMAT_VERSION:
        raise DataError(f"{path} has format version {version}; only version {FORMAT_VERSION} can be read; {_REPAIR}")
    for name, declared in get_type_hints(ShardManifest).items():
        if name in content and not is_of_type(content[name], declared):
            raise DataError(_damaged(path, f"its {name} is {reprlib.repr(content[name])}"))
    try:
        return ShardManifest(**content)
    except TypeError as error:
        raise DataError(_damaged(path, str(error))) from error


def _damaged(path: Path, problem: str) -> str:
    return f"{path} is damaged: {problem}; {_REPAIR}"


def open_shard(
    prefix: str | Path, vocabulary_size: int | None = None, float_tokens: FloatTokens | None = None
) -> tuple[IndexedDataset, ShardManifest | None]:
    """Open a shard, and return it and its manifest, or None if it has none. float_tokens: see `IndexedDataset`.

    Raises DataError for an unusable shard, and for a vocabulary larger than `vocabulary_size`.
    """
    try:
        shard = IndexedDataset(prefix, float_tokens)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise DataError(
            f"{prefix} cannot be opened: this process has reached its limit of open files, "
            "and each shard needs two; raise it with ulimit -n, or merge shards"
        ) from error
    manifest = read_manifest(prefix)
    if manifest is not None:
        manifest.check_shard(shard)
        if vocabulary_size is not None:
            manifest.check_vocabulary(vocabulary_size)
    return shard, manifest


def check_one_tokenizer(manifests: Iterable[ShardManifest | None]) -> None:
    """Raise DataError if two shards were written with different tokenizers. None: a shard without a manifest."""
    present = [manifest for manifest in manifests if manifest is not None]
    for manifest in present[1:]:
        manifest.check_tokenizer(present[0].tokenizer, present[0].tokenizer_fingerprint)


def checked_window(shard: IndexedDataset, begin: int, end: int, vocabulary_size: int | None) -> np.ndarray:
    """Return tokens [begin, end) of a shard, in its dtype.

    Raises DataError for the first token outside [0, vocabulary_size); a size of None allows every id.
    """
    tokens = shard.window(begin, end)
    if vocabulary_size is not None and (place := first_outside(tokens, vocabulary_size)) is not None:
        raise DataError(
            f"token {begin + place} of {shard.prefix}.bin is {tokens[place]}, outside the model's vocabulary of "
            f"{vocabulary_size}: raise vocabulary_size or preprocess with the model's tokenizer"
        )
    return tokens


_NO_COPY: dict[str, Any] = {"tokenizer_copy": None, "tokenizer_files": None}


def tokenizer_folder(prefix: str | Path) -> Path:
    """Return the folder of the tokenizer's copy for the shard `prefix`."""
    return Path(f"{prefix}.tokenizer")


def store_tokenizer(prefix: str | Path, spec: str) -> dict[str, Any]:
    """Copy the files of a tokenizer to the shard `prefix`; return the fields of the manifest about the copy, which are
    None for a tokenizer without files."""
    definition = definition_of(spec)
    if not definition.files:
        return _NO_COPY
    contents = {file.name: file.read_bytes() for file in definition.files}
    folder = tokenizer_folder(prefix)
    for file, content in contents.items():
        write_whole(folder / file, content)
    # Remove other files last, because they may be the source of the copy: a crash must not lose them.
    for other in folder.iterdir():
        if other.name not in contents:
            other.unlink()
    flush_folder(folder.parent)
    name = f"{definition.kind}:{definition.name}" if definition.kind else definition.name
    files = {file: checksum_of_file(folder / file) for file in contents}
    return {"tokenizer_copy": name, "tokenizer_files": files}


def copy_tokenizer(manifest: ShardManifest, source: str | Path, target: str | Path) -> ShardManifest:
    """Copy the tokenizer that is stored with the shard `source` to `target`, and return the manifest for `target`.

    If the copy was removed, the new shard has no copy either. Its manifest contains only the path of the tokenizer.
    """
    if manifest.tokenizer_copy is None or not tokenizer_folder(source).is_dir():
        return replace(manifest, **_NO_COPY)
    return replace(manifest, **store_tokenizer(target, tokenizer_of_shard(source, manifest)))


def tokenizer_of_shard(prefix: str | Path, manifest: ShardManifest) -> str:
    """Return the name that opens a shard's tokenizer: its copy, or the name in the manifest if there is no copy.

    Raises DataError if the copy has changed since it was written.
    """
    folder = tokenizer_folder(prefix)
    if manifest.tokenizer_copy is None or not folder.is_dir():
        return manifest.tokenizer
    for name, checksum in (manifest.tokenizer_files or {}).items():
        file = folder / Path(name).name
        if not file.is_file() or checksum_of_file(file) != checksum:
            problem = "is missing" if not file.is_file() else "was changed since it was written"
            raise DataError(
                f"{file} {problem}: copy {folder} again, or remove that folder to use {manifest.tokenizer} instead"
            )
    kind, file = kind_and_path(manifest.tokenizer_copy)
    path = folder / file.name
    return f"{kind}:{path}" if kind else str(path)
