"""A schedule of an installed package has all that a schedule of this one has; a broken package disturbs no other."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapipe.schedules import GENERATORS, Rows, ScheduleError, Sections, build, order, schedule
from megapipe.schedules.actions import KIND
from megapipe.schedules.command.main import main
from megapipe.schedules.schedule import SECTIONS
from tests.docs.figures import read
from tests.engine.library_models import adoptable, assert_close, merged, plain, train
from tests.planner.command.plan import json_of
from tests.support.commands import ROOT, blocks
from tests.support.gpt_runs import write_shard
from tests.support.launch import launch_with_torchrun
from tests.support.meshes import run_threads
from tests.training.records import steps

(EXAMPLE,) = (each.text for each in blocks(read("docs/schedules.md")) if "@schedule(" in each.text)
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "{name}"
version = "1.0"
[tool.setuptools]
py-modules = ["{module}"]
[project.entry-points."megapipe.schedules"]
{schedule} = "{module}"
"""


def install(folder: Path, packages: dict[str, tuple[str, str]]) -> Path:
    """Install packages by pip: each name has an entry point of a schedule, and the source of its only module."""
    sources = []
    for package, (name, source) in packages.items():
        sources.append(folder / "sources" / package)
        sources[-1].mkdir(parents=True)
        (sources[-1] / f"{package}.py").write_text(source)
        (sources[-1] / "pyproject.toml").write_text(PROJECT.format(name=package, module=package, schedule=name))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(folder), *map(str, sources)], check=True, capture_output=True)
    return folder


