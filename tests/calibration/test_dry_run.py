"""A run of many ranks in one process: rules, schedule, shapes on the meta device, memory by the formulas."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megapipe.calibration import commands
from megapipe.calibration.commands import ShapeError, dry_run, run_dry_run
from megapipe.config import ConfigError, command_line
from megapipe.config.bert import BertDataConfig
from megapipe.config.load import parse
from megapipe.config.parallel import MeshShape
from megapipe.config.run import PretrainConfig
from megapipe.engine.assembly import Assembly, Holding, ModelTable
from megapipe.engine.transfers import Boundary, receive_slots
from megapipe.layout.prediction import predict_rank
from megapipe.layout.stages import StageLayout
from megapipe.layout.table import build_schedule
from megapipe.parallel.mesh import Mesh, silent_mesh
from megapipe.planner.command.main import main
from megapipe.schedules import Schedule
from megapipe.training.loop.loader import HeldTokens
from megapipe.training.loop.replica import Replica
from tests.distributed.test_covering import CASES
from tests.support.layouts import config_of, world_size
from tests.support.meshes import run_threads

BERT = BertDataConfig(prefix="unread", sequence_length=16)


def gpt(*arguments: str):
    shape = ["--model", "examples/models/gpt2_124m.yaml", "--data.prefix", "unread", "--batch.global_size", "64"]
    return parse([*shape, *arguments])


@pytest.mark.slow
def test_layouts_that_are_known_to_run_pass() -> None:
    """Every case of the covering array: those layouts train in tests/distributed."""
    for case in CASES:
        config = config_of(case, "unread", BERT)
        report = dry_run(config, world_size(case), device="cpu")
        assert len(report.coordinates) == config.parallel.pipeline
        assert all(each.peak_bytes > 0 for each in report.coordinates)


def test_a_thousand_ranks_hold_one_model_per_replica() -> None:
    """GPT-2's 124,439,808 parameters, the position table's and the norms' included, and its tied weight on both ends;
    no size needs padding at tensor 1 but the vocabulary, 50,257 rows to the next multiple of 64."""
    config = gpt("--parallel.pipeline", "4", "--batch.global_size", "1024")
    report = dry_run(config, 1024)
    vocabulary, padded = 50257 * 768, 50304 * 768
    assert report.config.parallel.data == 256
    assert sum(each.parameters for each in report.coordinates) == 124_439_808 + 2 * padded - vocabulary
    assert [each.ranks for each in report.coordinates] == [256] * 4
    assert sum(each.ranks for each in report.coordinates) == report.world_size
    layers = [name for each in report.coordinates for name in each.layers]
    assert len(layers) == 14
    assert report.as_json()["memory_bytes"] == [each.peak_bytes for each in report.coordinates]


def test_memory_is_what_a_rank_is_predicted_to_hold() -> None:
    config = gpt(
        "--parallel.pipeline", "2", "--parallel.tensor", "2", "--zero.stage", "1", "--training.precision=bf16"
    )
    report = dry_run(config, 8, device="cuda")
    layout = StageLayout.of(report.config)
    schedule = build_schedule(report.config, report.microbatches, layout, replicas=2)
    for each, rank in zip(report.coordinates, (0, 2), strict=True):
        predicted = predict_rank(report.config, schedule, rank, device="cuda")
        assert each.peak_bytes == predicted.device_bytes()
        assert each.message_bytes == predicted.messages
        assert each.state_bytes == predicted.state().total


def scheduled(mesh: Mesh, config: PretrainConfig) -> Schedule:
    return Replica(config, mesh).schedule


@pytest.mark.parametrize(
    "flags",
    [
        ["--offload.optimizer=true"],
        ["--offload.optimizer=true", "--offload.weights=true"],
        ["--offload.activations=blocks", "--offload.every=2", "--offload.prefetch=2"],
        ["--parallel.vocabulary=pipeline_2"],
    ],
    ids=lambda flags: flags[-1],
)
def test_peaks_are_those_of_a_run_of_two_ranks(flags: list[str]) -> None:
    """By the schedule that a run of two ranks makes for itself."""
    shape = ["--model.hidden_size=32", "--model.num_heads=4", "--model.vocabulary_size=61", "--model.num_layers=4"]
    config = gpt(*shape, "--data.sequence_length=16", "--parallel.pipeline=2", "--batch.micro_size=8", *flags)
    config.parallel.data = 1
    report = dry_run(config, 2, device="cpu")
    for each, schedule in zip(report.coordinates, run_threads({"pipeline": 2}, scheduled, config), strict=True):
        assert each.peak_bytes == predict_rank(config, schedule, each.pipeline, device="cpu").device_bytes()


def test_offload_that_measures_at_the_start_is_refused() -> None:
    config = gpt("--offload.activations=auto", "--offload.memory=1")
    with pytest.raises(
        ConfigError, match=r"offload.activations auto is decided by measurements at the start of a run"
    ):
        dry_run(config, 1)


def test_buffers_of_messages_are_those_that_the_engine_makes() -> None:
    """Every message of another stage that has to wait has a slot: with 1f1b, one for each micro-batch in flight and
    one for a message in transit."""
    shape = ["--model.num_layers=4", "--batch.global_size=8"]
    report = dry_run(gpt(*shape, "--parallel.pipeline", "4"), 4)
    message = 1024 * 768 * 4
    stages = build_schedule(report.config, report.microbatches, StageLayout.of(report.config), replicas=1).header
    for stage, each in enumerate(report.coordinates):
        slots = (stages.activation_slots[stage] if stage else 0) + (stages.gradient_slots[stage] if stage < 3 else 0)
        specs = [commands.TensorSpec((1, 1024, 768), torch.float32)]
        boundary = Boundary(SimpleNamespace(lends=False), specs)
        buffers = receive_slots(boundary, slots, torch.device("meta"))._buffers
        assert each.message_bytes == sum(t.numel() * t.element_size() for slot in buffers for t in slot)
        in_flight = 4 - stage
        assert each.message_bytes >= (in_flight if stage else 0) * message
    assert [each.message_bytes for each in dry_run(gpt(*shape), 4).coordinates] == [0]


def test_broken_rules_are_reported_before_anything_is_built() -> None:
    with pytest.raises(ConfigError, match=r"model.num_heads 12 is not divisible by parallel.tensor 5"):
        dry_run(gpt("--parallel.tensor", "5"), 1000)
    with pytest.raises(ConfigError, match=r"world size 1001 is not a multiple"):
        dry_run(gpt("--parallel.pipeline", "4"), 1001)


def stages_of(config):
    shape = MeshShape({"pipeline": 2})
    layout = StageLayout.of(config)
    schedule = build_schedule(config, 64, layout, replicas=1)
    mesh = silent_mesh(shape, 0, commands.META)
    model = ModelTable.of(config, layout, mesh)
    return Assembly(model, Holding(), mesh, schedule.header).stages, mesh, layout, schedule


def test_a_stage_that_hands_on_another_shape_is_found() -> None:
    config = gpt("--parallel.pipeline", "2")
    stages, _, _, _ = stages_of(config)
    twice = replace(config, batch=replace(config.batch, micro_size=2))
    with pytest.raises(ShapeError, match=r"stage 0 returns \[2, 1024, 768\] float32, but \[1, 1024, 768\] float32"):
        commands._run_shapes(twice, stages, HeldTokens())


def test_buffers_that_differ_from_formulas_are_noticed() -> None:
    config = gpt("--parallel.pipeline", "2")
    stages, mesh, layout, schedule = stages_of(config)
    other = replace(config, training=replace(config.training, precision="bf16"))
    other = replace(other, parallel=replace(other.parallel, data=1))
    with pytest.raises(ShapeError, match=r"bytes of weights, but the formulas predict"):
        commands._coordinate(predict_rank(other, schedule, 0), mesh, stages, layout)


SMALL = [
    "--model.vocabulary_size=512", "--data.sequence_length=512", "--batch.global_size=16", "--batch.micro_size=4",
    "--devices=2", "--parallel.pipeline=2",
]  # fmt: skip


@pytest.mark.slow
def test_auto_values_are_chosen_for_the_hardware(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("training: {precision: auto}\nrecompute: {method: auto, memory: 1.1}\n")
    asked = [str(tmp_path / "run.yaml"), "--model=examples/models/gpt2_124m.yaml", *SMALL]
    assert main(["dry-run", *asked, "--hardware=a100-80"], {"dry-run": run_dry_run}) == 0
    printed = capsys.readouterr().out
    assert "training.precision auto: planned as bf16, by the peaks of A100-SXM4-80GB" in printed
    assert "recompute auto: " in printed
    assert main(["dry-run", *asked, "--hardware=a100-80", "--json"], {"dry-run": run_dry_run}) == 0
    within_budget = json.loads(capsys.readouterr().out)["memory_bytes"]
    plain = [flag for flag in asked if "yaml" in flag] + SMALL
    flags = ["--training.precision=bf16", "--recompute.method=none", "--recompute.memory=null", "--json"]
    assert main(["dry-run", *plain, *flags], {"dry-run": run_dry_run}) == 0
    everything = json.loads(capsys.readouterr().out)["memory_bytes"]
    assert max(within_budget) <= 1.1 * 2**30 < max(everything)
    written = tmp_path / "layout.yaml"
    assert main(["dry-run", *asked, "--hardware=a100-80", f"--write_layout={written}"], {"dry-run": run_dry_run}) == 0
    capsys.readouterr()
    again = [str(written), *plain[1:], "--training.precision=bf16", "--json"]
    assert main(["dry-run", *again], {"dry-run": run_dry_run}) == 0
    assert json.loads(capsys.readouterr().out)["memory_bytes"] == within_budget


def test_auto_values_are_refused_without_hardware(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("training: {precision: auto}\nrecompute: {method: auto}\n")
    asked = [str(tmp_path / "run.yaml"), "--model=examples/models/gpt2_124m.yaml", *SMALL]
    assert main(["dry-run", *asked], {"dry-run": run_dry_run}) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: training.precision auto depends on the machine; give --hardware, or set a value",
        "error: recompute.method auto depends on the machine; give --hardware, or set a value",
    ]


def test_a_slow_check_shows_its_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command_line, "SHOWN_AFTER", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for name, value in (("TERM", "xterm"), ("TTY_COMPATIBLE", "1")):
        monkeypatch.setenv(name, value)
    (tmp_path / "run.yaml").write_text("model: {num_layers: 2}\n")
    asked = [str(tmp_path / "run.yaml"), "--model=examples/models/gpt2_124m.yaml", *SMALL]
    assert main(["dry-run", *asked, "--json"], {"dry-run": run_dry_run}) == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert "checking pipeline coordinates" in captured.err
