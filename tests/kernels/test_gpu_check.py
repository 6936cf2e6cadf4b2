"""The parts of `make gpu-check`: limits, restarts, preferences, the report, and one of each kind on a processor. The
checks of several ranks run here with threads as ranks, and can fail."""

import getpass
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_check, ranks_check
from benchmarks.gpu_check import Outcome, Part, Progress, benchmark_parts, detail, measured_preferences, run, run_all
from benchmarks.ranks_check import Check, Different, check_groups, check_links, checks, compared
from megapipe.kernels import preferences
from megapipe.kernels.cuda_backend import build, library
from megapipe.kernels.ops import OPS
from megapipe.parallel.in_process import InProcessLink, ThreadGroup, in_process_meshes, run_in_process
from tests.faults.jobs import wait_for_the_end
from tests.kernels import apex_stand_in
from tests.schedules.support import TRAINED


def part(name: str, *programs: str, seconds: float = 20.0) -> Part:
    return Part(name, [[sys.executable, "-c", program] for program in programs], seconds)


def test_commands_of_a_part_run_at_once(tmp_path: Path) -> None:
    """Each waits for all, and all print more than a pipe holds."""
    program = (
        "import os, pathlib, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "print('x' * 200_000)\n"
        "(folder / str(os.getpid())).touch()\n"
        "while len(list(folder.iterdir())) < 4: time.sleep(0.05)\n"
        "print('done')\n"
    )
    outcome = run(part("four", *[program] * 4), 30)
    assert (outcome.result, outcome.detail) == ("ok", "done; done; done; done")


def test_a_failure_is_reported_with_its_last_line() -> None:
    """Commands see the repository without an installation, and the time that is left to them."""
    program = "import megapipe, sys; print(megapipe.__file__, sys.argv[1])"
    commands = [[sys.executable, "-c", program, "{seconds}"], [sys.executable, "-c", "raise SystemExit('broken')"]]
    outcome = run(Part("bad", commands, 30, spare=12), 30)
    assert outcome.result == "FAILED"
    assert outcome.detail == f"{gpu_check.ROOT / 'megapipe' / '__init__.py'} 18; broken"


def test_parts_over_their_limit_stop_with_their_children(tmp_path: Path) -> None:
    """The table, and a report that is written before the next part starts, have what the part had printed."""
    child = "import subprocess, sys; print('{\"summary\": \"one of two\"}', flush=True); print('more', flush=True); "
    child += "subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    report = tmp_path / "report.md"
    reader = f"print(open({str(report)!r}).read().count('after 4 s: one of two'))"
    stopped = Part("train_step, toy", [[sys.executable, "-c", child]], 4.0)
    outcomes = run_all([stopped, part("reader", reader)], 24.0, report)
    assert [outcome.detail for outcome in outcomes] == ["after 4 s: one of two", "1"]
    assert outcomes[0].seconds < 20
    assert "## train_step, toy\n\n```\nmore\n```" in report.read_text("utf-8")
    assert "reader" in report.read_text("utf-8")


def test_details() -> None:
    for unchanged in ("3 passed in 1.0s", ""):
        assert detail(unchanged) == unchanged
    assert detail('{"summary": "so far"}\ncompiling\n{"summary": "cut o') == "so far"


