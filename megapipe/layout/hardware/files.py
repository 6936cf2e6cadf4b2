"""Reads and writes hardware files: YAML of a `Hardware`, from the package's presets or from the user."""

from functools import cache
from importlib.resources import files
from pathlib import Path

from megapipe.config.errors import ConfigError, nearest
from megapipe.config.load import read_dataclass, written_dataclass
from megapipe.config.untrusted import read_bytes
from megapipe.layout.hardware.description import Hardware

PRESETS = tuple(sorted(each.stem for each in Path(str(files(__package__) / "presets")).glob("*.yaml")))
"""Names of the files that come with the package."""
LARGEST_FILE = 16_000_000
"""Maximum number of characters, enough for a link matrix of 1,000 nodes; a larger file takes minutes to read."""


def load_hardware(name_or_file: str) -> Hardware:
    """Return a preset by its name, or the hardware in a YAML file (a name with a slash or a dot in it).

    Raises:
        ConfigError: an unknown preset, an unreadable file, or a wrong content.

    Example:
        >>> from megapipe import load_hardware
        >>> load_hardware("h100").name
        'H100'
    """
    if name_or_file in PRESETS:
        return _preset(name_or_file)
    if not any(mark in name_or_file for mark in "./\\"):
        raise ConfigError(
            f"unknown hardware {name_or_file!r}{_meant(name_or_file)} (presets: {', '.join(PRESETS)}; write a file "
            "name with its ending, as in machine.yaml)"
        )
    try:
        text = read_bytes(Path(name_or_file), ConfigError, LARGEST_FILE).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"hardware file {name_or_file!r} cannot be read: {why}; choose a readable YAML file"
        ) from None
    return read_hardware(text, name_or_file)


@cache
def _preset(name: str) -> Hardware:
    return read_hardware((files(__package__) / "presets" / f"{name}.yaml").read_text(), name)


def _meant(name: str) -> str:
    """Return a hint with the presets that start with a name, such as a100, or else with the nearest one."""
    longer = [preset for preset in PRESETS if name and preset.startswith(name)]
    return f"; did you mean {' or '.join(map(repr, longer))}?" if longer else nearest(name, PRESETS)


def read_hardware(text: str, origin: str = "hardware") -> Hardware:
    """Return the hardware that the YAML text of a file called `origin` describes; ConfigError names all problems."""
    return read_dataclass(Hardware, text, origin, LARGEST_FILE)


def written(hardware: Hardware, remark: str = "") -> str:
    """Return the text of a file that `read_hardware` can read, with six digits. remark: comment at the top."""
    return written_dataclass(hardware, remark)