PACKAGES = {
    "my_schedules": ("last_in_first_out", EXAMPLE),
    "half_gone": ("lost", "import nothing_of_this_name"),
    "says_nothing": ("silent", ""),
    **dict.fromkeys(("one_package", "other_package"), ("twice", EXAMPLE.replace("last_in_first_out", "twice", 1))),
    "built_in_again": ("modular", EXAMPLE.replace("last_in_first_out", "modular", 1)),
}
"""The package of the guide; one that cannot be imported; one that does not register what it lists; two with one name,
and one with a built-in name."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("packages"), PACKAGES)


@pytest.fixture
def installed(packages: Path, own_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages in this process, as if it had just started."""
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setattr(GENERATORS, "_entry_points", None)
    for name in PACKAGES:
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry that forgets what the test registers."""
    monkeypatch.setattr(GENERATORS, "_registered", {each.name: each for each in GENERATORS.registered()})


@pytest.mark.usefixtures("installed")
def test_commands_of_schedules_take_the_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def output(command: str, *flags: str) -> str:
        row = ["--schedule", "last_in_first_out", "--ranks", "2", "--microbatches", "4"]
        assert main([command, *row, *flags]) == 0
        return capsys.readouterr().out

    assert json.loads(output("simulate", "--json"))["schedule"] == "last_in_first_out"
    assert "rank 1" in output("show")
    output("draw", "--output", str(tmp_path / "picture.svg"))
    assert "last_in_first_out" in (tmp_path / "picture.svg").read_text()
    assert "F0.3 B0.3 B0.2 B0.1 B0.0" in output("write")


@pytest.mark.usefixtures("installed")
def test_broken_packages_are_one_line_and_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "the package half_gone cannot be loaded (half_gone): ModuleNotFoundError" in rows["lost"]
    assert "does not register it" in rows["silent"]
    assert "reverse order" in rows["last_in_first_out"]
    assert main(["compare", "--ranks", "2", "--microbatches", "4"]) == 0
    assert "cannot be loaded" in capsys.readouterr().out
    for name, message in (
        ("lost", "schedule 'lost' of the package half_gone cannot be loaded"),
        ("twice", "schedule 'twice' is registered twice, by "),
        ("modular", "schedule 'modular' is registered twice, by "),
    ):
        assert main(["show", "--schedule", name, "--ranks", "2"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: schedule ")
        assert message in error
        assert error.count("\n") == 1


def halves(num_ranks: int, num_microbatches: int) -> Sections:
    return order("zb_h1", num_ranks, num_microbatches).sections


def one_rank_more(num_ranks: int, num_microbatches: int) -> Sections:
    return order("gpipe", num_ranks + 1, num_microbatches).sections


def of_gpipe(change: Callable[[Rows], Rows]) -> Callable[[int, int], Sections]:
    """A generator of GPipe with changed rows of every rank."""

    def generate(num_ranks: int, num_microbatches: int) -> Sections:
        return Sections.flushing(tuple(map(change, order("gpipe", num_ranks, num_microbatches).sections.body)))

    return generate


def forwards(rows: Rows) -> Rows:
    return rows[: len(rows) // 2]


def backwards_reversed(rows: Rows) -> Rows:
    return np.concatenate([forwards(rows), rows[: len(rows) // 2 - 1 : -1]])


def unknown_kind(rows: Rows) -> Rows:
    changed = rows.copy()
    changed[0, KIND] = 99
    return changed


@pytest.mark.parametrize(
    ("generate", "options", "message"),
    [
        (
            of_gpipe(backwards_reversed), {},
            "class A, but .* micro-batch 1 after those of a later one, on rank 0: .*, or register it with class C",
        ),
        (halves, {}, "splits backwards; register it with splits=True"),
        (one_rank_more, {}, "has actions for 3 ranks, but stages on 2"),
        (of_gpipe(forwards), {}, "BACKWARD stage 0, micro-batch 0: it never happens"),
        (of_gpipe(forwards), {"two_bp": True}, "BACKWARD stage 0, micro-batch 0: it never happens"),
        (of_gpipe(forwards), {"vocabulary": 1}, "BACKWARD stage 0, micro-batch 0: it never happens"),
        (of_gpipe(unknown_kind), {}, "rank 0, action 0: 99 is not a kind of action"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("own_registry")
def test_a_wrong_generator_says_what_to_change(
    generate: Callable[[int, int], Sections], options: dict[str, Any], message: str
) -> None:
    schedule("own", "A", takes_two_bp=True)(generate)
    with pytest.raises(ScheduleError, match=message):
        build("own", 2, 3, **options)


@pytest.mark.usefixtures("own_registry")
def test_a_wrong_registration_says_what_to_change() -> None:
    schedule("reversed", "C")(of_gpipe(backwards_reversed))
    assert build("reversed", 2, 3).header.numerical_class == "C"
    for name, numerical_class, message in (
        ("two words", "A", "use only letters, digits and underscores"),
        ("fine", "D", "with class 'D'; use A, B or C"),
        ("1f1b", "A", "schedule '1f1b' is registered twice, by"),
    ):
        with pytest.raises(ScheduleError, match=message):
            schedule(name, numerical_class)(halves)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gpipe", "zb_h1", "2bw"])
@pytest.mark.usefixtures("own_registry")
def test_a_registered_copy_is_built_for_evaluation_too(name: str) -> None:
    built_in = GENERATORS[name]

    def copied(num_ranks: int, num_microbatches: int) -> Sections:
        return order(name, num_ranks, num_microbatches).sections

    schedule("copied", "C", splits=built_in.splits, policy=built_in.policy)(copied)
    for mode in ("train", "forward"):
        actual, wanted = (build(each, 2, 4, mode=mode) for each in ("copied", name))
        for section in SECTIONS:
            assert all(map(np.array_equal, actual.sections[section], wanted.sections[section]))


@pytest.mark.usefixtures("installed")
def test_planner_takes_the_name() -> None:
    run = ["--model", "gpt2_1.5b", "--hardware", "h100", "--devices", "8", "--batch.global_size", "32"]
    run += ["--parallel.pipeline", "4"]
    predicted = json_of("predict", *run, "--schedule.name", "last_in_first_out")
    assert predicted["layout"]["schedule"] == "last_in_first_out"
    report = json_of("search", *run, "--schedules", "last_in_first_out")["search"]
    assert report["best"]["layout"]["schedule"] == "last_in_first_out"
    assert any("half_gone cannot be loaded" in each for each in report["not_searched"])


@pytest.mark.slow
def test_training_takes_the_name(packages: Path, tmp_path: Path) -> None:
    losses, corpus = {}, write_shard(tmp_path)
    for name in ("last_in_first_out", "1f1b"):
        folder = tmp_path / name
        flags = ["--parallel.pipeline=2", "--training.steps=3", "--training.log_every=1", f"--schedule.name={name}"]
        flags += [f"--data.prefix={corpus}", f"--training.directory={folder}"]
        done = launch_with_torchrun(2, *flags, folder=tmp_path, PYTHONPATH=f"{ROOT}:{packages}")
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert name in done.stdout
        losses[name] = [each["loss"] for each in steps(folder)]
    assert losses["last_in_first_out"] == pytest.approx(losses["1f1b"], abs=1e-5)
    assert len(losses["1f1b"]) == 3


@pytest.mark.usefixtures("installed")
def test_library_takes_the_name() -> None:
    layers = adoptable(2)
    assert_close(merged(run_threads({"pipeline": 2}, train, layers, "last_in_first_out", 4)), plain(layers, 4))
