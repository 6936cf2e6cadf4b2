"""The complete preprocessing, from inputs to one finished shard with its manifest per output."""

import fcntl
import hashlib
import json
import multiprocessing
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from megapipe.config.command_line import end_with_parent
from megapipe.config.files import DECODING_ERRORS, read_json, write_whole
from megapipe.data import DataError
from megapipe.data.manifest import ShardManifest, store_tokenizer
from megapipe.data.preprocess.inputs import InputFile, SourceChecksums, cut_into_parts
from megapipe.data.preprocess.tokenize_part import (
    SeenDocuments,
    TokenizedPart,
    TokenizeSettings,
    sentence_splitter_name,
    tokenize_part,
)
from megapipe.data.shard_writer import ShardWriter, WriterPosition
from megapipe.data.shards import bin_path, idx_path, token_dtype
from megapipe.data.tokenizers import Tokenizer

FORMAT_VERSION = 1


@dataclass(kw_only=True)
class Journal:
    """State of the output on disk: all parts before `next_part` are joined and flushed.

    writers: for each output, the position up to which its shard is written.
    """

    job: str
    """Identity of the input and settings. A run with a different identity starts from the beginning."""
    next_part: int = 0
    done_bytes: int = 0
    num_skipped: int = 0
    num_duplicates: int = 0
    num_special_tokens: int = 0
    writers: list[WriterPosition] = field(default_factory=list)

    def save(self, path: Path) -> None:
        write_whole(path, json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}).encode())


def read_journal(path: Path, job: str) -> Journal | None:
    """Return the journal of an earlier run of the same job; None if there is none, or if it cannot be used."""
    try:
        content = read_json(path, ValueError)
        if content.pop("format_version") != FORMAT_VERSION or content["job"] != job:
            return None
        writers = [WriterPosition._make((*counts, tuple(checksums))) for *counts, checksums in content.pop("writers")]
        return Journal(**content, writers=writers)
    except (OSError, *DECODING_ERRORS):
        return None


def job_identity(files: Sequence[InputFile], settings: TokenizeSettings, fingerprint: str) -> str:
    """Return a hash of everything that determines the output: names, sizes and modification times of the files, the
    settings, and the tokenizer."""
    digest = hashlib.sha256(json.dumps([settings.part_bytes, asdict(settings), fingerprint]).encode())
    for file in files:
        changed = file.path.stat().st_mtime_ns if file.format != "dataset" else 0
        digest.update(f"{file.path}\0{file.size}\0{changed}\n".encode(errors="surrogateescape"))
    return f"sha256:{digest.hexdigest()}"


Result = TypeVar("Result")


