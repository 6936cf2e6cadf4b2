"""The whole of preprocessing: inputs to one finished shard, with its manifest, per output."""

import fcntl
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from megapipe.data.errors import DataError
from megapipe.data.index_writer import ShardWriter, WriterPosition
from megapipe.data.manifest import ShardManifest
from megapipe.data.preprocess.inputs import InputFile
from megapipe.data.preprocess.journal import Journal, job_identity, read_journal
from megapipe.data.preprocess.parts import cut_into_parts
from megapipe.data.preprocess.seen_documents import SeenDocuments
from megapipe.data.preprocess.sentences import sentence_splitter_name
from megapipe.data.preprocess.sources import SourceChecksums
from megapipe.data.preprocess.tokenize_part import TokenizedPart, TokenizeSettings, tokenize_part
from megapipe.data.preprocess.workers import map_in_order
from megapipe.data.shard_format import bin_path, idx_path, token_dtype
from megapipe.data.shard_tokenizer import store_tokenizer
from megapipe.data.tokenizers import Tokenizer

JOURNAL_SECONDS = 0.5
"""How much work a crash may cost, about."""


def work_folder(prefix: str) -> Path:
    """Where parts and the journal lie until the shards are finished."""
    return Path(f"{prefix}.parts")


def preprocess(
    files: Sequence[InputFile],
    prefix: str,
    settings: TokenizeSettings,
    *,
    workers: int = 1,
    on_start: Callable[[Journal], None] = lambda journal: None,
    on_part: Callable[[TokenizedPart, ShardWriter], None] = lambda part, writer: None,
) -> list[ShardManifest]:
    """Writes `<prefix>_<output>.{bin,idx,manifest.json}` for each output; returns the manifests in their order.

    The bytes do not depend on `workers`. Workers write parts into `<prefix>.parts`, and one process joins them in
    order. A journal there says what is joined and safe: after a crash the same call continues behind it, and what
    else was left is thrown away. `on_start` is called with the journal, `on_part` after each part with the first
    output's writer.

    Raises DataError, and then leaves nothing: for unusable input (unless settings say to skip), and for input without
    a single document. Any other exception (a full disk, Ctrl-C) leaves what is needed to continue.
    """
    tokenizer = settings.open()
    folder = work_folder(prefix)
    with _locked(folder):
        try:
            with ExitStack() as stack:
                job = job_identity(files, settings, tokenizer.fingerprint())
                journal = read_journal(folder / "journal.json", job) or Journal(job=job)
                writers, journal = _open_writers(stack, prefix, tokenizer, settings, journal, folder)
                try:
                    manifests = _tokenize_and_join(
                        stack, files, writers, tokenizer, settings, journal, folder, workers, on_start, on_part
                    )
                except DataError:
                    for writer in writers:
                        writer.discard()
                    raise
        except DataError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        except BaseException:
            if not (folder / "journal.json").exists():
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)
        return manifests


def _tokenize_and_join(
    stack: ExitStack,
    files: Sequence[InputFile],
    writers: list[ShardWriter],
    tokenizer: Tokenizer,
    settings: TokenizeSettings,
    journal: Journal,
    folder: Path,
    workers: int,
    on_start: Callable[[Journal], None],
    on_part: Callable[[TokenizedPart, ShardWriter], None],
) -> list[ShardManifest]:
    seen = None
    if settings.drop_duplicates:
        seen = stack.enter_context(closing(SeenDocuments(folder / "seen.sqlite")))
        seen.forget_from(journal.next_part)
    on_start(journal)
    sources = SourceChecksums(files)
    stack.callback(sources.stop)
    parts = islice(enumerate(cut_into_parts(files)), journal.next_part, None)
    tasks = ((part, str(folder / f"{index:08d}"), settings) for index, part in parts)
    results = stack.enter_context(closing(map_in_order(tokenize_part, tasks, workers)))
    _join(results, writers, seen, journal, folder / "journal.json", on_part)
    if writers[0].num_documents == 0:
        raise DataError("the input contains no usable document, so the output would be empty: check --input")
    described = sources.result()
    return [_commit(writer, tokenizer, settings, journal, described) for writer in writers]


