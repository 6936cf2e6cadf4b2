"""`megapipe runs`: what it prints of a small run, and that no content of a run folder makes it fail."""

import json
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.cli.run_curves import Curve, svg
from megapipe.cli.run_reader import KILLED, Run, read_run
from megapipe.cli.runs import main
from megapipe.config.run import PretrainConfig
from megapipe.training.observe.metrics import METRICS, RUN, MetricsFile, read_losses
from megapipe.training.observe.records import RANKS, SAVE_WAIT, TIME_PARTS
from tests.support.gpt_runs import GPT2_SHAPE, make_config, train_alone, write_shard
from tests.training.records import evaluation_record, step_record

CONFIG = {
    "model": {"num_layers": 4, "hidden_size": 64},
    "optimizer": {"learning_rate": 1e-3},
    "training": {"steps": 20, "directory": "somewhere"},
}
FIRST = 1_700_000_000.0


def write_run(folder: Path, learning_rate: float = 1e-3) -> Path:
    """A run that was killed after step 8, continued from step 6, went back once, and finished after step 20."""
    folder.mkdir(parents=True)
    clock = [FIRST]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: clock[0])
        file = MetricsFile(folder)
        event = file.event

        def steps(first: int, last: int, **fields: Any) -> None:
            for step in range(first, last + 1):
                clock[0] += 0.5
                file.step(step_record(step, **fields))

        about = {
            "config": CONFIG | {"optimizer": {"learning_rate": learning_rate}},
            "layout": {"data": 1, "pipeline": 2, "context": 1, "tensor": 1},
            "schedule": "1f1b",
            "parameters": 1_234_567,
        }
        event("start", run="first", step=0, total_samples=80, **about)
        steps(1, 6)
        event("checkpoint", step=6, path="checkpoints/step-00000006")
        event(SAVE_WAIT, step=6, seconds=0.25)
        steps(7, 8)
        clock[0] += 60.0
        event("start", run="second", step=6, total_samples=80, **about)
        event("other_data", step=6, differences=["data.seed: 1 became 2"])
        steps(7, 9)
        steps(10, 10, skipped=True, loss=float("nan"))
        event("rewind", step=6, spiked=9, loss=9.5, limit=6.0, first=36, stop=40)
        steps(7, 20, loss=3.25)
        parts = {part: [0.1, 0.3] for part in TIME_PARTS}
        event(RANKS, step=20, **parts, peak_bytes=[1_000_000_000, 3_000_000_000])
        file.evaluation(evaluation_record(20))
        clock[0] += 1.5
        event("end", run="second", status=0, step=20)
        file.close()
    starts = [
        {"id": "first", "command": "a", "start": "2023-11-14T22:13:20Z", "end": None, "status": "running, or killed"},
        {"id": "second", "command": "b", "start": "2023-11-14T22:14:24Z", "end": "2023-11-14T22:14:37Z",
         "status": "finished"},
    ]  # fmt: skip
    (folder / RUN).write_text(json.dumps({"starts": starts}))
    return folder


SHOWN = """\
mine: finished
  started     2023-11-14 22:13
  duration    17 s
  parameters  1.23M
  layout      pipeline 2
  schedule    1f1b
  steps       20/20
  tokens      640
  loss        3.2500
  held-out    4.2500
  tokens/s    64
  MFU         25.0%

configuration
  model.num_layers=4, model.hidden_size=64, optimizer.learning_rate=0.001, training.steps=20

starts (UTC)
  first   2023-11-14 22:13  4 s   steps 1 to 8   killed (no end was recorded)
  second  2023-11-14 22:14  13 s  steps 7 to 20  finished

time
  step 500 ms (mean of the last 20, at most 100)
  wait for samples 100 ms, 20.0% of a step
  parts of step 20: mean, minimum, maximum over 2 rank(s)
    forward          200 ms    100 ms    300 ms
    backward         200 ms    100 ms    300 ms
    optimizer        200 ms    100 ms    300 ms
    communication    200 ms    100 ms    300 ms
    waiting          200 ms    100 ms    300 ms
  all starts: steps 13.0 s, evaluations 1.50 s, saves 250 ms, start-up and other 2 s

memory
  peak per rank: 1.0 GB to 3.0 GB (rank 1), up to step 20

events
  1 save, the last after step 6; skipped updates: 1
  step 0: start first
  step 6: start second
  step 6: continued on other data: data.seed: 1 became 2
  step 10: the loss or the gradients were not finite; the update was skipped
  step 6: the loss jumped up to 9.5000 at step 9: back to the checkpoint
  step 20: finished
"""

