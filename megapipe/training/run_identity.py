"""Check that all ranks run the same job: configuration, code, version of torch, and the content of all input files.

Paths may differ between hosts, because the files' contents are compared. Nothing else may differ. The ranks exchange
one digest each. Only if digests differ, some ranks send the values as well, so thousands of ranks agree within
milliseconds.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

import megapipe
from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.manifest_file import MANIFEST
from megapipe.config.run import PretrainConfig
from megapipe.data.errors import DataError
from megapipe.data.hashed_file import sampled_checksum
from megapipe.data.identity import shard_identity
from megapipe.kernels.preferences import VARIABLE as PREFERENCES
from megapipe.layout.hardware.reader import PRESETS
from megapipe.parallel.rendezvous import Start, StartError, in_words
from megapipe.training.resume import weights_folder

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

    def ask_further(digests: list[str]) -> str:
        for rank, each in enumerate(digests):
            ranks.setdefault(each, []).append(rank)
        return "" if len(ranks) == 1 else json.dumps([alike[0] for alike in ranks.values()][:_NAMED_KINDS])

    asked = start.exchange(digest, ask_further)
    if not asked:
        return

    def refuse(identities: list[str]) -> str:
        kinds = [
            (alike, {name: Fact(*fact) for name, fact in json.loads(identities[alike[0]]).items()})
            for alike in list(ranks.values())[:_NAMED_KINDS]
        ]
        raise StartError(difference(kinds))

    start.exchange(json.dumps(identity) if start.rank in json.loads(asked) else "", refuse)


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
        device: of this rank; its kind is compared.
    """
    values = asdict(config)
    for group, name in (("data", "prefix"), ("data", "blend"), ("training", "directory")):
        del values[group][name]
    facts = {name: _fact(value) for name, value in _flat(values)}
    shards = _shards(config)
    if not config.data.blend:
        facts["data.prefix"] = _path_fact(config.data.prefix, shards[config.data.prefix])
    for number, (prefix, weight) in enumerate(config.data.blend.items(), 1):
        facts[f"data.blend, shard {number}"] = _path_fact(f"{prefix}: {weight!r}", f"{weight!r} of {shards[prefix]}")
    tokenizer = getattr(config.data, "tokenizer", "")
    named = {"data.tokenizer": tokenizer, "schedule.file": config.schedule.file}
    if config.recompute.hardware is not None and config.recompute.hardware not in PRESETS:
        named["recompute.hardware"] = config.recompute.hardware
    for name, path in named.items():
        if path:
            kind, _, file = path.rpartition(":") if name == "data.tokenizer" else ("", "", path)
            facts[name] = _path_fact(path, " ".join(filter(None, (kind, content(Path(file))))))
    facts["init_from"] = _path_fact(config.init_from, _weights(config.init_from)) if config.init_from else _fact("")
    file = os.environ.get(PREFERENCES, "")
    facts[PREFERENCES] = _fact(file) if file in ("", "none") else _path_fact(file, content(Path(file)))
    facts["the kind of device"] = _fact(device.type)
    facts["WORLD_SIZE"] = _fact(world_size)
    facts["the version of torch"] = _fact(torch.__version__)
    return facts | {name: Fact(checksum, checksum[:8]) for name, checksum in _sources().items()}


def content(path: Path) -> str:
    """Describe the content of a file or folder, independent of its path."""
    if path.is_file():
        return f"{path.stat().st_size:,} bytes, checksum {sampled_checksum(path)}"
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.is_file())
        digest = xxhash.xxh3_64()
        for each in files:
            digest.update(f"{each.relative_to(path)}: {content(each)}\n".encode())
        return f"{len(files):,} files, checksum {digest.hexdigest()}"
    return ABSENT


def _flat(values: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every field of a configuration; fields of nested groups have dotted names."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _fact(value: Any) -> Fact:
    words = json.dumps(value, default=str, sort_keys=True)
    return Fact(words, words)


def _path_fact(path: str, described: str) -> Fact:
    return Fact(described, f"{path} ({described})")


def _shards(config: PretrainConfig) -> dict[str, str]:
    """Describe the content of every shard of the run, by its path."""
    return {prefix: _shard(prefix) for prefix in config.data.prefixes}


def _shard(prefix: str) -> str:
    try:
        facts = {name: value for name, value in shard_identity(prefix).as_dict().items() if value is not None}
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
