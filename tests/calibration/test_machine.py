"""Profiling a machine: what it writes, what it asks, and what its fit makes of known lines."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapipe.calibration.collectives import Call, fitted
from megapipe.calibration.machine import measured_bandwidth, measured_products, on_ranks, profile
from megapipe.calibration.planning import memory_bytes
from megapipe.config import ConfigError
from megapipe.layout.hardware.description import load_hardware
from megapipe.parallel.groups import CommunicationError
from megapipe.planner.cost.model import estimate, predict
from megapipe.planner.measured import shape_of
from tests.calibration.test_layers import CONFIG
from tests.faults.jobs import children_of, wait_for_the_end
from tests.support.launch import ROOT
from tests.support.patience import wait_until

CPU = torch.device("cpu")


@given(latency=st.floats(0.0, 1e-2), rate=st.floats(1e6, 1e11), busy=st.floats(0.0, 1.0))
def test_a_line_is_found_again(latency: float, rate: float, busy: float) -> None:
    timings = {}
    for size in (2**12, 2**16, 2**20, 2**23):
        seconds = latency + size / rate
        timings[size] = Call(seconds, busy * seconds)
    row = fitted("all_reduce", 2, "gloo", timings)
    assert row.busy == pytest.approx(busy)
    for size, call in timings.items():
        assert row.seconds(size) == pytest.approx(call.seconds, rel=1e-6)


def test_superlinear_times_make_no_negative_latency() -> None:
    row = fitted("send", 2, "nccl", {2**12: Call(1e-6, 1e-6), 2**20: Call(1e-1, 1e-3), 2**23: Call(2.0, 1.0)})
    assert row.latency == 0.0
    assert row.bandwidth > 0.0
    assert row.busy == 0.0  # a GPU's own


def test_a_device_multiplies_and_copies() -> None:
    products = measured_products("fp32", CPU)
    assert len({each[:3] for each in products}) == len(products)
    assert min(each.seconds for each in products) > 0.0
    assert measured_bandwidth(CPU) > 1e7
    assert memory_bytes(CPU, 4) == memory_bytes(CPU, 1) // 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks is 0; it must be 1 or more"),
        ({"micro_sizes": [1, 0]}, "micro size is 0; it must be 1 or more"),
        ({"tensor_sizes": []}, "no tensor size is given; pass at least one"),
        ({"tensor_sizes": [3]}, "3"),
        ({"context_sizes": [3]}, r"data\.sequence_length 16 is not divisible by 6"),
        ({"out": Path(__file__) / "machine.yaml"}, "is not a writable folder; choose another file"),
        ({"out": Path("/proc/machine.yaml")}, "/proc is not a writable folder; choose another file"),
        ({"out": Path("machine")}, r"machine is not a name of a hardware file; choose one that ends in \.yaml"),
    ],
)
def test_unmeasurable_machines_are_refused_before_any_measurement(arguments, message, tmp_path) -> None:  # type: ignore[no-untyped-def]
    lines: list[str] = []
    given = {"out": tmp_path / "machine.yaml", "ranks": 2, "tensor_sizes": [1], "micro_sizes": [1], **arguments}
    with pytest.raises(ConfigError, match=message):
        profile(CONFIG, say=lines.append, **given)
    assert not lines


@pytest.mark.slow
def test_a_profile_is_what_the_planner_then_answers_from(tmp_path: Path) -> None:
    out, lines = tmp_path / "new" / "machine.yaml", []
    config = replace(CONFIG, parallel=replace(CONFIG.parallel, device="cpu"))
    hardware = profile(config, out, ranks=2, tensor_sizes=[1, 2], micro_sizes=[1, 2], say=lines.append, steps=1)
    assert load_hardware(str(out)) == hardware
    measured = hardware.measured
    assert measured is not None
    assert measured.shape == shape_of(config)
    assert len(measured.layers) == 3 * 2 * 2
    assert [each.ranks for each in measured.contention] == [1, 2]
    rows = hardware.groups[0].inside.collectives
    assert [(row.operation, row.over) for row in rows] == [
        ("all_reduce", "gloo"), ("all_gather", "gloo"), ("reduce_scatter", "gloo"), ("all_to_all", "gloo"),
        ("send", "shared_memory"), ("send", "gloo"),
    ]  # fmt: skip
    run = replace(config, parallel=replace(config.parallel, data=1, tensor=2))
    run.batch = replace(run.batch, global_size=4)
    prediction = predict(run, hardware).estimate
    assert any("measured" in term.source for term in prediction.terms)
    assert 0.0 < prediction.step_seconds < 10 * estimate(run, hardware).step_seconds
    assert not list(out.parent.glob("*.partial"))


def fail_on_the_last(mesh, number: int) -> int:  # type: ignore[no-untyped-def]
    if mesh.rank == mesh.world_size - 1 and number < 0:
        raise ValueError(f"no root of {number}")
    return number + mesh.rank


@pytest.mark.slow
def test_ranks_answer_in_order_and_failures_name_their_rank() -> None:
    assert on_ranks(2, "cpu", fail_on_the_last, 5) == [5, 6]
    with pytest.raises(CommunicationError, match=r"(?s)rank 1 of 2 measuring ranks failed.*no root of -1"):
        on_ranks(2, "cpu", fail_on_the_last, -1)


@pytest.mark.exhaustive
def test_the_benchmark_compares_predictions_with_runs(tmp_path: Path) -> None:
    """One layout from a file of one's own: a machine that was not measured for this model says so."""
    table, script = tmp_path / "table.md", str(ROOT / "benchmarks" / "plan_truth.py")
    flags = ["--hardware", "cpu", "--steps", "5", "--starts", "1", "--layouts", "data 2", "--write", str(table)]
    done = subprocess.run(
        [sys.executable, script, *flags],
        capture_output=True, text=True, timeout=300, check=True, cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    facts = json.loads(done.stdout.splitlines()[-1])
    assert [each["name"] for each in facts["layouts"]] == ["data 2"]
    assert min(each["measured"] for each in facts["layouts"]) > 0.0
    assert facts["median_error"] >= 0.0
    (line,) = [each for each in table.read_text().splitlines() if each.startswith("| data 2 |")]
    assert line.endswith("| roofline |")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_a_profile_without_files_or_processes(tmp_path: Path, number: signal.Signals) -> None:
    flags = [f"--{name}={value}" for name, value in {"output": tmp_path / "machine.yaml", "ranks": 2}.items()]
    model = ["--config", str(ROOT / "examples" / "quickstart.yaml"), "--training.precision=fp32"]
    environment = dict(os.environ, TMPDIR=str(tmp_path))
    program = subprocess.Popen(
        [sys.executable, str(ROOT / "tools" / "plan.py"), "profile", *model, *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert program.stdout is not None
    assert "one cpu rank" in program.stdout.readline()
    wait_until(lambda: list(tmp_path.glob("megapipe-profile-*")))
    wait_until(lambda: children_of(program.pid))
    ranks = children_of(program.pid)
    program.send_signal(number)
    _, message = program.communicate(timeout=60)
    if number == signal.SIGKILL:
        assert program.returncode == -number
        assert not (tmp_path / "machine.yaml").exists()
    else:
        assert program.returncode == 128 + number
        assert message.strip() == f"error: stopped by {number.name}; {tmp_path / 'machine.yaml'} was not written"
        assert list(tmp_path.iterdir()) == []
    wait_for_the_end(ranks)