LISTED = """\
run   status    started           duration  parameters  layout      schedule  steps  tokens  loss    held-out  tokens/s  MFU
mine  finished  2023-11-14 22:13  17 s      1.23M       pipeline 2  1f1b      20/20  640     3.2500  4.2500    64        25.0%
"""  # noqa: E501


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """In a folder with a run, what a command prints that warns of nothing."""
    write_run(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)

    def printed(words: str) -> str:
        assert main(words.split()) == 0
        output, errors = capsys.readouterr()
        assert errors == ""
        return output

    return printed


def test_show_and_list_print_a_small_run(
    tmp_path: Path, shown: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown("show mine") == SHOWN
    assert shown("list mine") == LISTED
    (listed,) = json.loads(shown("list mine --json"))
    assert (listed["status"], listed["steps"], listed["problems"]) == ("finished", 20, [])
    assert json.loads(shown("show mine --json"))["config"]["training.steps"] == 20
    (tmp_path / "runs").mkdir()
    shutil.move(tmp_path / "mine", tmp_path / "runs/group/mine")
    assert "runs/group/mine  finished" in shown("list"), "runs/ and folders in it are searched"
    (tmp_path / "empty").mkdir()
    assert main(["list", "empty"]) == 0
    assert "empty has no runs" in capsys.readouterr().err


def test_compare_and_plot_show_differences_alone(tmp_path: Path, shown: Callable[[str], str]) -> None:
    write_run(tmp_path / "<b>other", learning_rate=2e-3)
    compared = json.loads(shown("compare mine <b>other --json"))
    assert compared["differences"] == {"optimizer.learning_rate": [0.001, 0.002]}
    assert [each["loss"] for each in compared["runs"]] == [3.25, 3.25]
    assert shown("compare mine mine").endswith("the configurations are equal\n")
    shown("plot mine <b>other --over tokens --html page.html --svg p.svg")
    page = (tmp_path / "page.html").read_text()
    assert "//" not in page.replace("http://www.w3.org/2000/svg", ""), "nothing is loaded from elsewhere"
    assert "<b>" not in page
    assert "prefers-color-scheme:dark" in page
    root = ElementTree.parse(tmp_path / "p.svg").getroot()
    lines = [each.attrib["points"].split() for each in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert [len(line) for line in lines] == [20, 20]
    (curve,) = json.loads(shown("plot mine --json --over tokens"))
    assert [x for x, _ in curve["training"]] == [32.0 * step for step in range(1, 21)]
    assert curve["validation"] == [[640.0, 4.25]]
    assert "a  mine" in shown("plot mine --over time")


def test_the_axis_of_a_short_run_has_whole_steps(tmp_path: Path) -> None:
    curve = Curve("mine", np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.5, 2.0]), np.zeros(0), np.zeros(0))
    texts = re.findall(r'text-anchor="middle">([^<]*)<', svg([curve], "steps", standalone=True))
    assert texts == ["1", "2", "3", "step", "loss (nats per token)"]
    assert "1.5" in svg([curve], "time", standalone=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("whole") / "mine")


def all_commands_work(folder: Path) -> Run:
    for command in ("list", "show", "compare", "plot"):
        for extra in ([], ["--json"]):
            assert main([command, str(folder), *extra]) == 0
    return read_run(folder)


@settings(max_examples=30)
@given(kept=st.floats(0, 1), kept_starts=st.floats(0, 1))
def test_any_truncation_is_read(whole: Path, kept: float, kept_starts: float) -> None:
    folder = whole.parent / "cut"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, share in ((METRICS, kept), (RUN, kept_starts)):
        content = (whole / name).read_bytes()
        (folder / name).write_bytes(content[: round(share * len(content))])
    run = all_commands_work(folder)
    assert not any("not a JSON object" in problem for problem in run.problems), "an incomplete last line is no damage"
    assert run.history == read_losses(folder / METRICS)
    latest: list[int] = []
    for line in (folder / METRICS).read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("event") in ("start", "rewind", None):
            latest = [step for step in latest if step <= record["step"]]
            latest += [record["step"]] * ("event" not in record)
    assert sorted(run.steps) == latest
    assert [each.status for each in run.starts[:-1]] == [KILLED] * (len(run.starts) - 1)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "steps"]), inner, max_size=2),
    max_leaves=4,
)
FIELDS = ("event", "run", "step", "time", "loss", "tokens", "seconds", "data_seconds", "mfu", "skipped", "config",
          "layout", "schedule", "parameters", "error", "status", "differences", "spiked", "first", "stop",
          "peak_bytes", *TIME_PARTS)  # fmt: skip
names = st.sampled_from(FIELDS)
events = st.sampled_from(
    ["start", "evaluation", "checkpoint", "rewind", "end", "failed", "other_data", RANKS, SAVE_WAIT, "skipped_samples"]
)
lines = st.one_of(
    st.binary(max_size=20),
    st.builds(
        lambda record, event: json.dumps(record | ({"event": event} if event else {})).encode(),
        st.dictionaries(names, values, max_size=8),
        st.none() | events,
    ),
    st.sampled_from(
        [b'{"event": "start", "run": "a", "step": 3, "time": 1e99}', b"[" * 5000, b'{"step": 1, "loss": 2.0}']
    ),
)


