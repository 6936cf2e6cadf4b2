"""Checksums of the input files, computed in the background."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import xxhash

from megapipe.data.hashed_file import checksum_of_file
from megapipe.data.preprocess.hub_datasets import dataset_fingerprint
from megapipe.data.preprocess.inputs import InputFile

LISTED_SOURCES = 1000
"""A corpus of millions of text files would make its manifest larger than some shards."""


class SourceChecksums:
    """Hashes the files on a thread of its own, at memory speed; hashing leaves the interpreter to others."""

    def __init__(self, files: Sequence[InputFile]) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._stopped = False
        self._result: Future[dict[str, Any]] = self._pool.submit(self._describe, files)

    def result(self) -> dict[str, Any]:
        """For the manifest: number of files, bytes, checksum over the files' checksums in order, and the files."""
        return self._result.result()

    def stop(self) -> None:
        self._stopped = True
        self._pool.shutdown(cancel_futures=True)

    def _describe(self, files: Sequence[InputFile]) -> dict[str, Any]:
        digest = xxhash.xxh3_128()
        listed: list[dict[str, Any]] = []
        for file in files:
            if self._stopped:
                break
            checksum = self._checksum(file)
            digest.update(f"{checksum}\n".encode())
            if len(listed) < LISTED_SOURCES:
                listed.append({"name": str(file.path), "bytes": file.size, "checksum": checksum})
        return {
            "num_files": len(files),
            "num_bytes": sum(file.size for file in files),
            "checksum": f"xxh128:{digest.hexdigest()}",
            "files": listed,
        }

    def _checksum(self, file: InputFile) -> str | None:
        if file.format == "dataset":
            return dataset_fingerprint(str(file.path))
        try:
            return checksum_of_file(file.path, lambda: self._stopped)
        except OSError:  # reported where it is read
            return None
