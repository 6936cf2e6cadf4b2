"""Measured preferences: which backend of an op was the fastest on one kind of GPU, by data type and size.

`make gpu-check` writes them to `kernels/measured/<device>.yaml`, where every registry of kernels looks for the current
GPU. The environment variable MEGAPIPE_KERNEL_PREFERENCES names another file, or `none` for the order of the table. A
file that cannot be used is ignored, and a run prints the reason when it starts.
"""

import functools
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

VARIABLE = "MEGAPIPE_KERNEL_PREFERENCES"
FOLDER = Path(__file__).with_name("measured")
VERSION = 1


class PreferenceError(ValueError):
    """A file of preferences that cannot be used; the message says why, without the file's name."""


@dataclass(frozen=True)
class MeasuredPreference:
    """One measured size: backends of `op` for tensors of `dtype` with a last axis of `width`, the fastest first."""

    op: str
    dtype: str
    width: int
    backends: tuple[str, ...]


@dataclass(frozen=True)
class Preferences:
    """The rows of one GPU. device: its name. measured: text with the date and the versions of the measurement."""

    device: str
    measured: str
    rows: tuple[MeasuredPreference, ...]

    def order(self, op: str, dtype: torch.dtype, width: int) -> tuple[str, ...]:
        """Return the backends at the nearest measured width (by ratio), the fastest first; empty if there is none."""
        name = str(dtype).removeprefix("torch.")
        rows = [row for row in self.rows if (row.op, row.dtype) == (op, name)]
        if not rows or not width:
            return ()
        return min(rows, key=lambda row: abs(math.log(row.width / width))).backends

    def text(self) -> str:
        """Return the file's content."""
        fastest = [vars(row) | {"backends": list(row.backends)} for row in self.rows]
        values = {"version": VERSION, "device": self.device, "measured": self.measured, "fastest": fastest}
        return yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=120)


@dataclass(frozen=True)
class LoadedPreferences:
    """Preferences for the current GPU, or None. note: a line to print when a run starts, or None."""

    preferences: Preferences | None = None
    note: str | None = None


def parse(text: str) -> Preferences:
    """Read a file's content. Raises PreferenceError."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PreferenceError(f"it is not YAML ({str(error).splitlines()[0]})") from None
    if not isinstance(values, dict) or "version" not in values:
        raise PreferenceError("it has no version")
    if values["version"] != VERSION:
        raise PreferenceError(f"it has version {values['version']} instead of {VERSION}")
    try:
        rows = tuple(_row(row) for row in values["fastest"])
        return Preferences(_text(values["device"]), _text(values["measured"]), rows)
    except (KeyError, TypeError, ValueError) as error:
        raise PreferenceError(f"it does not have the fields of version {VERSION} ({error})") from None


def file_of(device: str) -> Path:
    """Return the default file for a GPU of this name."""
    return FOLDER / f"{slug(device)}.yaml"


def slug(device: str) -> str:
    """Return a device's name for file names."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")


def find(device: str, environment: Mapping[str, str] = os.environ) -> LoadedPreferences:
    """Return the preferences for a GPU of this name, and a note that a run should print about them."""
    requested = environment.get(VARIABLE)
    if requested == "none":
        return LoadedPreferences(note=f"preferences are switched off by {VARIABLE}")
    path = Path(requested) if requested else file_of(device)
    if not requested and not path.exists():
        return LoadedPreferences()
    try:
        preferences = parse(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, PreferenceError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        return LoadedPreferences(note=f"ignored {path.name}: {why}; run make gpu-check again, or set {VARIABLE}=none")
    if preferences.device != device:
        return LoadedPreferences(
            note=f"ignored {path.name}: it was measured on {preferences.device}, and this is {device}"
        )
    return LoadedPreferences(preferences, f"order of backends from {path.name}, measured {preferences.measured}")


@functools.cache
def current() -> LoadedPreferences:
    """Return the preferences for the current GPU; the file is read once."""
    return find(torch.cuda.get_device_name()) if torch.cuda.is_available() else LoadedPreferences()


def _row(row: Mapping[str, Any]) -> MeasuredPreference:
    backends: Sequence[str] = row["backends"]
    if not isinstance(backends, list) or not backends:
        raise ValueError(f"backends are {backends!r}")
    width = row["width"]
    if type(width) is not int or width < 1:
        raise ValueError(f"width is {width!r}")
    return MeasuredPreference(_text(row["op"]), _text(row["dtype"]), width, tuple(map(_text, backends)))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value