def _join(
    results: Iterator[TokenizedPart],
    writers: list[ShardWriter],
    seen: SeenDocuments | None,
    journal: Journal,
    path: Path,
    on_part: Callable[[TokenizedPart, ShardWriter], None],
) -> None:
    saved = time.monotonic()
    for part in results:
        keep = None
        if seen is not None:
            keep = seen.are_new(part.digests, journal.next_part)
            journal.num_duplicates += int((~keep).sum())
        for writer, part_prefix in zip(writers, part.prefixes, strict=True):
            writer.append_shard(part_prefix, keep)
            for file in (bin_path(part_prefix), idx_path(part_prefix)):
                file.unlink()
        journal.next_part += 1
        journal.done_bytes += part.input_bytes
        journal.num_skipped += len(part.skipped)
        journal.num_special_tokens += part.num_special_tokens
        on_part(part, writers[0])
        if time.monotonic() - saved >= JOURNAL_SECONDS:
            journal.writers = [writer.position() for writer in writers]
            if seen is not None:
                seen.flush()
            journal.save(path)
            for writer in writers:
                writer.keep()
            saved = time.monotonic()


def _open_writers(
    stack: ExitStack, prefix: str, tokenizer: Tokenizer, settings: TokenizeSettings, journal: Journal, folder: Path
) -> tuple[list[ShardWriter], Journal]:
    """Writers at the journal's positions; from the beginning, with a new journal, where the files do not fit it."""
    _remove_all_but_the_journal(folder, journal)
    dtype = token_dtype(tokenizer.vocabulary_size)
    prefixes = [f"{prefix}_{name}" for name in settings.output_names()]
    positions: Sequence[WriterPosition | None] = journal.writers or [None] * len(prefixes)
    writers: list[ShardWriter] = []
    try:
        for path, position in zip(prefixes, positions, strict=True):
            writers.append(ShardWriter(path, dtype, position))
            if position is not None:
                writers[-1].keep()
    except (DataError, OSError):
        for writer in writers:
            writer.discard()
        if not journal.writers:
            raise
        return _open_writers(stack, prefix, tokenizer, settings, Journal(job=journal.job), folder)
    for writer in writers:
        stack.enter_context(writer)
    return writers, journal


def _commit(
    writer: ShardWriter, tokenizer: Tokenizer, settings: TokenizeSettings, journal: Journal, sources: dict[str, Any]
) -> ShardManifest:
    stored = store_tokenizer(writer.prefix, settings.tokenizer)
    manifest = ShardManifest(
        tokenizer=settings.tokenizer,
        tokenizer_fingerprint=tokenizer.fingerprint(),
        vocabulary_size=tokenizer.vocabulary_size,
        end_of_document=tokenizer.end_of_document,
        end_of_document_appended=settings.append_end_of_document,
        dtype=writer.dtype.name,
        num_documents=writer.num_documents,
        num_tokens=writer.num_tokens,
        num_sequences=writer.num_sequences,
        special_tokens=tokenizer.special_tokens,
        sentences=sentence_splitter_name(settings.language) if settings.split_sentences else None,
        num_skipped=journal.num_skipped,
        num_duplicates=journal.num_duplicates if settings.drop_duplicates else None,
        sources=sources,
        num_special_tokens_in_text=journal.num_special_tokens,
        special_tokens_in_text=settings.special_tokens_in_text,
        tokenizer_copy=stored.name if stored else None,
        tokenizer_files=stored.files if stored else None,
    )
    return writer.commit(manifest) or manifest


def _remove_all_but_the_journal(folder: Path, journal: Journal) -> None:
    """Parts of an earlier run are never used; of its other files only what a journal to continue from needs."""
    for path in folder.iterdir():
        if path.name != "lock" and not (journal.writers and path.name.startswith(("journal", "seen"))):
            path.unlink()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder against a second run with the same output, as long as this process lives."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another run is writing {folder}: wait for it, or choose another prefix") from error
        yield
