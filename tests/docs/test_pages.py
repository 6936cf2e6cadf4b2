"""Statements of pages about files, commands and messages are true; tables and pictures are in test_figures.py."""

import contextlib
import io
import json
import re
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from benchmarks.ranks_check import checks
from megapipe.config.load import parse, parse_as
from megapipe.config.run import PretrainConfig
from megapipe.kernels.ops import OPS
from megapipe.layout.hardware.description import PRESETS, read_hardware, written
from megapipe.planner.command.main import COMMANDS
from megapipe.planner.command.main import main as plan
from megapipe.schedules import GENERATORS, loads, lower, validate
from megapipe.schedules.command.main import main as schedule
from megapipe.training.resilience.signals import ExitCode
from megapipe.training.validation import validate as validate_run
from tests.docs.figures import ROOT, read
from tests.docs.figures.migration import PAGES as MIGRATION
from tests.support.commands import blocks, command_lines, run


def code(page: str, language: str) -> list[str]:
    """Return the blocks of a page in a language."""
    return [block.text for block in blocks(read(page)) if block.language == language]


def command_of(page: str, pattern: str) -> str:
    """Return the only line of a page that matches, by its group."""
    (command,) = re.findall(rf"(?m)^{pattern}$", read(page))
    assert isinstance(command, str)
    return command


# faq.md

MESSAGES = re.findall(r"^### `(.*)`$", read("docs/faq.md"), re.MULTILINE)


@cache
def strings() -> str:
    """Return all modules, with string literals of adjacent lines joined."""
    paths = sorted((ROOT / "megapipe").rglob("*.py"))
    return re.sub(r'"\n\s*f?"', "", "\n".join(path.read_text(encoding="utf-8") for path in paths))


def test_messages_of_the_faq_are_unique_and_explained() -> None:
    text = read("docs/faq.md")
    assert 25 <= len(MESSAGES) <= 50
    assert len(set(MESSAGES)) == len(MESSAGES) == len(re.findall("^###", text, re.MULTILINE))
    assert sum(bool(each.strip()) for each in re.split(r"^##.*$", text, flags=re.MULTILINE)) == len(MESSAGES) + 1


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_of_the_faq_exist(message: str) -> None:
    """Values (…) may be any expressions, but one string of the sources has all fragments, in order."""
    fragments = [re.escape(each) for each in message.strip("… ").split("…")]
    assert re.search(r'[^"\n]*'.join(fragments), strings()), f"no string has {message!r}: quote today's message"


# reliability.md, reliability_storage.md

TESTED = r"\b((?:checkpoint|data|distributed|faults|parallel|training)/test_\w+)"


@pytest.mark.parametrize("page", ["reliability", "reliability_storage"])
def test_named_tests_exist(page: str) -> None:
    named = set(re.findall(TESTED, read(f"docs/{page}.md")))
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / "tests" / f"{name}.py").is_file()]


def test_faults_and_their_tests_are_listed_completely() -> None:
    text = read("docs/reliability.md")
    rows = re.findall(r"^\| (\d+) \| .* \| (.*) \|$", text[text.index("## All of them") :], re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 27))
    assert all("/test_" in tests for _, tests in rows)
    shown = text + read("docs/reliability_storage.md")
    assert not [path for path in (ROOT / "tests/faults").glob("test_*.py") if f"faults/{path.stem}" not in shown]


def test_every_exit_status_is_explained() -> None:
    rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", read("docs/reliability.md"), re.MULTILINE)
    assert {int(number): name for number, name in rows} == {int(code): code.name for code in ExitCode}


# first_gpu_run.md

FIRST_RUN = "\n".join(code("docs/first_gpu_run.md", "sh")).replace("\\\n", " ").splitlines()
TRAINING = [command for command in FIRST_RUN if "pretrain_gpt.py" in command]


