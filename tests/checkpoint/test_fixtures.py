"""Files of version 0.1.0 still load, and its runs resume with the same bits (tests/fixtures/v0_1/README.md)."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megapipe.checkpoint import CheckpointError, read_manifest, save
from megapipe.checkpoint.fit import check_run, model_differences
from megapipe.config.run import PretrainConfig
from megapipe.data.identity import data_identity
from megapipe.inference.trained_model import read_trained
from megapipe.layout.hardware.description import load_hardware
from megapipe.parallel.mesh import Mesh
from megapipe.schedules.text import dumps, loads
from megapipe.training.loop.checkpoints import Checkpointer, checkpoint_directory
from megapipe.training.loop.replica import Replica
from tests.checkpoint.runs import RankOutcome, train, whole_tensors
from tests.fixtures.v0_1.record import FOLDER, SAVED_AT, SIZES, TRAINED_TO, checksums, configuration
from tests.support.meshes import run_threads

EXPECTED = json.loads((FOLDER / "expected.json").read_text())
OTHER_CPUS = 1e-5
"""Relative difference of losses that another order of sums may make."""


def from_both(mesh: Mesh, config: PretrainConfig, rewritten: PretrainConfig) -> tuple[RankOutcome, RankOutcome]:
    """Resume from a fixture, and from the same state as the code of today saves it."""
    with Checkpointer(config, mesh) as checkpointer:
        replica = Replica(config, mesh)
        run = checkpointer.restore(replica)
        assert run is not None
        save(checkpoint_directory(rewritten), replica.states(), replica.optimizer.applied, run, mesh)
    return train(mesh, config, TRAINED_TO), train(mesh, rewritten, TRAINED_TO)


@pytest.mark.parametrize("name", SIZES)
def test_a_checkpoint_of_0_1_resumes_bit_for_bit(tmp_path: Path, name: str) -> None:
    shutil.copytree(FOLDER / name, tmp_path / "fixture")
    configs = [configuration(name, tmp_path / folder) for folder in ("fixture", "rewritten")]
    pairs = run_threads(SIZES[name], from_both, *configs)
    old, new = ([pair[side] for pair in pairs] for side in (0, 1))
    assert checksums(whole_tensors([rank.loaded for rank in old])) == EXPECTED[name]["loaded"]
    losses = [(step, float.fromhex(loss)) for step, loss in EXPECTED[name]["losses"]]
    assert old[0].losses[:SAVED_AT] == losses[:SAVED_AT]
    assert [loss for _, loss in old[0].losses] == pytest.approx([loss for _, loss in losses], rel=OTHER_CPUS)
    assert new[0].losses == old[0].losses
    assert checksums(whole_tensors([rank.kept for rank in new])) == checksums(whole_tensors([r.kept for r in old]))
    warnings = [line for line in old[0].said if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert "does not record which data it was trained on" in warnings[0]


def test_experts_of_0_1_keep_their_routing_rule(tmp_path: Path) -> None:
    """0.1 added the balancing biases to the scores, and stored no field that said so."""
    path = FOLDER / "experts/checkpoints/step-00000004"
    manifest, config = read_manifest(path), configuration("experts", tmp_path)
    data = data_identity(config.data)
    assert check_run(path, manifest, config, data).reported == ()
    config.model = replace(config.model, expert_bias="shares")
    with pytest.raises(CheckpointError, match=r"model\.expert_bias is 'shares' and was 'scores'; set that back"):
        check_run(path, manifest, config, data)
    assert "model.expert_bias is 'shares' here and 'scores' in the checkpoint" in model_differences(
        manifest, asdict(config.model)
    )
    assert read_trained(str(path)).config.model.expert_bias == "scores"
    assert "expert_bias" not in read_manifest(FOLDER / "gpt/checkpoints/step-00000004").run.config["model"]


def test_a_schedule_of_0_1_is_read() -> None:
    schedule = loads((FOLDER / "schedule.txt").read_text())
    assert schedule.header.num_ranks == 2
    assert loads(dumps(schedule)) == schedule


def test_a_hardware_file_of_0_1_is_read() -> None:
    hardware = load_hardware(str(FOLDER / "hardware.yaml"))
    assert hardware.groups[0].device.peak_flops == {"fp32": 39890600000.0}
    assert hardware.measured is not None
    assert [each.factor for each in hardware.measured.contention] == [1.0, 2.10256]
