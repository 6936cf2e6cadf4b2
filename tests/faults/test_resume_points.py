"""A run that is stopped after any of its steps, and resumed, is the undisturbed run: bytes, losses, samples.

The run is made so that steps end where things change: the batch ramp, a blend's period, the epochs of its corpora.
"""

import errno
import itertools
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapipe.checkpoint.manifest import MANIFEST
from megapipe.checkpoint.storage import CheckpointError
from megapipe.config.run import PretrainConfig
from megapipe.data.samples import GptSamples
from megapipe.data.shard_writer import ShardWriter
from megapipe.training.loop.checkpoints import Checkpointer
from tests.checkpoint.disks import no_larger_files
from tests.support.gpt_runs import GPT2_SHAPE, VOCABULARY, make_config, train_alone
from tests.training.records import comparable_steps

pytestmark = pytest.mark.usefixtures("without_pictures")

EPOCHS = (8, 4)
"""Samples of an epoch of each corpus."""
WEIGHTS = (2.0, 1.0)
CONSUMED = (0, 2, 4, 8, 12, 16, 20)
"""After each step: the ramp ends with step 2; with step 4 both epochs end, and a period of the blend."""
STEPS = len(CONSUMED) - 1


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    prefixes = []
    for seed, epoch in enumerate(EPOCHS):
        prefix = tmp_path_factory.mktemp(f"corpus{seed}") / "corpus"
        tokens = np.random.default_rng(seed).integers(0, VOCABULARY, size=epoch * 16 + 1).astype(np.uint16)
        with ShardWriter(prefix, np.dtype(np.uint16)) as writer:
            writer.add_document([tokens])
            writer.commit()
        prefixes.append(str(prefix))
    return prefixes


def configuration(corpora: list[str], directory: Path) -> PretrainConfig:
    return make_config(
        "",
        replace(GPT2_SHAPE, hidden_dropout=0.1),
        data={"blend": dict(zip(corpora, WEIGHTS, strict=True)), "split": "100,0,0"},
        batch={"global_size": 4, "ramp_start": 2, "ramp_samples": 4},
        checkpoint={"every": 1, "keep_last": None},
        training={"steps": STEPS, "directory": str(directory)},
    )


def saved(directory: Path) -> dict[str, bytes]:
    """The last checkpoint's files, its manifest without the folder's name, which its configuration has."""
    folder = directory / f"checkpoints/step-{STEPS:08d}"
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    manifest = json.loads(files[MANIFEST])
    del manifest["config"], manifest["manifest_checksum"]
    return {**files, MANIFEST: json.dumps(manifest).encode()}


@pytest.fixture(scope="module")
def whole(corpora: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nothing disturbed, with a checkpoint of every step."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    assert train_alone(configuration(corpora, directory)) == 0
    assert [record["consumed_samples"] for record in comparable_steps(directory)] == list(CONSUMED[1:])
    where = {"split": "train", "shares": "100,0,0", "sequence_length": 16, "seed": 0}
    assert tuple(len(GptSamples(prefix, **where)) for prefix in corpora) == EPOCHS
    assert CONSUMED[4] == sum(EPOCHS)
    assert CONSUMED[4] % sum(WEIGHTS) == 0
    return directory


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("step", [*range(STEPS), 3])
def test_resumed_after_any_step(corpora: list[str], whole: Path, tmp_path: Path, step: int) -> None:
    name = f"checkpoints/step-{step:08d}"
    if step == 0:  # killed in its first save
        shutil.copytree(whole / "checkpoints/step-00000001", tmp_path / "checkpoints/.step-00000001.partial")
    else:
        shutil.copytree(whole / name, tmp_path / name)
    assert train_alone(configuration(corpora, tmp_path)) == 0
    assert comparable_steps(tmp_path) == comparable_steps(whole)[step:]
    assert saved(tmp_path) == saved(whole)
    assert not list((tmp_path / "checkpoints").glob(".step-*"))


def test_a_clock_that_jumps_changes_nothing(
    corpora: list[str], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Days forwards and back at every look; between them the run is stopped and resumed."""
    clock, looks = time.time, itertools.count()
    jumps = itertools.cycle([0.0, 1e6, -2e6, 3e5])

    def jumping() -> float:
        next(looks)
        return clock() + next(jumps)

    monkeypatch.setattr(time, "time", jumping)
    config = configuration(corpora, tmp_path)
    assert train_alone(replace(config, training=replace(config.training, stop_at=3))) == 0
    assert train_alone(config) == 0
    assert next(looks) > STEPS, "metrics read the clock"
    assert comparable_steps(tmp_path) == comparable_steps(whole)
    assert saved(tmp_path) == saved(whole)


def test_refused_saves_cost_that_checkpoint_alone(
    corpora: list[str],
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save = Checkpointer.save
    seen = []

    def refused(self: Checkpointer, replica: Any, step: int, *args: Any, **options: Any) -> Path:
        if step not in (2, 3):
            return save(self, replica, step, *args, **options)
        self.finish()  # the checkpoint before, which may be larger
        with no_larger_files(100_000):
            path = save(self, replica, step, *args, **options)
            with pytest.raises(CheckpointError):  # the loop is notified during training
                self.finish()
        seen.append(sorted(path.name for path in self.directory.iterdir()))
        return path

    monkeypatch.setattr(Checkpointer, "save", refused)
    assert train_alone(configuration(corpora, tmp_path)) == 0
    output = capsys.readouterr().out
    for step in (2, 3):
        assert output.count(f"warning: no checkpoint after step {step}: ") == 1
    assert os.strerror(errno.EFBIG) in output
    assert seen == [["step-00000001"]] * 2, "what was written of a refused save is removed"
    assert comparable_steps(tmp_path) == comparable_steps(whole)
    assert saved(tmp_path) == saved(whole)
