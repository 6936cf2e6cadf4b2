"""How far a run has come, on disk, so that the same command continues after a crash."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megapipe.config.untrusted import DECODING_ERRORS, read_json
from megapipe.data.durable import write_whole
from megapipe.data.index_writer import WriterPosition
from megapipe.data.preprocess.inputs import InputFile
from megapipe.data.preprocess.parts import PART_BYTES
from megapipe.data.preprocess.tokenize_part import TokenizeSettings

FORMAT_VERSION = 1


@dataclass(kw_only=True)
class Journal:
    """What of the output is on disk, flushed, with checksums: the parts before `next_part`, joined."""

    job: str
    """Identity of input and settings; another job does not continue this one."""
    next_part: int = 0
    done_bytes: int = 0
    num_skipped: int = 0
    num_duplicates: int = 0
    num_special_tokens: int = 0
    writers: list[WriterPosition] = field(default_factory=list)

    def save(self, path: Path) -> None:
        write_whole(path, json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}).encode())


def read_journal(path: Path, job: str) -> Journal | None:
    """The journal of an earlier run of the same job; None where there is none, or it cannot be used."""
    try:
        content = read_json(path, ValueError)
        if content.pop("format_version") != FORMAT_VERSION or content["job"] != job:
            return None
        writers = [
            WriterPosition(sequences, documents, tokens, tuple(checksums))
            for sequences, documents, tokens, checksums in content.pop("writers")
        ]
        return Journal(**content, writers=writers)
    except (OSError, *DECODING_ERRORS):
        return None


def job_identity(files: Sequence[InputFile], settings: TokenizeSettings, fingerprint: str) -> str:
    """Hash of all that decides the output: names, sizes and times of the files, settings, tokenizer."""
    digest = hashlib.sha256(json.dumps([PART_BYTES, asdict(settings), fingerprint]).encode())
    for file in files:
        changed = file.path.stat().st_mtime_ns if file.format != "dataset" else 0
        digest.update(f"{file.path}\0{file.size}\0{changed}\n".encode(errors="surrogateescape"))
    return f"sha256:{digest.hexdigest()}"
