"""Hugging Face folders on the command line: `--model FOLDER` sets every field of the model from its config.json."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from megapipe.config import ConfigError
from megapipe.config.files import read_json
from megapipe.config.load import underscored

CONFIG = "config.json"


def with_model_folders(arguments: Sequence[str]) -> list[str]:
    """Replace `--model FOLDER` by flags for the fields of a Hugging Face folder, or of a file named config.json.

    `--init_from FOLDER` of such a folder does the same if `--model` is not given: its flags come first, so that later
    ones override them. Raises ConfigError for a model that megapipe cannot express.
    """
    words = [part for word in underscored(arguments) for part in _parts(word)]
    places = [place for place, word in enumerate(words[:-1]) if word == "--model" and _is_described(words[place + 1])]
    for place in reversed(places):
        words[place : place + 2] = _flags("--model", Path(words[place + 1]))
    initial = [Path(value) for flag, value in pairwise(words) if flag == "--init_from"]
    if not places and "--model" not in words and initial and (initial[-1] / CONFIG).is_file():
        return [*_flags("--init_from", initial[-1]), *words]
    return words


def _parts(word: str) -> list[str]:
    flag, has_value, value = word.partition("=")
    return [flag, value] if has_value and flag in ("--model", "--init_from") else [word]


def _is_described(name: str) -> bool:
    path = Path(name)
    return (path.name == CONFIG and path.is_file()) or (path / CONFIG).is_file()


def _flags(flag: str, path: Path) -> list[str]:
    """Return the flags for a folder's fields. flag: the one that named the folder, for messages."""
    from megapipe.spec.family import FamilyError  # with numpy, which most command lines need not wait for

    file = path if path.name == CONFIG and path.is_file() else path / CONFIG
    config = read_json(file, ConfigError)
    try:
        fields = model_fields(config)
    except FamilyError as error:
        raise ConfigError(f"{flag} {file}: {error}") from error
    return [
        f"--model.{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in fields.items()
    ]


def model_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a model from its config.json. Its architectures decide what its tensors would decide.

    Raises FamilyError as `Family.model_fields` does.
    """
    from megapipe.spec.family import FamilyError, family_of

    if not isinstance(config, dict):
        raise FamilyError("it does not contain a JSON object")
    family = family_of(config.get("model_type"))
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise FamilyError(f"architectures is {architectures!r}; it must be a list of names")
    whole = any(str(name).endswith("ForPreTraining") for name in architectures)
    tensors = [family.output, *(prefix for parts in family.optional.values() for prefix in parts if whole)]
    return {**family.run_fields(config), **family.model_fields(config, tensors)}
