"""tools/schedule.py as a user runs it."""

import json
from pathlib import Path

import pytest

from megapipe.config import command_line
from megapipe.schedules import GENERATORS, build, dumps
from megapipe.schedules.build import order
from megapipe.schedules.command.main import main

ROOT = Path(__file__).parents[2]


def output(capsys, *arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


def report(capsys, *arguments):
    return json.loads(output(capsys, *arguments, "--json"))


def test_list_names_every_schedule(capsys):
    assert [row["name"] for row in report(capsys, "list")] == list(GENERATORS)
    table = output(capsys, "list")
    assert all(name in table for name in GENERATORS)
    assert "`" not in table
    summaries = [row["summary"] for row in report(capsys, "list")]
    marked = {name for name, text in zip(GENERATORS, summaries, strict=True) if text.startswith("(simulation only) ")}
    assert marked == {"bitpipe", "chimera"}
    starts = {line.index(summary) for line, summary in zip(table.splitlines(), summaries, strict=True)}
    assert len(starts) == 1, "summaries are one column"


def test_a_long_comparison_shows_its_progress(capsys, monkeypatch):
    monkeypatch.setattr(command_line, "SHOWN_AFTER", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert main(["compare", "--schedule", "1f1b,gpipe"]) == 0
    captured = capsys.readouterr()
    assert "1 of 2 schedules" in captured.err
    assert "comparing" not in captured.out


def test_simulate_gives_the_promised_keys(capsys):
    shape = ["--schedule", "1f1b", "--ranks", "4", "--microbatches", "8"]
    figures = report(capsys, "simulate", *shape, "--forward", "1", "--backward", "2")
    assert figures["bubble_rate"] == pytest.approx(0.375 / 1.375)
    expected = {
        "bubble": 0.375, "makespan": 33, "finish": 33, "peak_activations": [4, 3, 2, 1],
        "pending_weight_halves": [0] * 4, "weight_versions": [1] * 4, "exposed_communication": 0,
    }  # fmt: skip
    assert {key: figures[key] for key in expected} == expected


def test_never_flushing_schedules_run_four_steps_by_default(capsys):
    assert report(capsys, "simulate", "--schedule", "2bw")["finish"] == (4 * 8 + 3) * 3
    assert report(capsys, "simulate", "--schedule", "2bw", "--steps", "2")["steps"] == 2


def test_transfers_take_message_over_bandwidth(capsys):
    slow = report(capsys, "simulate", "--message", "10", "--bandwidth", "20")
    late = report(capsys, "simulate", "--latency", "0.5")
    assert slow["makespan"] == late["makespan"] > 33
    assert slow["exposed_communication"] == slow["makespan"] - 33


def lanes(capsys, path, *flags):
    """Names and lanes of the events of a drawn trace."""
    output(capsys, "draw", *flags, "--output", str(path))
    return {(event["name"], event["cat"]) for event in json.loads(path.read_text())["traceEvents"] if "cat" in event}


def test_offloaded_activations_are_copied_and_not_counted(capsys, tmp_path):
    shape = ["--schedule=1f1b", "--ranks=2", "--units=4", "--offload=1", "--offload-time=0.5"]
    figures = report(capsys, "simulate", *shape, "--offload-state", "--offload-state-time=1")
    assert figures["peak_activations"] == [0.5, 0.5]
    drawn = lanes(capsys, tmp_path / "trace.json", *shape, "--prefetch=2")
    assert {"compute", "copy out", "copy in"} <= {lane for _, lane in drawn}


def test_weights_in_host_memory_are_copied_in(capsys, tmp_path):
    shape = ["--schedule=gpipe", "--ranks=1", "--microbatches=1", "--units=4", "--gather-time=4", "--forward=4"]
    figures = report(capsys, "simulate", *shape, "--offload-weights=2")
    assert (figures["weight_gathers"], figures["exposed_communication"]) == ([6], 0.0)
    drawn = lanes(capsys, tmp_path / "trace.json", *shape, "--offload-weights=2")
    assert {lane for name, lane in drawn if name.startswith("gather")} == {"copy in"}


def test_compare_shows_every_schedule_or_why_not(capsys):
    rows = report(capsys, "compare", "--microbatches", "2")
    assert [row["schedule"] for row in rows] == list(GENERATORS)
    errors = {row["schedule"]: row["error"] for row in rows if "error" in row}
    assert set(errors) == {"2bw", "bitpipe", "chimera", "dualpipe_v", "pipedream"}
    assert "use at least 4 micro-batches" in output(capsys, "compare", "--microbatches", "2")


def test_compare_gives_times_per_step_and_marks_the_steps(capsys):
    flags = ("compare", "--schedule", "1f1b,zb_v,2bw")
    rows = report(capsys, *flags)
    assert [row["steps"] for row in rows] == [1, 1, 4]
    title, *lines = output(capsys, *flags).split("\n\n")[0].splitlines()
    assert len(lines) == len(rows)
    for row, line in zip(rows, lines, strict=True):
        cells = dict(zip(title.split(), line.split(), strict=False))
        assert (cells["schedule"], cells["steps"]) == (row["schedule"], str(row["steps"]))
        assert float(cells["time/step"]) == pytest.approx(row["makespan"] / row["steps"], rel=1e-4)


@pytest.mark.parametrize(
    "flags",
    [
        "--schedule interleaved_1f1b --chunks 3 --group-size 5",
        "--schedule 2bw --update eager",
        "--schedule pipedream --vertical_sync",
        "--schedule gpipe --two-bp --max-pending 2",
        "--schedule zb_auto --memory-limit 6 --latency 0.2 --placement linear",
        "--schedule modular --units 2 --weight-buffers 2 --gather-time 0.5",
        "--schedule zb_v --blocking-sends --update-time 0.5 --reduce-time 0.5 --scalars-time 0.1",
    ],
)
def test_options_reach_the_schedules(capsys, flags):
    assert report(capsys, "simulate", *flags.split())["bubble"] >= 0


def test_files_round_trip(capsys, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(output(capsys, "write", "--schedule", "zb_h1"))
    assert report(capsys, "validate", str(path))["canonical_order"] is True
    assert report(capsys, "simulate", "--schedule", str(path))["schedule"] == "zb_h1"
    assert "is valid" in output(capsys, "validate", str(path))


@pytest.mark.parametrize(("flag", "line"), [("--units", "stage 0 rank 0 units 2"), ("--vocabulary", "vocabulary 4 5")])
def test_write_keeps_flags_of_the_header(capsys, flag, line):
    assert line in output(capsys, "write", "--schedule", "1f1b", flag, "2")


def test_write_prints_the_form_that_the_guide_teaches(capsys, tmp_path):
    shape = ("--schedule", "1f1b", "--ranks", "2", "--microbatches", "4")
    guide = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    short = output(capsys, "write", *shape)
    for line in short.splitlines():
        assert line in guide or line.startswith(("name", "class"))
    path = tmp_path / "mine.txt"
    path.write_text(short)
    lowered = output(capsys, "write", "--lowered", *shape)
    assert output(capsys, "write", "--schedule", str(path)) == short
    assert output(capsys, "write", "--lowered", "--schedule", str(path)) == lowered == dumps(build("1f1b", 2, 4))
    assert main(["write", "--recompute", "1", *shape]) == 2
    assert "--recompute only changes the actions that lowering adds" in capsys.readouterr().err


def star(others):
    """A chain of stages that comes back to rank 0 after each other rank: two links with each."""
    ranks = [0] + [rank for other in range(1, others + 1) for rank in (other, 0)]
    lines = ["megapipe schedule 1", "name star", "class A", "microbatches 1"]
    lines += [f"stage {stage} rank {rank}" for stage, rank in enumerate(ranks)] + ["", "body"]
    for rank in range(others + 1):
        stages = [stage for stage, home in enumerate(ranks) if home == rank]
        actions = [f"F{stage}.0" for stage in stages] + [f"B{stage}.0" for stage in reversed(stages)]
        lines.append(f"rank {rank}: {' '.join(actions)}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "key", "value", "words", "says"),
    [
        (dumps(build("1f1b", 2, 4)), "needs_resident_kernels", True, "run on a GPU at once", True),
        (dumps(build("1f1b", 2, 4, mode="forward")), "needs_resident_kernels", False, "on a GPU at once", False),
        (star(16), "links", [2 * 16] + [2] * 16, "training on GPUs refuses this schedule", False),
        (star(17), "links", [2 * 17] + [2] * 17, "training on GPUs refuses this schedule", True),
        (dumps(build("1f1b", 2, 4)), "lazy_links", True, "must be connected before step 1", False),
        (dumps(build("interleaved_1f1b", 2, 4)), "lazy_links", False, "must be connected before step 1", True),
    ],
)
def test_validate_reports_what_a_gpu_needs(capsys, tmp_path, text, key, value, words, says):
    path = tmp_path / "mine.txt"
    path.write_text(text)
    assert report(capsys, "validate", str(path))[key] == value
    assert (words in output(capsys, "validate", str(path))) is says


@pytest.mark.parametrize("suffix", [".svg", ".html", ".json"])
def test_draw_writes_by_suffix(capsys, tmp_path, suffix):
    path = tmp_path / f"drawing{suffix}"
    assert "wrote" in output(capsys, "draw", "--output", str(path))
    assert suffix != ".svg" or ">0 time units<" in path.read_text()
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("simulate --schedule 1f1c", "did you mean '1f1b'"),
        ("simulate --bandwidth 3", "need each other"),
        ("simulate --bandwidth 0 --message 1", "must be above 0"),
        ("simulate --recompute 0", "--recompute is 0; it must be at least 1, or left out"),
        ("simulate --offload=0", "--offload is 0; it must be at least 1"),
        ("simulate --offload-weights=2 --weight-buffers=2", "exclude each other; leave one of the two out"),
        ("simulate --steps 0", "--steps is 0; it must be at least 1"),
        ("simulate --steps 9999999999", "the maximum to simulate is 125,000 steps"),
        ("show --schedule mine.txt", "cannot read mine.txt: No such file or directory; choose a text file"),
        ("simulate --schedule zb_v --placement linear", "places its stages v_shape"),
        ("draw --output picture.png", "must end in .svg, .html, .json"),
        (
            "draw --output /nowhere/picture.svg",
            "cannot write /nowhere/picture.svg: No such file or directory; choose another file",
        ),
        ("validate /nowhere/mine.txt", "cannot read /nowhere/mine.txt: No such file or directory; choose a text file"),
        ("show --ranks 1000 --microbatches 100000", "has 100,000,000 forwards per step; the maximum is"),
        ("compare --microbatches 0", "the number of micro-batches of 1f1b is 0; it must be at least 1"),
        ("compare --schedule zb", "unknown schedule 'zb'"),
        ("compare --schedule 1f1b,,gpipe", "unknown schedule ''"),
        ("compare --schedule 1f1b,1f1c", "did you mean '1f1b'"),
        ("compare --schedule 1f1b,./nowhere.txt", "cannot read nowhere.txt"),
        ("show --ranks 100000000", "has 100,000,000 pipeline ranks; with their communication, the maximum is 2,000"),
        ("write --ranks 100000000", "has 800,000,000 forwards per step; the maximum is 4,000,000"),
        ("write --lowered --ranks 4000000 --microbatches 1", "the maximum is 2,000"),
        ("compare --schedule 1f1b,gpipe --ranks 1000000 --microbatches 1", "the maximum is 2,000"),
        ("simulate --schedule interleaved_1f1b --chunks 1000000000", "forwards per step; the maximum is 4,000,000"),
        ("simulate --ranks 0", "the number of pipeline ranks of 1f1b is 0"),
        (
            "simulate --schedule own.txt --recompute 2",
            "--recompute only changes named schedules, but own.txt is a file",
        ),
        ("compare --schedule own.txt --two-bp", "--two-bp only changes named schedules"),
        ("write --schedule own.txt --vocabulary", "--vocabulary only changes named schedules"),
        (
            "show --schedule own.txt --ranks 3",
            "--ranks is 3, but own.txt is for 2; leave it out, or write a file with",
        ),
        ("validate own.txt --microbatches 8", "--microbatches is 8, but own.txt is for 4"),
        ("simulate --group-time 0.9", "--group-time is 0.9, but 1f1b overlaps no actions; leave it out, or"),
        ("compare --group-time 0.9 --schedule 1f1b,own.txt", "but 1f1b,own.txt overlaps no actions"),
        ("write --forward 3", "--forward is 3, but the order of 1f1b depends on no times; leave it out"),
        ("write --latency 0.5 --lowered", "--latency is 0.5, but the order of 1f1b depends on no times"),
        ("write --backward-weight 2 --schedule own.txt", "but the order of own.txt depends on no times"),
        ("simulate --prefetch 2", "needs --offload; pass both"),
        ("simulate --offload-time 1", "needs --offload; pass both"),
        ("simulate --gather-time 1", "needs --weight-buffers or --offload-weights; pass both"),
        ("simulate --snapshot-time 1", "needs --snapshot; pass both"),
        ("simulate --recompute-time 0", "needs --recompute; pass both"),
        ("simulate --units 1000000000", "the stages have 4,000,000,000 units (layers); the maximum is 4,000,000"),
    ],
)
def test_errors_are_one_line_and_status_2(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("own.txt").write_text(dumps(order("1f1b", 2, 4)))
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
    assert message in error


@pytest.mark.parametrize("flag", ["--forward", "--latency", "--bandwidth", "--memory-limit"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_times_must_be_finite_and_not_negative(capsys, flag, value):
    with pytest.raises(SystemExit) as ended:
        main(["simulate", flag, value])
    assert ended.value.code == 2
    assert f"{flag} is {value}, but must be a finite number of at least 0" in capsys.readouterr().err
