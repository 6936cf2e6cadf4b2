"""The parts of `make gpu-check`: limits, what is told of each, and one benchmark of each kind on a processor."""

import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import Part, benchmark_parts, detail, run, run_all


def part(name: str, *programs: str, seconds: float = 20.0) -> Part:
    return Part(name, [[sys.executable, "-c", program] for program in programs], seconds)


def test_a_part_runs_its_commands_at_once(tmp_path: Path) -> None:
    """Each waits for all."""
    program = (
        "import os, pathlib, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "(folder / str(os.getpid())).touch()\n"
        "while len(list(folder.iterdir())) < 4: time.sleep(0.05)\n"
        "print('done')\n"
    )
    outcome = run(part("four", *[program] * 4), 30)
    assert (outcome.result, outcome.detail) == ("ok", "done; done; done; done")


def test_a_failure_is_told() -> None:
    outcome = run(part("bad", "print('fine')", "raise SystemExit('broken')"), 30)
    assert (outcome.result, outcome.detail) == ("FAILED", "fine; broken")


def test_what_exceeds_its_limit_is_stopped_with_its_children() -> None:
    child = "import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', '{}'])"
    outcome = run(part("slow", child.format("import time; time.sleep(60)")), 4)
    assert (outcome.result, outcome.detail) == ("stopped", "after 4 s: begun")
    assert outcome.seconds < 40


def test_time_left_over_goes_on_and_time_overdrawn_is_missed() -> None:
    parts = [part("first", "pass", seconds=4.0), part("second", "import time; time.sleep(60)", seconds=0.1)]
    outcomes = run_all(parts, 4.5)
    results = [outcome.result for outcome in outcomes]
    assert results == ["ok", "stopped"]
    assert outcomes[1].seconds > 0.2  # more than its own, since the first left some over
    assert sum(outcome.seconds for outcome in outcomes) < 40
    late = run_all(parts, 0.0)
    assert [outcome.detail for outcome in late] == ["before it began: the time was up"] * 2


def test_details() -> None:
    assert detail('{"summary": "1 token/s"}') == "1 token/s"
    assert detail("3 passed in 1.0s") == "3 passed in 1.0s"
    assert detail('{"summary": "so far"}\ncompiling\n{"summary": "cut o') == "so far"
    assert detail("") == ""


def test_what_was_told_before_a_stop_is_kept(tmp_path: Path) -> None:
    """In the table, and in a report that stands before the next part begins."""
    program = (
        "import time; print('{\"summary\": \"one of two\"}', flush=True); print('more', flush=True); time.sleep(60)"
    )
    report = tmp_path / "report.md"
    reader = f"print(open({str(report)!r}).read().count('after 4 s: one of two'))"
    stopped = Part("train_step, toy", [[sys.executable, "-c", program]], 4.0)
    outcomes = run_all([stopped, part("reader", reader)], 24.0, report)
    assert [outcome.detail for outcome in outcomes] == ["after 4 s: one of two", "1"]
    assert "## train_step, toy\n\n```\nmore\n```" in report.read_text("utf-8")
    assert "reader" in report.read_text("utf-8")


def test_much_output_stalls_nobody() -> None:
    """More than a pipe holds, from the second while the first is waited for, which waits for the second."""
    waits = "import os, time\nwhile not os.path.exists(path := {!r}): time.sleep(0.05)"
    with tempfile.TemporaryDirectory() as folder:
        done = str(Path(folder, "done"))
        talks = f"print('x' * 1_000_000); open({done!r}, 'w')"
        assert run(part("talk", waits.format(done), talks), 30).result == "ok"


def test_commands_see_the_repository_and_their_own_time() -> None:
    """Without an installation."""
    program = "import megapipe, sys; print(megapipe.__file__, sys.argv[1])"
    outcome = run(Part("where", [[sys.executable, "-c", program, "{seconds}"]], 30, spare=12), 30)
    assert outcome.detail == f"{gpu_check.ROOT / 'megapipe' / '__init__.py'} 18"


def test_the_parts_fit_and_name_every_marked_file() -> None:
    tests = gpu_check.tests_parts()
    assert sum(each.seconds for each in [*tests, *benchmark_parts("cuda", None)]) <= gpu_check.ALL_SECONDS < 480
    named = " ".join(argument for part in tests for command in part.commands for argument in command)
    marked = [path for path in Path(gpu_check.ROOT, "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    assert len(marked) > 8
    for path in marked:
        assert named.count(str(path.relative_to(gpu_check.ROOT))) == 1


@pytest.mark.slow
def test_the_whole_runs_on_a_processor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device", "cpu"])
    assert gpu_check.main() == 0
    table = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split()[0] for line in table] == ["kernel_speed,", "train_step,"]