@pytest.mark.parametrize("command", TRAINING, ids=lambda command: command.split("--training.directory ")[1])
def test_training_commands_of_the_first_run_are_valid(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    ranks = int(words[words.index("--nproc_per_node") + 1]) if words[0] == "torchrun" else 1
    validate_run(parse_as(PretrainConfig, words[words.index("pretrain_gpt.py") + 1 :]), ranks)


def test_checks_and_options_of_the_first_run_exist() -> None:
    text = read("docs/first_gpu_run.md")
    assert len(TRAINING) == 5
    requested = re.findall(r"ranks_check\.py --checks (\w+)", text)
    assert requested
    assert set(requested) <= {check.name for check in checks(8)}
    for option in re.findall(r"gpu_check\.py (--[a-z-]+)", text):
        assert f'"{option}"' in read("benchmarks/gpu_check.py")
    for file in re.findall(r"(?:examples|benchmarks|tools)/[\w./]+\.(?:py|yaml)", text):
        assert (ROOT / file).exists(), file


# hardware.md, calibration.md, planning.md


def test_the_hardware_file_is_read_and_presets_are_named() -> None:
    (text,) = code("docs/hardware.md", "yaml")
    assert read_hardware(text).price_per_hour(24) == 2 * 24.5 + 32
    assert all(f"`{name}`" in read("docs/hardware.md") for name in PRESETS)


def test_the_calibrated_file_predicts_and_chooses(tmp_path: Path) -> None:
    """The file has no times of this model, so the roofline is used."""
    (text,) = code("docs/calibration.md", "yaml")
    hardware = read_hardware(text)
    assert hardware.measured is not None
    assert hardware.measured.slowdown(2) == 1.06
    assert hardware.groups[0].inside.measured("send", 2) is not None
    (tmp_path / "machine.yaml").write_text(written(hardware))
    config = parse(["--config", str(ROOT / "examples/quickstart.yaml"), "--training.precision", "fp32"])
    names = {"config": replace(config, parallel=replace(config.parallel, data=1))}
    profile, predictions, budget = code("docs/calibration.md", "python")
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.chdir(tmp_path):
        exec(predictions, names)
        exec(budget.replace("world_size=2", "world_size=1"), names)
    estimated, simulated, chosen = printed.getvalue().splitlines()
    assert float(estimated) > 0.0
    assert float(simulated) > 0.0
    assert chosen.startswith("RecomputeConfig(")
    compile(profile, "guide", "exec")  # tests/calibration runs it
    for name in ("ranks", "tensor_sizes", "micro_sizes", "say"):
        assert f"{name}=" in profile
        assert f"    {name}:" in read("megapipe/calibration/machine.py")


def test_every_command_of_the_planner_is_listed() -> None:
    assert re.findall(r"^\| `([a-z-]+)` \|", read("docs/planning.md"), re.MULTILINE) == list(COMMANDS)


# schedules.md, offload.md, kernels.md


def test_the_schedule_file_is_valid() -> None:
    (text,) = (block for block in code("docs/schedules.md", "") if block.startswith("megapipe schedule 2"))
    assert validate(lower(loads(text))).peak_activations == (2.0, 1.0)
    (text,) = (block for block in code("docs/schedules.md", "") if block.startswith("megapipe schedule 3"))
    assert text == GENERATORS["interleaved_1f1b"].text


def test_short_copies_of_activations_cost_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    command = command_of("docs/offload.md", r"python tools/schedule.py (simulate .* --offload-time 0.9)")

    def makespan(*flags: str) -> float:
        assert schedule([*command.split(), *flags, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["peak_activations"] == [0.5] * 4
        return float(report["finish"])

    assert makespan() == makespan("--offload-time=0") < makespan("--offload-time=2")


def test_the_offloading_command_predicts_less_memory(capsys: pytest.CaptureFixture[str]) -> None:
    command = command_of("docs/offload.md", r"python tools/plan\.py (predict .*)")
    arguments = shlex.split(command.replace("examples/", f"{ROOT}/examples/"))
    assert plan(arguments, {}) == 0
    assert re.search(r"^offload +\S+ (ms|s) .*copies to and from host memory", capsys.readouterr().out, re.MULTILINE)
    sizes = []
    for flags in ([], ["--offload.optimizer=false", "--offload.weights=false"]):
        assert plan([*arguments, *flags, "--json"], {}) == 0
        sizes.append(json.loads(capsys.readouterr().out)["memory_bytes"][0])
    assert sizes[0] < sizes[1]


def test_kernel_tables_have_every_op_and_claim_no_speed() -> None:
    rows = [line.strip("|").split("|") for line in read("docs/kernels.md").splitlines() if line.startswith("| `")]
    ops = [name for row in rows if len(row) == 2 for name in row[0].strip().replace("`", "").split(", ")]
    assert sorted(ops) == sorted(op.name for op in OPS.ops)
    documented = [row for row in rows if len(row) == 6]
    assert sorted(row[0].strip(" `") for row in documented) == sorted(ops)
    measured = {path.stem for path in ROOT.glob("benchmarks/results/kernels_*.md")} - {"kernels_cpu"}
    if not measured:
        assert {row[5].strip() for row in documented} == {"not measured yet"}


# commands


@pytest.mark.slow
@pytest.mark.parametrize("page", MIGRATION.values())
def test_commands_of_the_migration_pages_run(page: str, tmp_path: Path) -> None:
    for block in blocks(read(f"docs/migrate/{page}")):
        if block.language == "sh" and not block.needs:
            assert "parameters of a rank" in run(block.text, 60.0, tmp_path)


@pytest.mark.exhaustive
def test_commands_of_the_data_page_run(tmp_path: Path) -> None:
    commands = command_lines(read("docs/data.md"))
    assert len(commands) == 10
    for command in commands:
        run(command.replace("runs/data", str(tmp_path)), 300.0)
    assert json.loads((tmp_path / "stalls.json").read_text())["tokens_per_second"]["preparation"] > 0
    assert (tmp_path / "lengths.png").stat().st_size > 1000
    for kind in ("bin", "idx"):
        merged, original = (tmp_path / f"{name}.{kind}" for name in ("whole", "gpt_text_document"))
        assert merged.read_bytes() == original.read_bytes()