def map_in_order(
    function: Callable[..., Result], tasks: Iterable[tuple[Any, ...]], workers: int
) -> Generator[Result, None, None]:
    """Yield `function(*task)` for each task, in order. At most two tasks per worker are pending. If `workers` is 1,
    tasks run in this process.

    Raises the exception of a task after the results before it, and DataError if a worker process dies.
    """
    if workers == 1:
        yield from (function(*task) for task in tasks)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    pending: deque[Future[Result]] = deque()
    try:
        for task in tasks:
            with interrupts_delayed():  # submitting a task may start a process
                pending.append(pool.submit(function, *task))
            if len(pending) >= 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(f"one of {workers} workers died; if memory ran out, use fewer with --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def interrupts_delayed() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block.

    Processes that the block starts have SIGINT blocked from their start, so that they print no traceback during their
    imports, and never read an incomplete message from this process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if received:
        signal.raise_signal(signal.SIGINT)


def _start_worker() -> None:
    """Ignore Ctrl-C, which the parent handles, and end this worker if its parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


JOURNAL_SECONDS = 0.5
"""Approximate amount of work that a crash may lose, in seconds."""


def preprocess(
    files: Sequence[InputFile],
    prefix: str,
    settings: TokenizeSettings,
    *,
    workers: int = 1,
    on_start: Callable[[Journal], None] = lambda journal: None,
    on_part: Callable[[TokenizedPart], None] = lambda part: None,
) -> list[ShardManifest]:
    """Write `<prefix>_<output>.{bin,idx,manifest.json}` for each output; return the manifests in their order.

    The bytes do not depend on `workers`. Workers write parts to `<prefix>.parts`, and this process joins them in
    order. A journal in the same folder records which parts have been joined and flushed. After a crash, the same call
    continues from the journal and removes all other files. `on_start` is called with the journal. `on_part` is called
    with each part.

    Raises DataError, and then leaves no files, for unusable input (unless the settings skip it) and for input without
    a document. Any other exception (a full disk, Ctrl-C) leaves the files that are needed to continue.
    """
    tokenizer = settings.open()
    folder = Path(f"{prefix}.parts")
    with _locked(folder):
        try:
            with ExitStack() as stack:
                job = job_identity(files, settings, tokenizer.fingerprint)
                outputs = _Outputs(prefix, settings, tokenizer, folder, job)
                stack.push(outputs.close)
                outputs.open()
                on_start(outputs.journal)
                sources = SourceChecksums(files)
                stack.callback(sources.stop)
                numbered = enumerate(cut_into_parts(files, settings.part_bytes))
                parts = islice(numbered, outputs.journal.next_part, None)
                tasks = ((part, str(folder / f"{index:08d}"), settings) for index, part in parts)
                for part in stack.enter_context(closing(map_in_order(tokenize_part, tasks, workers))):
                    outputs.add(part)
                    on_part(part)
                    outputs.save_now_and_then()
                manifests = outputs.commit(sources)
        except BaseException as error:
            if isinstance(error, DataError) or not (folder / "journal.json").exists():
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)
        return manifests


class _Outputs:
    """The shards that are being written, the digests of their documents, and the journal."""

    def __init__(self, prefix: str, settings: TokenizeSettings, tokenizer: Tokenizer, folder: Path, job: str) -> None:
        self._settings, self._tokenizer, self._folder = settings, tokenizer, folder
        self._prefixes = [f"{prefix}_{name}" for name in settings.output_names()]
        self._seen: SeenDocuments | None = None
        self.journal = read_journal(folder / "journal.json", job) or Journal(job=job)
        self.writers: list[ShardWriter] = []

    def open(self) -> None:
        """Open writers at the journal's positions. If the files do not match it, start again with a new journal."""
        # Parts of an earlier run are never used. Only the files that a journal needs to continue are kept.
        for path in self._folder.iterdir():
            if path.name != "lock" and not (self.journal.writers and path.name.startswith(("journal", "seen"))):
                path.unlink()
        dtype = token_dtype(self._tokenizer.vocabulary_size)
        positions: Sequence[WriterPosition | None] = self.journal.writers or [None] * len(self._prefixes)
        try:
            for prefix, position in zip(self._prefixes, positions, strict=True):
                self.writers.append(ShardWriter(prefix, dtype, position))
                if position is not None:
                    self.writers[-1].keep()
        except (DataError, OSError):
            self._discard()
            if not self.journal.writers:
                raise
            self.journal = Journal(job=self.journal.job)
            self.open()
            return
        if self._settings.drop_duplicates:
            self._seen = SeenDocuments(self._folder / "seen.sqlite")
            self._seen.forget_from(self.journal.next_part)
        self._saved = time.monotonic()

    def add(self, part: TokenizedPart) -> None:
        """Append the documents of the next part, and remove the part's files."""
        journal, keep = self.journal, None
        if self._seen is not None:
            keep = self._seen.are_new(part.digests, journal.next_part)
            journal.num_duplicates += int((~keep).sum())
        for writer, part_prefix in zip(self.writers, part.prefixes, strict=True):
            writer.append_shard(part_prefix, keep)
            for file in (bin_path(part_prefix), idx_path(part_prefix)):
                file.unlink()
        journal.next_part += 1
        journal.done_bytes += part.input_bytes
        journal.num_skipped += len(part.skipped)
        journal.num_special_tokens += part.num_special_tokens

    def save_now_and_then(self) -> None:
        """Save the journal if JOURNAL_SECONDS have passed since the last save. The parts so far then survive a
        crash."""
        if time.monotonic() - self._saved < JOURNAL_SECONDS:
            return
        self.journal.writers = [writer.position() for writer in self.writers]
        if self._seen is not None:
            self._seen.flush()
        self.journal.save(self._folder / "journal.json")
        for writer in self.writers:
            writer.keep()
        self._saved = time.monotonic()

    def commit(self, sources: SourceChecksums) -> list[ShardManifest]:
        """Publish the shards. Raises DataError if one would have no token."""
        for writer in self.writers:
            if writer.num_tokens == 0:
                raise DataError(
                    f"the input contains no usable document for {writer.prefix} (documents "
                    f"without text: {writer.num_documents:,}): check --input and --json-keys"
                )
        source_facts = sources.result()
        return [self._commit(writer, source_facts) for writer in self.writers]

    def _commit(self, writer: ShardWriter, sources: dict[str, Any]) -> ShardManifest:
        settings, tokenizer, journal = self._settings, self._tokenizer, self.journal
        manifest = ShardManifest(
            tokenizer=settings.tokenizer,
            tokenizer_fingerprint=tokenizer.fingerprint,
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
            **store_tokenizer(writer.prefix, settings.tokenizer),
        )
        return writer.commit(manifest) or manifest

    def close(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files. After a DataError they are removed; otherwise a later run can continue."""
        if self._seen is not None:
            self._seen.close()
        if isinstance(error, DataError):
            self._discard()
        for writer in self.writers:
            writer.close()

    def _discard(self) -> None:
        for writer in self.writers:
            writer.discard()
        self.writers = []


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder against a second run with the same output, until the end of the block or of this process."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another run is writing {folder}: wait for it, or choose another prefix") from error
        yield
