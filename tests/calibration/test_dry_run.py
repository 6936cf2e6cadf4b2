"""A run of many ranks in one process: rules, schedule, shapes on the meta device, memory by the formulas."""

import json
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
from megapipe.engine.transfers import receive_slots
from megapipe.layout.prediction import predict_rank
from megapipe.layout.stages import StageLayout
from megapipe.layout.table import build_schedule
from megapipe.parallel.mesh import Mesh, silent_mesh
from megapipe.planner.command.main import main
from megapipe.schedules import Schedule
from megapipe.training.loop.loader import HeldTokens
from megapipe.training.loop.replica import Replica
from tests.config.test_command_line import stderr_is_a_terminal
from tests.distributed.test_covering import CASES
from tests.support.layouts import config_of, sizes_of, world_size
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


def scheduled(mesh: Mesh, config: PretrainConfig) -> Schedule:
    return Replica(config, mesh).schedule


@pytest.mark.parametrize(
    "flags",
    [
        ["--offload.optimizer=true"],
        ["--offload.optimizer=true", "--offload.weights=true"],
        ["--offload.activations=blocks", "--offload.every=2", "--offload.prefetch=2"],
        ["--parallel.vocabulary=pipeline_2"],
        ["--parallel.tensor=2", "--parallel.data=2", "--zero.stage=1", "--training.precision=bf16"],
    ],
    ids=lambda flags: flags[-1],
)
def test_bytes_are_those_of_ranks_of_a_run(flags: list[str]) -> None:
    """By the schedule that ranks make for themselves."""
    shape = ["--model.hidden_size=32", "--model.num_heads=4", "--model.vocabulary_size=61", "--model.num_layers=4"]
    shape += ["--data.sequence_length=16", "--parallel.pipeline=2", "--batch.micro_size=8", "--parallel.data=1"]
    config = gpt(*shape, *flags)
    sizes = sizes_of(config)
    schedules = run_threads(sizes, scheduled, config)
    for device in ("cpu", "cuda"):
        report = dry_run(config, MeshShape(sizes).world_size, device=device)
        for each, rank in zip(report.coordinates, (0, sizes["tensor"]), strict=True):
            predicted = predict_rank(config, schedules[rank], rank, device=device)
            assert each.peak_bytes == predicted.device_bytes()
            assert each.message_bytes == predicted.messages
            assert each.state_bytes == predicted.state().total


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
        link = SimpleNamespace(lends=False)
        buffers = receive_slots(link, specs, slots, torch.device("meta"))._buffers
        assert each.message_bytes == sum(t.numel() * t.element_size() for slot in buffers for t in slot)
        in_flight = 4 - stage
        assert each.message_bytes >= (in_flight if stage else 0) * message
    assert [each.message_bytes for each in dry_run(gpt(*shape), 4).coordinates] == [0]


@pytest.mark.parametrize(
    ("flags", "world_size", "message"),
    [
        (["--parallel.tensor=5"], 1000, "model.num_heads 12 is not divisible by parallel.tensor 5"),
        (["--parallel.pipeline=4"], 1001, "world size 1001 is not a multiple"),
        (
            ["--offload.activations=auto", "--offload.memory=1"],
            1,
            "auto is decided by measurements at the start of a run",
        ),
    ],
)
def test_broken_rules_are_reported_before_anything_is_built(flags: list[str], world_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dry_run(gpt(*flags), world_size)


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


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    (tmp_path / "run.yaml").write_text("training: {precision: auto}\nrecompute: {method: auto, memory: 1.1}\n")
    return [str(tmp_path / "run.yaml"), "--model=examples/models/gpt2_124m.yaml", *SMALL]


@pytest.mark.slow
def test_auto_values_are_chosen_for_the_hardware(
    asked: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def printed(*flags: str) -> str:
        assert main(["dry-run", *flags], {"dry-run": run_dry_run}) == 0
        return capsys.readouterr().out

    def memory(*flags: str) -> list[int]:
        answer: list[int] = json.loads(printed(*flags, "--json"))["memory_bytes"]
        return answer

    hardware, plain = "--hardware=a100-80", [*asked[1:], "--training.precision=bf16"]
    text = printed(*asked, hardware)
    assert "training.precision auto: planned as bf16, by the peaks of A100-SXM4-80GB" in text
    assert "recompute auto: " in text
    within_budget = memory(*asked, hardware)
    everything = memory(asked[0], *plain, "--recompute.method=none", "--recompute.memory=null")
    assert max(within_budget) <= 1.1 * 2**30 < max(everything)
    written = tmp_path / "layout.yaml"
    printed(*asked, hardware, f"--write_layout={written}")
    assert memory(str(written), *plain) == within_budget


def test_auto_values_are_refused_without_hardware(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dry-run", *asked], {"dry-run": run_dry_run}) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: training.precision auto depends on the machine; give --hardware, or set a value",
        "error: recompute.method auto depends on the machine; give --hardware, or set a value",
    ]


PINS = ["--parallel.tensor=1", "--zero.stage=0", "--schedule.name=1f1b", "--training.precision=bf16"]


@pytest.mark.parametrize(
    ("command", "flags", "shown"),
    [
        ("dry-run", ["--model.num_layers=2"], "checking pipeline coordinates"),
        ("search", [*PINS, "--hardware=a100-80"], "searching layouts"),
    ],
)
def test_a_slow_command_shows_its_progress(
    command: str, flags: list[str], shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "SHOWN_AFTER", 0.0)
    stderr_is_a_terminal(monkeypatch)
    model = "--model=examples/models/gpt2_124m.yaml"
    assert main([command, model, *SMALL, *flags, "--json"], {"dry-run": run_dry_run}) == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert shown in captured.err
