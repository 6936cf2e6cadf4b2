"""The copy of a tokenizer that is stored with each shard, so that it opens from any folder and after a move."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from megapipe.data.durable import flush_folder, write_whole
from megapipe.data.errors import DataError
from megapipe.data.hashed_file import checksum_of_file
from megapipe.data.manifest import ShardManifest
from megapipe.data.tokenizers.opening import definition_of, kind_and_path


class StoredTokenizer(NamedTuple):
    """name: of the copy, as `open_tokenizer` takes it, but relative to the folder. files: name -> checksum."""

    name: str
    files: dict[str, str]


def tokenizer_folder(prefix: str | Path) -> Path:
    """Return the folder of the tokenizer's copy that belongs to the shard `prefix`."""
    return Path(f"{prefix}.tokenizer")


def store_tokenizer(prefix: str | Path, spec: str) -> StoredTokenizer | None:
    """Copy the files of a tokenizer to the shard `prefix`; None for a tokenizer without files."""
    definition = definition_of(spec)
    if not definition.files:
        return None
    contents = {file.name: file.read_bytes() for file in definition.files}
    folder = tokenizer_folder(prefix)
    for file, content in contents.items():
        write_whole(folder / file, content)
    # Only now, because these may be the files that were copied: a crash never loses them.
    for other in folder.iterdir():
        if other.name not in contents:
            other.unlink()
    flush_folder(folder.parent)
    name = f"{definition.kind}:{definition.name}" if definition.kind else definition.name
    return StoredTokenizer(name, {file: checksum_of_file(folder / file) for file in contents})


def carry_tokenizer(manifest: ShardManifest, source: str | Path, target: str | Path) -> ShardManifest:
    """Copy the tokenizer that is stored with the shard `source` to `target`, and return the manifest for `target`.

    Where the copy was removed, the new shard has none either: its manifest names the tokenizer by its path alone.
    """
    if manifest.tokenizer_copy is None:
        return manifest
    if not tokenizer_folder(source).is_dir():
        return replace(manifest, tokenizer_copy=None, tokenizer_files=None)
    stored = store_tokenizer(target, tokenizer_of_shard(source, manifest))
    return replace(
        manifest,
        tokenizer_copy=stored.name if stored else None,
        tokenizer_files=stored.files if stored else None,
    )


def tokenizer_of_shard(prefix: str | Path, manifest: ShardManifest) -> str:
    """Return the name that opens a shard's tokenizer: its copy, or for older shards the name in the manifest.

    Raises DataError for a copy that has changed since it was written.
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