def test_the_parts_fit_and_name_every_marked_file() -> None:
    tests = gpu_check.tests_parts()
    assert sum(each.seconds for each in [*tests, *benchmark_parts("cuda", None)]) <= gpu_check.ALL_SECONDS < 480
    named = " ".join(argument for part in tests for command in part.commands for argument in command)
    marked = [path for path in Path(gpu_check.ROOT, "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    assert len(marked) > 8
    for path in marked:
        assert named.count(str(path.relative_to(gpu_check.ROOT))) == 1


SETTING = {"device": "a GPU", "versions": "torch 2"}


class Runs:
    """Parts that take `seconds`, by name, of a clock that nothing else moves. results: of those that end in time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
        self.seconds, self.results, self.now = seconds, dict[str, str](), 0.0
        self.started: list[str] = []
        monkeypatch.setattr(gpu_check, "run", self._run)
        monkeypatch.setattr(gpu_check, "time", SimpleNamespace(monotonic=lambda: self.now))

    def _run(self, chosen: Part, limit: float) -> Outcome:
        self.started.append(chosen.name)
        taken = min(limit, self.seconds[chosen.name])
        self.now += taken
        result = "stopped" if taken < self.seconds[chosen.name] else self.results.get(chosen.name, "ok")
        return Outcome(chosen.name, result, "", taken)


def test_a_part_may_use_what_others_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [part("first", seconds=4.0), part("second", seconds=0.5), part("third", seconds=1.0)]
    Runs(monkeypatch, first=1.0, second=60.0, third=60.0)
    results = [(outcome.result, outcome.seconds) for outcome in run_all(parts, 6.0)]
    assert results == [("ok", 1.0), ("stopped", 4.0), ("stopped", 1.0)]
    assert [outcome.detail for outcome in run_all(parts, 0.0)] == ["not started: no time was left"] * 3


def test_a_restart_repeats_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After parts that passed, failed, were stopped or had no time, and one that was running when the check ended."""
    names = ("good", "bad", "slow", "killed", "last")
    parts, file = [part(name, seconds=3.0) for name in names], tmp_path / "progress.json"
    runs = Runs(monkeypatch, good=1.0, bad=1.0, slow=60.0, killed=1.0, last=1.0)
    runs.results["bad"] = "FAILED"
    run_all(parts[:3], 8.0, progress=Progress(file, SETTING))
    Progress(file, SETTING).store(Outcome("killed", "running", "", 0.0))
    assert run_all(parts[4:], 0.0, progress=Progress(file, SETTING))[0].result == "stopped"
    outcomes = run_all(parts, 9.0, progress=Progress(file, SETTING))
    assert [outcome.result for outcome in outcomes] == ["ok", "FAILED", "stopped", "FAILED", "ok"]
    assert outcomes[3].detail == "the check ended while this part was running"
    assert runs.started == ["good", "bad", "slow", "last"]
    runs.seconds["slow"] = 1.0
    outcomes = run_all(parts, 9.0, progress=Progress(file, SETTING), again="failed")
    assert [outcome.result for outcome in outcomes] == ["ok", "FAILED", "ok", "ok", "ok"]
    assert runs.started[4:] == ["bad", "slow", "killed"]
    run_all(parts[:1], 9.0, progress=Progress(file, SETTING), again="all")
    assert runs.started[7:] == ["good"]


@pytest.mark.parametrize(
    ("content", "note"),
    [
        ('{"setting": {"device": "another", "versions": "torch 2"}, "parts": {}}', "another device"),
        ('{"setting": {}, "parts": {}}', "another device, versions"),
        ("half a fi", "cannot be read and is replaced"),
        ("[]", "cannot be read and is replaced"),
        ('{"setting": {"device": "a GPU", "versions": "torch 2"}, "parts": {"one": {"name": 1}}}', "cannot be read"),
    ],
)
def test_results_of_another_setting_are_not_used(tmp_path: Path, content: str, note: str) -> None:
    file = tmp_path / "progress.json"
    file.write_text(content)
    progress = Progress(file, SETTING)
    assert note in (progress.note or "")
    assert progress.finished("one", None) is None
    progress.store(Outcome("one", "ok", "", 1.0))
    assert Progress(file, SETTING).finished("one", None) == Outcome("one", "ok", "", 1.0)


def test_results_from_before_installing_apex_or_nvcc_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that passed without them would be skipped, and their kernels never measured."""
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    monkeypatch.setattr(library, "PATH", Path("not/built"))
    before = gpu_check.setting()
    assert (before["apex"], before["csrc/"]) == ("not installed", "no nvcc")
    monkeypatch.setattr(build, "find_nvcc", lambda: Path("nvcc"))
    apex_stand_in.install(monkeypatch)
    changed = {key for key, value in gpu_check.setting().items() if before[key] != value}
    assert changed == {"apex", "csrc/"}
    monkeypatch.setattr(library, "PATH", Path(__file__))  # built by the check itself
    assert gpu_check.setting()["csrc/"] == "built, or nvcc is there"


def test_the_fastest_backends_of_the_measured_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases are added up, the backward counts, and what failed, is alone or never chosen by itself is left out."""
    forward, both = "forward", "forward+backward"
    entries: list[tuple[str, str, int, dict[str, float | None]]] = [
        ("layer_norm", forward, 1024, {"triton": 1.0, "cuda": 9.0, "apex": 9.0}),
        ("layer_norm", both, 1024, {"triton": 3.0, "cuda": 4.0, "apex": None}),
        ("layer_norm, after a sum", both, 1024, {"triton": 5.0, "cuda": 3.0, "apex": 1.0}),
        ("layer_norm", forward, 8192, {"triton": 1.0, "cuda": 2.0, "torch.compile": 0.1}),
        ("softmax, plain", forward, 64, {"triton": 2.0, "cuda": 3.0, "apex": 1.0}),
        ("gelu", forward, 64, {"triton": 2.0}),
    ]
    figures = []
    for case, direction, width, times in entries:
        common = {"case": case, "op": case.partition(",")[0], "rows": 8, "direction": direction}
        for name, seconds in times.items():
            figures.append({**common, "contestant": name, "seconds": seconds, "picked": ["bfloat16", width]})
    output = "a line\n" + json.dumps({"benchmark": "kernel_speed", "summary": "", "figures": figures})
    measured = measured_preferences(output, "a GPU")
    assert measured is not None
    rows = [(row.op, row.width, row.backends) for row in measured.rows]
    assert rows == [
        ("layer_norm", 1024, ("cuda", "triton")),
        ("layer_norm", 8192, ("triton", "cuda")),
        ("softmax", 64, ("triton", "cuda")),
    ]
    assert preferences.parse(measured.text()) == measured
    assert measured_preferences("no figures", "a GPU") is None
    monkeypatch.setattr(gpu_check, "device_name", lambda: "a GPU")
    gpu_check.write_preferences([Outcome(gpu_check.KERNELS, "ok", "", 1.0, output)], None, tmp_path)
    assert preferences.parse((tmp_path / "kernels_a_gpu.yaml").read_text()).rows == measured.rows
    assert {row.op for row in measured.rows} <= {op.name for op in OPS.ops}


def test_the_report_has_machine_and_failures_but_nothing_private(tmp_path: Path) -> None:
    program = (
        "import sys; [print(f'line {number}.') for number in range(200)]; print(sys.prefix); print(sys.argv); "
        f"print({str(Path.home() / 'x')!r}, {getpass.getuser()!r}); raise SystemExit('broken')"
    )
    report = tmp_path / "report.md"
    run_all([part("bad", program), part("good", "print('quiet')")], 20.0, report)
    text = report.read_text("utf-8")
    for reported in (f"torch {torch.__version__}", "apex: not installed", "## bad", "broken", "line 199."):
        assert reported in text
    private = (str(gpu_check.ROOT), sys.prefix, str(Path.home()), tempfile.gettempdir() + "/")
    for omitted in ("line 100.", "## good", *private):
        assert omitted not in text


def test_names_of_people_and_hosts_are_removed_as_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "anna")
    monkeypatch.setattr(gpu_check.socket, "gethostname", lambda: "node7")
    text = f"anna@node7:{Path.home()}/runs savannah {gpu_check.ROOT}/setup.py"
    assert gpu_check.anonymous(text) == "<user>@<host>:~/runs savannah ./setup.py"


def test_more_gpus_add_a_run_for_each_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert gpu_check.ranks_parts("cuda") == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    parts = gpu_check.ranks_parts("cuda")
    assert [part.name for part in parts[:3]] == ["8 ranks: links", "8 ranks: groups", "8 ranks: 1f1b"]
    assert parts[-1].name == "8 ranks: tensor, pipeline, data"
    assert parts[-1].commands[0][-2:] == ["--checks", "tensor, pipeline, data"]


@pytest.mark.slow
def test_hanging_torchruns_are_stopped_with_their_ranks(tmp_path: Path) -> None:
    program = tmp_path / "hangs.py"
    program.write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path)!r}, 'rank' + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "print('waiting', flush=True)\ntime.sleep(120)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    outcome = run(Part("ranks", [command], 15), 15)
    assert (outcome.result, outcome.detail) == ("stopped", "after 15 s: waiting")
    wait_for_the_end([int((tmp_path / f"rank{rank}").read_text()) for rank in range(2)])