@settings(max_examples=30)
@given(st.lists(lines, max_size=12), st.one_of(st.binary(max_size=9), values.map(lambda v: json.dumps(v).encode())))
def test_any_content_is_read(tmp_path_factory: pytest.TempPathFactory, records: list[bytes], starts: bytes) -> None:
    folder = tmp_path_factory.mktemp("foreign")
    (folder / METRICS).write_bytes(b"\n".join(records))
    (folder / RUN).write_bytes(starts)
    all_commands_work(folder)


def test_each_problem_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "mine")
    with (folder / METRICS).open("ab") as file:
        file.write(b'\x1b[2J garbage\n[]\n{"event": "failed", "error": "\\u001b[2J"}\n')
    (folder / RUN).write_text("{")
    assert main(["list", str(folder)]) == 0
    shown, problems = capsys.readouterr()
    assert "failed: ?[2J" in shown
    assert "\x1b" not in shown + problems
    assert len(problems.splitlines()) == 2
    assert f"{METRICS} has 2 lines that are not a JSON object; the other lines were read" in problems
    assert f"{RUN} is not readable JSON" in problems
    page = str(tmp_path / "page.html")
    for arguments, reason in (
        (["show", str(tmp_path / "none")], "does not exist"),
        (["plot", str(tmp_path)], "is not a run"),
        (["list", str(tmp_path / "none")], "cannot read"),
        (["plot", str(folder), "--html", page, "--png", str(tmp_path / "none/p.png")], "none does not exist"),
        (["plot", str(folder), "--html", "/dev/full"], "cannot write the picture: No space left on device"),
    ):
        assert main(arguments) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("error: ")
        assert reason in last
    assert not Path(page).exists()  # no picture, if another one cannot be written


@pytest.mark.parametrize("losses", [[1e-320, 0.0], [1e15, 1e15 + 0.125], [2.0], [1e99, -1e99], []], ids=str)
def test_any_losses_are_drawn(tmp_path: Path, losses: list[float]) -> None:
    (tmp_path / "config.yaml").write_text("training: {steps: .nan, 2020-01-01: [{2020-01-01: .inf}]}")
    file = MetricsFile(tmp_path)
    for step, loss in enumerate(losses, 1):
        file.step(step_record(step, loss=loss, seconds=1e-320))
    file.event("end", status=0, step=len(losses))
    file.close()
    for over in ("steps", "tokens", "time"):
        for words in ([], ["--svg", str(tmp_path / "p.svg")]):
            assert main(["plot", str(tmp_path), "--over", over, *words]) == 0
    all_commands_work(tmp_path)


@pytest.mark.slow
def test_long_runs_are_listed_in_seconds_without_torch(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    with (folder / METRICS).open("w") as file:
        file.write('{"event": "start", "run": "first", "step": 0, "time": 1.0}\n')
        text = json.dumps(vars(step_record(1)))
        file.writelines(text.replace('"step": 1', f'"step": {step}') + "\n" for step in range(1, 100_001))
    program = (
        "import sys, time\nfrom megapipe.cli.runs import main\nbegin = time.perf_counter()\n"
        "status = main(sys.argv[1:])\nassert 'torch' not in sys.modules\n"
        "print(time.perf_counter() - begin)\nsys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program, "list", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "  100,000  " in done.stdout
    assert float(done.stdout.splitlines()[-1]) < 5, "about 0.7 s on an idle core"


@pytest.mark.slow
def test_training_measures_step_parts_and_memory(tmp_path: Path) -> None:
    corpus = write_shard(tmp_path / "corpus")
    config: PretrainConfig = make_config(
        corpus,
        GPT2_SHAPE,
        reliability={"stragglers_every": 2},
        training={"directory": str(tmp_path / "run"), "steps": 6},
    )
    assert train_alone(config) == 0
    run = all_commands_work(tmp_path / "run")
    assert (run.problems, run.status, run.last_step) == ([], "finished", 6)
    assert run.ranks_step == 5
    measured = run.steps[5]
    assert measured.seconds is not None
    assert 0 < sum(run.ranks[part][0] for part in TIME_PARTS) < measured.seconds
    assert min(run.ranks[part][0] for part in ("forward", "backward", "optimizer")) > 0
    assert run.ranks["peak_bytes"][0] > 1e7
    assert all(0 < (each.data_seconds or 0) < (each.seconds or 0) for each in run.steps.values())
    assert run.num_saves == 1
    assert run.save_seconds > 0
    assert run.parameters == (61 + 16) * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32
