"""A run and the checkpoints in its folder: resume, use an older one, or refuse with the reason and how to fix it."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.checkpoint import CheckpointError, read_manifest
from megapipe.checkpoint.manifest import MANIFEST
from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.parallel.mesh import Mesh
from megapipe.training.loop.checkpoints import Checkpointer
from megapipe.training.loop.replica import Replica
from tests.checkpoint.runs import assert_same_bits, config_in, initial_weights, run, train
from tests.checkpoint.toy import alone
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, assembled
from tests.support.meshes import run_threads


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: str) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(alone(), config_in(folder, corpus, GPT2_SHAPE, checkpoint={"every": 1, "keep_last": None}), 3)
    return folder


@pytest.fixture
def config(tmp_path: Path, corpus: str, trained: Path) -> PretrainConfig:
    """Return a run with checkpoints of steps 1, 2 and 3."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return config_in(tmp_path, corpus, GPT2_SHAPE, checkpoint={"every": 1, "keep_last": None})


def checkpoints(config: PretrainConfig) -> list[str]:
    folder = Path(config.training.directory) / "checkpoints"
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def path_of(config: PretrainConfig, step: int) -> Path:
    return Path(config.training.directory) / "checkpoints" / f"step-{step:08d}"


def restored(mesh: Mesh, config: PretrainConfig) -> int:
    """Return the step from which a run would resume."""
    with Checkpointer(config, mesh) as checkpointer:
        progress = checkpointer.restore(Replica(config, mesh))
    return 0 if progress is None else progress.step


def test_a_damaged_checkpoint_is_replaced_by_an_older_one(config: PretrainConfig) -> None:
    """On two ranks, of which one reads what is damaged."""
    expected = run({}, config, 3)
    assert expected.start == 3
    assert expected.said == [f"resumed from {path_of(config, 3)} after step 3 (24 samples)"]
    (file,) = path_of(config, 3).glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    outcome = run({"pipeline": 2}, config, 3)
    assert outcome.start == 2
    assert_same_bits(outcome, expected)
    bad, *kept = sorted(checkpoints(config), key=lambda name: ".bad-" not in name)
    assert bad.startswith("step-00000003.bad-")
    assert kept == ["step-00000001", "step-00000002", "step-00000003"]
    assert "step-00000003" in outcome.said[0]
    assert bad in outcome.said[0]
    saved = read_manifest(path_of(config, 3)).run
    assert (saved.step, saved.consumed_samples, saved.precision) == (3, 24, "fp32")
    assert saved.random == {"seed": config.training.seed}
    assert saved.config["model"]["hidden_size"] == 32


def test_a_run_does_not_restart_when_all_are_damaged(config: PretrainConfig) -> None:
    for step in (1, 2, 3):
        (path_of(config, step) / MANIFEST).write_text("{")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"every checkpoint .* is damaged.*step-00000003\.bad-manifest"):
            restored(alone(), config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "model.hidden_size is 64 here and 32 in the checkpoint"),
        ({"num_layers": 3}, r"blocks\.2\..* is missing.*model.num_layers is 3 here and 2"),
        ({"num_layers": 1}, r"blocks\.1\..* is not a parameter of this model.*model.num_layers is 1 here and 2"),
        ({"vocabulary_size": 64}, r"shape \(61, 32\) instead of \(64, 32\).*model.vocabulary_size is 64"),
        ({"tie_embeddings": False}, "head.output.weight is missing.*model.tie_embeddings"),
    ],
    ids=str,
)
def test_checkpoints_of_another_model_are_refused(
    config: PretrainConfig, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config.model = replace(config.model, **changes)
    with pytest.raises(CheckpointError, match="was saved with another model"):
        restored(alone(), config)
    config.init_from, config.training.directory = config.training.directory, str(tmp_path / "other")
    with pytest.raises(CheckpointError, match=message):
        restored(alone(), config)


def test_weights_of_the_same_model_are_read_without_a_note(config: PretrainConfig, tmp_path: Path) -> None:
    config.init_from, config.training.directory = config.training.directory, str(tmp_path / "other")
    said = train(alone(), config, 1).said
    assert any(line.startswith("initial weights from ") for line in said)
    assert not [line for line in said if line.startswith("note: ")]


def test_changes_that_a_resume_allows_are_reported(config: PretrainConfig) -> None:
    config.model = replace(config.model, hidden_dropout=0.1)
    config.optimizer = replace(config.optimizer, learning_rate=1e-3)
    notes = [line for line in train(alone(), config, 3).said if line.startswith("note: ")]
    assert notes == [
        "note: model.hidden_dropout is 0.1 and was 0.0 in the checkpoint",
        "note: optimizer.learning_rate is 0.001 and was 0.005 in the checkpoint",
    ]


def test_a_fresh_run_needs_an_empty_folder(config: PretrainConfig) -> None:
    config.checkpoint = replace(config.checkpoint, resume=False)
    with pytest.raises(CheckpointError, match=r"checkpoint\.resume is false.*another training.directory"):
        restored(alone(), config)
    config.checkpoint = replace(config.checkpoint, every=None, at_end=False)
    assert restored(alone(), config) == 0


@pytest.mark.parametrize("asynchronous", [True, False])
def test_configured_checkpoints_stay_and_steps_are_saved_once(tmp_path: Path, corpus: str, asynchronous: bool) -> None:
    saves = {"every": 1, "keep_last": 1, "keep_every": 2, "asynchronous": asynchronous}
    config = config_in(tmp_path, corpus, GPT2_SHAPE, checkpoint=saves)
    train(alone(), config, 5)
    assert checkpoints(config) == ["step-00000002", "step-00000004", "step-00000005"]
    mesh = alone()
    with Checkpointer(config, mesh) as checkpointer:
        replica = Replica(config, mesh)
        assert checkpointer.restore(replica) is not None
        assert checkpointer.save(replica, 5, 40, []) == path_of(config, 5)


@pytest.mark.parametrize("named", ["", "checkpoints", "checkpoints/step-00000003"], ids=["run", "folder", "step"])
def test_initial_weights_from_a_checkpoint(config: PretrainConfig, tmp_path: Path, corpus: str, named: str) -> None:
    expected = assembled([train(alone(), config, 3).kept["weights"]])
    new = config_in(tmp_path / "new", corpus, GPT2_SHAPE)
    new.init_from = str(Path(config.training.directory) / named)
    ranks = run_threads({"tensor": 2, "pipeline": 2}, initial_weights, new)
    weights = assembled(ranks)
    assert weights.keys() == expected.keys()
    assert all((weights[name] == tensor).all() for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("model", "source", "message"),
    [
        (LLAMA_SHAPE, "", "does not fit: its parameters differ from those of this model"),
        (GPT2_SHAPE, "nowhere", "is not a folder"),
        (GPT2_SHAPE, "checkpoints/empty", "neither a megapipe checkpoint .* nor a Hugging Face model"),
    ],
    ids=["model", "nowhere", "empty"],
)
def test_unusable_initial_weights_are_refused(
    config: PretrainConfig, tmp_path: Path, corpus: str, model: ModelConfig, source: str, message: str
) -> None:
    (Path(config.training.directory) / "checkpoints/empty").mkdir()
    new = config_in(tmp_path / "new", corpus, model)
    new.init_from = str(Path(config.training.directory) / source)
    with pytest.raises(CheckpointError, match=message):
        restored(alone(), new)
