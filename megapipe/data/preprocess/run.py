"""The whole of preprocessing: inputs to one finished shard, with its manifest, per field."""

import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from pathlib import Path

from megapipe.data.errors import DataError
from megapipe.data.index_writer import ShardWriter
from megapipe.data.manifest import ShardManifest
from megapipe.data.preprocess.inputs import InputFile
from megapipe.data.preprocess.parts import cut_into_parts
from megapipe.data.preprocess.tokenize_part import TokenizedPart, TokenizeSettings, tokenize_part
from megapipe.data.preprocess.workers import map_in_order
from megapipe.data.shard_format import bin_path, idx_path, token_dtype
from megapipe.data.tokenizers import Tokenizer


def output_prefix(prefix: str, json_key: str) -> str:
    """Megatron-LM's name of the shard of a field."""
    return f"{prefix}_{json_key}_document"


def preprocess(
    files: Iterable[InputFile],
    prefix: str,
    settings: TokenizeSettings,
    *,
    workers: int = 1,
    on_part: Callable[[TokenizedPart, ShardWriter], None] = lambda part, writer: None,
) -> list[ShardManifest]:
    """Writes `<prefix>_<key>_document.{bin,idx,manifest.json}` for each key; returns the manifests, in order of keys.

    The bytes do not depend on `workers`. Parts lie in the folder `<prefix>.parts` until they are joined; what an
    earlier, killed run left there is thrown away. `on_part` is called after each part with the first key's writer.

    Raises DataError, and then leaves no shard: for unusable input (unless settings say to skip), and for input without
    a single document.
    """
    tokenizer = settings.open()
    folder = Path(f"{prefix}.parts")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tasks = ((part, str(folder / f"{index:06d}"), settings) for index, part in enumerate(cut_into_parts(files)))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        dtype = token_dtype(tokenizer.vocabulary_size)
        writers = [stack.enter_context(ShardWriter(output_prefix(prefix, key), dtype)) for key in settings.json_keys]
        parts = stack.enter_context(closing(map_in_order(tokenize_part, tasks, workers)))
        for part in parts:
            for writer, part_prefix in zip(writers, part.prefixes, strict=True):
                writer.append_shard(part_prefix)
                _remove(part_prefix)
            on_part(part, writers[0])
        if writers[0].num_documents == 0:
            raise DataError(f"the input holds no usable document, so {prefix} would be empty: check --input")
        return [_commit(writer, tokenizer, settings) for writer in writers]


def _commit(writer: ShardWriter, tokenizer: Tokenizer, settings: TokenizeSettings) -> ShardManifest:
    manifest = ShardManifest(
        tokenizer=settings.tokenizer,
        tokenizer_fingerprint=tokenizer.fingerprint(),
        vocabulary_size=tokenizer.vocabulary_size,
        end_of_document=tokenizer.end_of_document,
        end_of_document_appended=settings.append_end_of_document,
        dtype=writer.dtype.name,
        num_documents=writer.num_documents,
        num_tokens=writer.num_tokens,
    )
    writer.commit(manifest)
    return manifest


def _remove(prefix: str) -> None:
    for path in (bin_path(prefix), idx_path(prefix)):
        path.unlink()
