"""Real text for the contest: sources of the standard library and /usr/share/doc, repeated with changes if needed."""

import json
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megapipe.data.preprocess.inputs import find_inputs

WORD = re.compile(r"[A-Za-z_]{4,}")
CHANGED_OF = 5
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def documents() -> Iterator[str]:
    folder = Path("/usr/share/doc")
    paths = [file.path for file in find_inputs(["python-stdlib"])]
    for path in (*paths, *sorted(folder.rglob("copyright")), *sorted(folder.rglob("*.txt"))):
        with suppress(UnicodeDecodeError, OSError):
            yield path.read_bytes().decode()


def varied(text: str, times: int) -> str:
    """Return the text with new endings for one word in five, for other words in each repetition, so that caches of
    words are of little use."""
    if times == 0:
        return text

    def change(match: re.Match[str]) -> str:
        number = zlib.crc32(f"{times} {match[0]}".encode())
        return match[0] if number % CHANGED_OF else match[0] + LETTERS[number % 26] + LETTERS[number // 26 % 26]

    return WORD.sub(change, text)


def write_corpus(path: Path, num_bytes: int) -> int:
    """Write JSON lines with about `num_bytes` bytes of text; return how many times the sources were used."""
    source = list(documents())
    written = times = 0
    with path.open("w", encoding="utf-8") as file:
        while True:
            for text in source:
                line = json.dumps({"text": varied(text, times)}, ensure_ascii=False)
                file.write(line + "\n")
                written += len(line.encode())
                if written >= num_bytes:
                    return times + 1
            times += 1