@pytest.mark.slow
def test_the_whole_runs_on_a_processor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device", "cpu"])
    assert gpu_check.main() == 0
    table = capsys.readouterr().out.splitlines()[-3:]
    assert [line.split()[0] for line in table] == ["kernel_speed", "train_step,", "2"]
    assert table[2].startswith("2 ranks on gloo")
    assert table[2].endswith("28 passed")


def run_check(name: str, ranks: int) -> list[str]:
    check = next(check for check in checks(ranks) if check.name == name)
    results: list[str] = run_in_process(in_process_meshes(check.sizes, timeout=20.0), check.run)
    return results


def test_links_and_groups_of_threads() -> None:
    assert run_check("links", 4) == ["36 messages over 12 links"] * 4
    lines = run_check("groups", 4)
    assert "data of 2" in lines[0]
    assert "pipeline of 2" in lines[0]


@pytest.mark.parametrize("name", ["1f1b", "2bw", "ZeRO 2"])
def test_training_equals_one_device(name: str) -> None:
    lines = run_check(name, 2)
    assert lines[0] == lines[1]
    assert "the same bits as one device" in lines[0] or name == "ZeRO 2"


def test_every_schedule_has_a_check() -> None:
    for ranks in (2, 8):
        names = [check.name for check in checks(ranks)]
        assert len(set(names)) == len(names)
        assert set(TRAINED) < set(names)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_a_wrong_collective_is_found(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element is off, in a result or in what was overwritten."""
    right = getattr(ThreadGroup, operation)

    def wrong(self: ThreadGroup, tensor: Tensor, *arguments: Any) -> Any:
        result = right(self, tensor, *arguments)
        changed = result if isinstance(result, Tensor) else tensor
        changed.view(-1)[-1] += 1
        return result

    monkeypatch.setattr(ThreadGroup, operation, wrong)
    with pytest.raises(Different, match="elements are wrong"):
        run_in_process(in_process_meshes({"data": 2}, timeout=20.0), check_groups)


def test_a_wrong_message_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = InProcessLink.send
    monkeypatch.setattr(InProcessLink, "send", lambda self, tensor: right(self, tensor + (self.edge.source == 1)))
    with pytest.raises(Different, match="link 1->0"):
        run_in_process(in_process_meshes({"pipeline": 2}, timeout=20.0), check_links)


def test_losses_that_differ_are_reported() -> None:
    exact = [(4.0, 1.0), (3.5, 2.0)]
    assert compared(exact, exact) == "2 steps, the same bits as one device; losses 4.0000, 3.5000"
    assert "within 5.0e-07 of" in compared([(4.0, 1.0), (3.5, 2.000001)], exact)
    with pytest.raises(Different, match=r"gradient norm 2\.001 on the ranks, 2\.0 on one device"):
        compared([(4.0, 1.0), (3.5, 2.001)], exact)
    with pytest.raises(Different, match="loss nan"):
        compared([(float("nan"), 1.0), (3.5, 2.0)], exact)


def test_a_failure_is_the_last_summary(capsys: pytest.CaptureFixture[str]) -> None:
    (alone,) = in_process_meshes({})
    passing = Check("one", {}, lambda mesh: "all well")
    failing = Check("two", {}, lambda mesh: compared([(1.0, 1.0)], [(2.0, 1.0)]))
    ranks_check.run_checks(alone, [passing])
    assert detail(capsys.readouterr().out) == "all well"
    with pytest.raises(Different):
        ranks_check.run_checks(alone, [passing, failing])
    assert detail(capsys.readouterr().out) == "two, rank 0: loss 1.0 on the ranks, 2.0 on one device"


def test_unknown_checks_and_single_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["ranks_check.py", "--checks", "links"])
    with pytest.raises(SystemExit, match="1 rank was started, and the checks need at least 2"):
        ranks_check.main()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("sys.argv", ["ranks_check.py", "--checks", "linsk"])
    with pytest.raises(SystemExit, match="there is no check 'linsk' for 2 ranks; choose from links; groups; 1f1b"):
        ranks_check.main()
    assert not torch.distributed.is_initialized()
