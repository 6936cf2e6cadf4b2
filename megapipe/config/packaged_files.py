"""Configuration files that are part of the package, by name: `--config quickstart`, `--model llama3_8b`."""

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from megapipe.config.errors import ConfigError

FOLDER = Path(__file__).resolve().parents[1] / "examples"
_FOLDERS = {"config": ("", "parallel", "recipes"), "model": ("models",)}
"""Flags -> the folders of their files."""
_NAMED_WITH_FOLDER = "recipes"
"""The folder that is part of the names of its files, because some are called like the model that they train."""
_NAME = re.compile(rf"({_NAMED_WITH_FOLDER}/)?[A-Za-z0-9][\w.-]*")


def packaged_files(flag: str) -> dict[str, Path]:
    """Return the packaged files for a flag such as `model`, by name; empty if the flag has none."""
    files = [file for folder in _FOLDERS.get(flag, ()) for file in (FOLDER / folder).glob("*.yaml")]
    names = {file: file.stem for file in files}
    names |= {file: f"{_NAMED_WITH_FOLDER}/{file.stem}" for file in files if file.parent.name == _NAMED_WITH_FOLDER}
    return {names[file]: file for file in sorted(files, key=names.__getitem__)}


def with_packaged_files(words: Sequence[str]) -> list[str]:
    """Replace the names of packaged files in a command line by their paths. Files of the user come first.

    Raises:
        ConfigError: neither a file nor a packaged file has the name.
    """
    replaced = list(words)
    for place, word in enumerate(words):
        flag, has_value, value = word.partition("=")
        name = flag.removeprefix("--")
        if name == flag or not (files := packaged_files(name)):
            continue
        if has_value:
            replaced[place] = f"{flag}={_path_of(flag, value, files)}"
        elif place + 1 < len(words):
            replaced[place + 1] = _path_of(flag, words[place + 1], files)
    return replaced


def _path_of(flag: str, value: str, files: Mapping[str, Path]) -> str:
    if os.path.isfile(value) or not _NAME.fullmatch(value) or value.endswith((".yaml", ".yml")):
        return value
    if value in files:
        return str(files[value])
    if os.path.exists(value):  # a folder; the parser says so
        return value
    near = difflib.get_close_matches(value, files, n=3, cutoff=0.5)
    names = f"did you mean {' or '.join(near)}?" if near else f"the packaged ones are {', '.join(files)}"
    raise ConfigError(
        f"{flag} {value}: the file does not exist, and no packaged file for {flag} has this name; "
        f"{other_flag(value) or names}"
    )


def other_flag(name: str) -> str | None:
    """Return the advice to use the flag whose packaged file has a name, or None."""
    flag = next((flag for flag in _FOLDERS if name in packaged_files(flag)), None)
    return flag and f"pass the packaged file of this name as --{flag} {name}"
