"""Checkpoints of older versions of this code, whose manifests lack what was added since, are resumed as any other."""

import json
from pathlib import Path
from typing import Any

import pytest

from megapipe.checkpoint.errors import DamagedCheckpointError
from megapipe.checkpoint.manifest_file import _SELF, MANIFEST, _checksum, read_manifest
from tests.checkpoint.runs import assert_same_bits, config_in, run
from tests.support.gpt_runs import GPT2_SHAPE, write_shard

ADDED_SINCE = ("loss_scale", "skipped")
"""Entries of the manifest that the first checkpoints of this format version did not have."""

GROUPS = (
    "model",
    "data",
    "batch",
    "parallel",
    "schedule",
    "optimizer",
    "training",
    "evaluation",
    "checkpoint",
    "tracking",
    "init_from",
)
"""Groups of the configuration that they had."""

FIELDS_ADDED = {
    "parallel": ("context", "context_attention", "sequence", "sequence_chunks"),
    "checkpoint": ("asynchronous", "every_minutes", "max_overhead", "keep_every", "signal_deadline_seconds"),
    "data": ("pack", "order"),
}


def edited(folder: Path, **changes: Any) -> None:
    """Give a checkpoint's manifest other entries, None for no such entry, and the checksum that belongs to them."""
    document = json.loads((folder / MANIFEST).read_bytes())
    del document[_SELF]
    for name, value in changes.items():
        document.pop(name)
        if value is not None:
            document[name] = value
    (folder / MANIFEST).write_text(json.dumps({**document, _SELF: _checksum(document)}))


def test_a_checkpoint_from_before_the_later_entries_goes_on_as_if_it_had_them(tmp_path: Path) -> None:
    corpus = write_shard(tmp_path)
    whole = run({}, config_in(tmp_path / "whole", corpus, GPT2_SHAPE, checkpoint={"every": None}), 12)
    config = config_in(tmp_path / "older", corpus, GPT2_SHAPE)
    run({}, config, 10)
    folder = tmp_path / "older/checkpoints/step-00000010"
    stored = dict(read_manifest(folder).run.config)
    older = {name: stored[name] for name in GROUPS}
    for group, names in FIELDS_ADDED.items():
        assert set(names) < stored[group].keys()
        older[group] = {name: value for name, value in stored[group].items() if name not in names}
    assert older.keys() < stored.keys()
    edited(folder, config=older, **dict.fromkeys(ADDED_SINCE))
    found = read_manifest(folder).run
    assert (found.loss_scale, found.skipped) == ({}, ())
    outcome = run({}, config, 12)
    assert outcome.start == 10
    assert_same_bits(outcome, whole)


@pytest.mark.parametrize(
    "name", ["step", "consumed_samples", "random", "files", "chunks", "config", "applied_updates"]
)
def test_what_every_version_had_is_not_guessed(tmp_path: Path, name: str) -> None:
    run({}, config_in(tmp_path, write_shard(tmp_path), GPT2_SHAPE), 1)
    folder = tmp_path / "checkpoints/step-00000001"
    edited(folder, **{name: None})
    with pytest.raises(DamagedCheckpointError, match=name):
        read_manifest(folder)
