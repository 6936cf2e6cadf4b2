"""Every message that docs/faq.md explains is a message of the sources."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/faq.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^### `(.*)`$", TEXT, re.MULTILINE)


@cache
def strings() -> str:
    """Return all modules, with string literals of adjacent lines joined."""
    paths = sorted((ROOT / "megapipe").rglob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    return re.sub(r'"\n\s*f?"', "", text)


def test_messages_are_unique_and_explained() -> None:
    assert 25 <= len(MESSAGES) <= 50
    assert len(set(MESSAGES)) == len(MESSAGES) == len(re.findall("^###", TEXT, re.MULTILINE))
    explanations = re.split(r"^##.*$", TEXT, flags=re.MULTILINE)
    assert sum(bool(each.strip()) for each in explanations) == len(MESSAGES) + 1


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_exist_in_the_sources(message: str) -> None:
    """Values (…) may be any expressions, but one string of the sources has all fragments, in order."""
    fragments = [re.escape(each) for each in message.strip("… ").split("…")]
    assert re.search(r'[^"\n]*'.join(fragments), strings()), f"no string has {message!r}: quote today's message"
