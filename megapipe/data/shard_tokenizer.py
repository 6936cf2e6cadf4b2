"""The copy of a tokenizer that is kept with each shard, so that the shard opens from any folder and after a move."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from megapipe.data.durable import flush_folder, write_whole
from megapipe.data.errors import DataError
from megapipe.data.hashed_file import checksum_of_file
from megapipe.data.manifest import ShardManifest
from megapipe.data.tokenizers.opening import definition_of


class StoredTokenizer(NamedTuple):
    """name: of the copy, as `open_tokenizer` takes it, with a path inside the folder. files: name -> checksum."""

    name: str
    files: dict[str, str]


def tokenizer_folder(prefix: str | Path) -> Path:
    return Path(f"{prefix}.tokenizer")


def store_tokenizer(prefix: str | Path, spec: str) -> StoredTokenizer | None:
    """Copy the files of a tokenizer to the shard `prefix`; None for a tokenizer without files."""
    definition = definition_of(spec)
    if not definition.files:
        return None
    contents = {file.name: file.read_bytes() for file in definition.files}  # they may lie in the folder
    folder = tokenizer_folder(prefix)
    shutil.rmtree(folder, ignore_errors=True)
    for file, content in contents.items():
        write_whole(folder / file, content)
    flush_folder(folder.parent)
    name = f"{definition.kind}:{definition.name}" if definition.kind else definition.name
    return StoredTokenizer(name, {file: checksum_of_file(folder / file) for file in contents})


def carry_tokenizer(manifest: ShardManifest, source: str | Path, target: str | Path) -> ShardManifest:
    """Copy the tokenizer that is kept with the shard `source` to `target`; returns the manifest for that one."""
    if manifest.tokenizer_copy is None:
        return manifest
    stored = store_tokenizer(target, tokenizer_of_shard(source, manifest))
    return replace(manifest, tokenizer_copy=stored.name if stored else None)


def tokenizer_of_shard(prefix: str | Path, manifest: ShardManifest) -> str:
    """The name by which a shard's tokenizer is opened: its copy, or for older shards the name in the manifest.

    Raises DataError for a copy that is not what was written.
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
    kind, _, name = manifest.tokenizer_copy.rpartition(":")
    path = str(folder / Path(name).name) if name else str(folder)
    return f"{kind}:{path}" if kind else path
