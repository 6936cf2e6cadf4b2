"""The identity of a run: all ranks run the same job in the same folder, and the folder records every start.

Ranks compare configuration, code, version of torch, and the content of all input files. Paths may differ between
hosts, because the contents are compared. The ranks exchange one digest each. Only if digests differ, some ranks send
the values as well, so thousands of ranks agree within milliseconds.

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
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
import yaml

import megapipe
from megapipe.checkpoint.directory import DirectoryLock, read_lock_id
from megapipe.checkpoint.manifest import MANIFEST
from megapipe.checkpoint.storage import CheckpointError
from megapipe.config import ConfigError
from megapipe.config.files import flat, write_whole
from megapipe.config.run import PretrainConfig
from megapipe.data import DataError
from megapipe.data.files import sampled_checksum
from megapipe.data.identity import shard_identity
from megapipe.kernels.preferences import VARIABLE as PREFERENCES
from megapipe.layout.hardware.description import PRESETS
from megapipe.parallel.launch import LaunchEnvironment
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.rendezvous import Start, StartError, in_words
from megapipe.training.loop.checkpoints import weights_folder
from megapipe.training.observe.metrics import CONFIG, RUN, RUNNING, read_starts
from megapipe.training.observe.records import Listener

_SOURCES = (".py", ".cu", ".cuh", ".cpp", ".h", ".yaml", ".json")
_NAMED_FIELDS = 3
_NAMED_KINDS = 8
_LONGEST_VALUE = 100
ABSENT = "nothing"


class Fact(NamedTuple):
    """A value that must be equal on all ranks. compared: the compared form. shown: the form for error messages."""

    compared: str
    shown: str


Identity = Mapping[str, Fact]
"""Facts by name, such as `optimizer.learning_rate`."""


def agree_on_run(start: Start, identity: Identity) -> None:
    """Check that all ranks run the same job. All ranks call this.

    Raises:
        StartError: they do not. The message is one line with fields, values and ranks.
    """
    compared = json.dumps({name: fact.compared for name, fact in identity.items()})
    digest = xxhash.xxh3_128_hexdigest(compared.encode())
    ranks: dict[str, list[int]] = {}

    def choose_representatives(digests: list[str]) -> str:
        for rank, each in enumerate(digests):
            ranks.setdefault(each, []).append(rank)
        return "" if len(ranks) == 1 else json.dumps([group[0] for group in ranks.values()][:_NAMED_KINDS])

    representatives = start.exchange(digest, choose_representatives)
    if not representatives:
        return

    def refuse(identities: list[str]) -> str:
        kinds = [
            (group, {name: Fact(*fact) for name, fact in json.loads(identities[group[0]]).items()})
            for group in list(ranks.values())[:_NAMED_KINDS]
        ]
        raise StartError(difference(kinds))

    start.exchange(json.dumps(identity) if start.rank in json.loads(representatives) else "", refuse)


def difference(kinds: Sequence[tuple[Sequence[int], Identity]]) -> str:
    """Return one line that describes how groups of ranks, each with one identity, differ."""
    names = dict.fromkeys(name for _, identity in kinds for name in identity)
    differing = []
    for name in names:
        values: dict[str, tuple[str, list[int]]] = {}
        for ranks, identity in kinds:
            fact = identity.get(name, Fact(ABSENT, ABSENT))
            values.setdefault(fact.compared, (fact.shown, []))[1].extend(ranks)
        if len(values) > 1:
            words = [
                f"{in_words(ranks)} {'have' if len(ranks) > 1 else 'has'} {_shortened(shown)}"
                for shown, ranks in values.values()
            ]
            differing.append(f"{name}: {', '.join(words)}")
    more = len(differing) - _NAMED_FIELDS
    return (
        "the ranks do not run the same job: "
        f"{'; '.join(differing[:_NAMED_FIELDS])}{f'; and {more} more differences' if more > 0 else ''}; start all "
        "ranks with the same configuration, files and code"
    )


def run_identity(config: PretrainConfig, world_size: int, device: torch.device) -> dict[str, Fact]:
    """Return the values that must be equal on all ranks.

    training.directory is not included: the lock in it shows whether all ranks use the same folder.

    Args:
        device: the device of this rank; its kind is compared.
    """
    values = asdict(config)
    for group, name in (("data", "prefix"), ("data", "blend"), ("training", "directory")):
        del values[group][name]
    facts = {name: _fact(value) for name, value in flat(values).items()}
    shards = {prefix: _shard(prefix) for prefix in config.data.prefixes}
    if not config.data.blend:
        facts["data.prefix"] = _path_fact(config.data.prefix, shards[config.data.prefix])
    for number, (prefix, weight) in enumerate(config.data.blend.items(), 1):
        facts[f"data.blend, shard {number}"] = _path_fact(f"{prefix}: {weight!r}", f"{weight!r} of {shards[prefix]}")
    tokenizer = getattr(config.data, "tokenizer", "")
    path_fields = {"data.tokenizer": tokenizer, "schedule.file": config.schedule.file}
    if config.recompute.hardware is not None and config.recompute.hardware not in PRESETS:
        path_fields["recompute.hardware"] = config.recompute.hardware
    for name, path in path_fields.items():
        if path:
            kind, _, file = path.rpartition(":") if name == "data.tokenizer" else ("", "", path)
            facts[name] = _path_fact(path, " ".join(filter(None, (kind, content(Path(file))))))
    facts["init_from"] = _path_fact(config.init_from, _weights(config.init_from)) if config.init_from else _fact("")
    file = os.environ.get(PREFERENCES, "")
    facts[PREFERENCES] = _fact(file) if file in ("", "none") else _path_fact(file, content(Path(file)))
    facts["the kind of device"] = _fact(device.type)
    facts["WORLD_SIZE"] = _fact(world_size)
    facts["the version of torch"] = _fact(torch.__version__)
    return facts | {name: Fact(each, each[:8]) for name, each in _sources().items()}


def content(path: Path) -> str:
    """Describe the content of a file or folder, independent of its path."""
    if path.is_file():
        return f"{path.stat().st_size:,} bytes, checksum {sampled_checksum(path)}"
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        digest = xxhash.xxh3_64()
        for file in files:
            digest.update(f"{file.relative_to(path)}: {content(file)}\n".encode())
        return f"{len(files):,} files, checksum {digest.hexdigest()}"
    return ABSENT


def _fact(value: Any) -> Fact:
    words = json.dumps(value, default=str, sort_keys=True)
    return Fact(words, words)


def _path_fact(path: str, described: str) -> Fact:
    return Fact(described, f"{path} ({described})")


def _shard(prefix: str) -> str:
    """Describe the content of a shard."""
    try:
        facts = {name: value for name, value in vars(shard_identity(prefix)).items() if value is not None}
    except DataError:
        return ABSENT
    return f"{facts.pop('num_tokens'):,} tokens, {', '.join(f'{name} {value}' for name, value in facts.items())}"


def _weights(path: str) -> str:
    """Describe the content of initial weights. For a checkpoint, its manifest contains the checksums of its files."""
    try:
        folder = weights_folder(Path(path))
    except CheckpointError:
        return ABSENT
    return content(folder / MANIFEST if (folder / MANIFEST).is_file() else folder)


@cache
def _sources() -> dict[str, str]:
    """Return the checksums of the source files of megapipe, including its kernels, by path."""
    package = Path(megapipe.__file__).parent
    checksums = {}
    for folder, _, names in sorted(os.walk(package, followlinks=True)):
        for name in sorted(names):
            if name.endswith(_SOURCES):
                path = Path(folder, name)
                checksums[f"source {path.relative_to(package.parent)}"] = xxhash.xxh3_64_hexdigest(path.read_bytes())
    return checksums


def _shortened(words: str) -> str:
    return words if len(words) <= _LONGEST_VALUE else f"{words[:_LONGEST_VALUE]}..."


PATIENCE_SECONDS = 30.0
"""Time that another host may need to see a file that rank 0 has written, because network file systems cache names."""


@contextmanager
def locked_folder(directory: Path, rank: int, start: Start | None) -> Iterator[DirectoryLock | None]:
    """Lock training.directory for this run, before any file in it is touched. All ranks call this.

    Rank 0 locks the folder, and every other rank checks that it finds this lock. Yields the lock on rank 0, else None.

    Raises:
        CheckpointError: another job uses the folder, or it cannot be written.
        ConfigError: this rank's path leads to another folder than rank 0's.
    """
    lock = DirectoryLock(directory) if rank == 0 else None
    try:
        if start is not None:
            host = os.uname().nodename
            mine = "" if lock is None else json.dumps([lock.lock_id, host, str(directory.absolute())])
            lock_id, first_host, first_folder = json.loads(start.exchange(mine, lambda answers: answers[0]))
            deadline = time.monotonic() + (0.0 if host == first_host else PATIENCE_SECONDS)
            while read_lock_id(directory) != lock_id:
                if time.monotonic() >= deadline:
                    raise ConfigError(
                        f"training.directory {directory} is not the folder {first_folder} of rank 0 on {first_host}; "
                        "give all ranks the same folder, which all hosts must see"
                    )
                time.sleep(0.2)
        yield lock
    finally:
        if lock is not None:
            lock.release()


def make_folders(config: PretrainConfig, environment: LaunchEnvironment) -> None:
    """Create the folders that this rank writes to, and test that they can be written: profile.trace on the first rank
    of every host, training.directory on rank 0.

    Raises:
        ConfigError: one of them cannot be created or written to.
    """
    folders = {}
    if environment.rank == 0:
        folders["training.directory"] = config.training.directory
    if environment.local_rank == 0 and config.profile.trace is not None:
        folders["profile.trace"] = config.profile.trace
    problems = []
    for name, value in folders.items():
        try:
            Path(value).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=value).close()
        except OSError as error:
            problems.append(f"{name} {value} cannot be written: {error.strerror}; name a folder that you can write to")
    if problems:
        raise ConfigError(problems)


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
        self._write()

    def event(self, name: str, **fields: Any) -> None:
        """Record in run.json how this start ended. Other starts in the file stay as they are."""
        if name == "end":
            self._end("finished" if fields["status"] == 0 else f"stopped with status {fields['status']}")
            self._entry["last_step"] = fields["step"]
        elif name == "failed":
            self._end(f"failed: {fields['error']}")
        else:
            return
        self._write()

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

    def _write(self) -> None:
        starts = [*(each for each in self._starts() if each["id"] != self._run), self._entry]
        write_whole(self._path, f"{json.dumps({'starts': starts}, indent=2)}\n".encode())


def _write_config(directory: Path, run: str, config: PretrainConfig) -> str:
    """Write the configuration unless config.yaml has it already; return the file's name."""
    text = yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)
    first = directory / CONFIG
    if not first.exists():
        write_whole(first, text.encode())
    elif first.read_text(encoding="utf-8") != text:
        write_whole(directory / f"config-{run}.yaml", text.encode())
        return f"config-{run}.yaml"
    return CONFIG


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
