"""Which documents came before: digests on disk, so that memory does not grow with the corpus."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

DIGEST_BYTES = 16
_CACHE_KIB = 65_536


def digest_of(texts: Sequence[str]) -> bytes:
    """16 bytes (XXH3) of a document's fields. Two different documents among 10^9 collide with probability 10^-21."""
    digest = xxhash.xxh3_128()
    for text in texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


class SeenDocuments:
    """The digests of all documents so far, in an SQLite file; what is not flushed is gone after a crash."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None)
        for setting in ("journal_mode = WAL", "synchronous = FULL", f"cache_size = -{_CACHE_KIB}"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.execute("CREATE TABLE IF NOT EXISTS seen (digest BLOB PRIMARY KEY, part INTEGER) WITHOUT ROWID")
        self._database.execute("BEGIN")

    def forget_from(self, part: int) -> None:
        """Forgets the documents of this part and later ones."""
        self._database.execute("DELETE FROM seen WHERE part >= ?", (part,))
        self.flush()

    def are_new(self, digests: bytes, part: int) -> np.ndarray:
        """bool [number of digests]: whether each is seen for the first time. Remembers them."""
        insert = self._database.cursor()
        statement = "INSERT OR IGNORE INTO seen VALUES (?, ?)"
        new = [
            insert.execute(statement, (digests[start : start + DIGEST_BYTES], part)).rowcount == 1
            for start in range(0, len(digests), DIGEST_BYTES)
        ]
        return np.array(new, dtype=bool)

    def flush(self) -> None:
        self._database.execute("COMMIT")
        self._database.execute("BEGIN")

    def close(self) -> None:
        self._database.close()
