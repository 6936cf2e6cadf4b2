"""The guide's file is read, and its example prints what the guide shows."""

import contextlib
import io
import re
from pathlib import Path

import megapipe
from megapipe.layout.hardware.reader import PRESETS, read_hardware

GUIDE = (Path(megapipe.__file__).parent.parent / "docs" / "hardware.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)
    return found


def test_the_guides_file_is_read_and_presets_are_named() -> None:
    hardware = read_hardware(block("yaml"))
    assert hardware.price_per_hour(24) == 2 * 24.5 + 32
    assert all(f"`{name}`" in GUIDE for name in PRESETS)


def test_the_guides_example_prints_what_it_shows() -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(block("python"), {})
    assert printed.getvalue() == block("text")
