"""config.yaml and run.json, which record how each start of a run was configured, launched and ended.

config.yaml is the complete configuration of the first start, with `auto` replaced by the choice; `--config` takes it.
A later start with another configuration writes config-RUN.yaml, where RUN is its id. run.json lists all starts. No
start overwrites what an earlier one wrote.
"""

import importlib.metadata
import json
import os
import platform
import secrets
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

import megapipe
from megapipe.config.run import PretrainConfig
from megapipe.parallel.mesh import Mesh
from megapipe.training.records import Listener
from megapipe.training.run_files import CONFIG, RUN, RUNNING, read_starts

PACKAGES = ("numpy", "triton", "apex", "flash-attn", "transformer-engine", "nvidia-nccl-cu12", "nvidia-cudnn-cu12")
"""Packages whose version can change results."""


def new_run_id() -> str:
    """Return an id for this start that sorts by time and is unique."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


def command_line() -> str:
    """Return the command line of this process."""
    return shlex.join(sys.argv)


def places(mesh: Mesh) -> dict[str, Any]:
    """Return the time of this start, and the hosts and devices of all ranks. A collective call."""
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else mesh.device.type
    ranks: list[tuple[str, str]] = mesh.world.all_gather_object((os.uname().nodename, device))
    return {
        "start": _now(),
        "hosts": list(dict.fromkeys(host for host, _ in ranks)),
        "devices": dict(Counter(name for _, name in ranks)),
        "layout": dict(mesh.shape.sizes),
    }


class RunFolder(Listener):
    """Writes config.yaml and run.json when it is created, and the end of the run at event `end` or `failed`."""

    def __init__(
        self, directory: Path, run: str, config: PretrainConfig, step: int, hosts_and_devices: Mapping[str, Any]
    ) -> None:
        """Write both files.

        run: id of this start. step: the step that it continues from. hosts_and_devices: from `places`. Raises OSError.
        """
        self._path = directory / RUN
        self._run = run
        name = _write_config(directory, run, config)
        starts = [each for each in self._starts() if each["id"] != run]
        self._entry: dict[str, Any] = {
            "id": run,
            "command": command_line(),
            "config": name,
            "git": _git_commit(),
            "versions": package_versions(),
            **hosts_and_devices,
            "first_step": step + 1,
            "end": None,
            "last_step": None,
            "status": RUNNING,
        }
        self._write([*starts, self._entry])

    def event(self, name: str, **fields: Any) -> None:
        if name == "end":
            self._end("finished" if fields["status"] == 0 else f"stopped with status {fields['status']}")
            self._entry["last_step"] = fields["step"]
        elif name == "failed":
            self._end(f"failed: {fields['error']}")
        else:
            return
        self._write([*(each for each in self._starts() if each["id"] != self._run), self._entry])

    def _end(self, status: str) -> None:
        self._entry["end"] = _now()
        self._entry["status"] = status

    def _starts(self) -> list[dict[str, Any]]:
        """Return the starts in run.json, an empty list if it is missing. A file with other content is renamed."""
        try:
            return read_starts(self._path)
        except FileNotFoundError:
            return []
        except ValueError:
            pass
        self._path.rename(self._path.with_name(f"{RUN}.unreadable-{self._run}"))
        return []

    def _write(self, starts: Sequence[Mapping[str, Any]]) -> None:
        _replace(self._path, json.dumps({"starts": starts}, indent=2) + "\n")


def _write_config(directory: Path, run: str, config: PretrainConfig) -> str:
    """Write the configuration unless config.yaml has it already; return the file's name."""
    text = yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)
    first = directory / CONFIG
    if not first.exists():
        _replace(first, text)
    elif first.read_text(encoding="utf-8") != text:
        _replace(directory / f"config-{run}.yaml", text)
        return f"config-{run}.yaml"
    return CONFIG


def _replace(path: Path, text: str) -> None:
    """Write and flush another file, then rename it, so that a full disk leaves the older file intact."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def package_versions() -> dict[str, str]:
    """Return the versions of Python, megapipe, torch, and the installed packages of PACKAGES."""
    versions = {"python": platform.python_version(), "megapipe": megapipe.__version__, "torch": torch.__version__}
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _git_commit() -> str | None:
    """Return the commit of megapipe's checkout, with `-dirty` if tracked files have changed; None outside of one."""
    sources = Path(megapipe.__file__)
    git = ["git", "-C", str(sources.parent)]
    try:
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", sources.name], capture_output=True, timeout=10)
        if tracked.returncode != 0:
            return None
        described = subprocess.run(
            [*git, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"],
            capture_output=True, text=True, timeout=10,
        )  # fmt: skip
        return described.stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
