"""Profiling a machine and the links between nodes: what is measured, written and refused."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megapipe.calibration import collectives
from megapipe.calibration.collectives import (
    MESSAGES,
    Call,
    NodeLinks,
    Place,
    fitted,
    measure_node_links,
    rounds,
    with_node_links,
)
from megapipe.calibration.machine import measured_bandwidth, measured_products, on_ranks, profile
from megapipe.calibration.planning import memory_bytes
from megapipe.config import ConfigError
from megapipe.layout.hardware.description import load_hardware, written
from megapipe.parallel.groups import CommunicationError
from megapipe.parallel.mesh import Mesh
from megapipe.planner.cost.model import estimate, predict
from megapipe.planner.measured import shape_of
from tests.calibration.test_layers import CONFIG
from tests.faults.jobs import children_of, wait_for_the_end
from tests.planner.measured.machines import machine
from tests.support.launch import ROOT, environment
from tests.support.patience import wait_until
from tests.support.ranks import free_port

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
        assert row.latency + size / row.bandwidth == pytest.approx(call.seconds, rel=1e-6)


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


FOUND = NodeLinks(("a", "b"), (4, 4), 2e-5, ((0.0, 3e9), (1e9, 0.0)))


@given(st.integers(1, 40))
def test_pairs_meet_once_and_nodes_once_per_round(nodes: int) -> None:
    pairs_of_rounds = rounds(nodes)
    met = [tuple(sorted(pair)) for pairs in pairs_of_rounds for pair in pairs]
    assert sorted(met) == list(combinations(range(nodes), 2))
    assert all(len({*sum(pairs, ())}) == 2 * len(pairs) for pairs in pairs_of_rounds)
    assert len(pairs_of_rounds) == (nodes if nodes % 2 else nodes - 1)


SLOW, FAST = 0.1, 0.001
"""Seconds of a message that node 1 sends, and of one from another node."""


def by_a_clock_of_messages(mesh: Mesh, sizes: tuple[int, ...]) -> NodeLinks:
    """Measure nodes with the given numbers of ranks, by a clock that only a rank's own messages advance."""
    places = [Place(node, f"node{node}", local) for node, size in enumerate(sizes) for local in range(size)]
    own, now, send = places[mesh.rank], 0.0, dist.send

    def timed(*given: Any) -> Any:
        nonlocal now
        now += SLOW if own.node == 1 else FAST
        return send(*given)

    dist.send = timed  # type: ignore[assignment]
    collectives.time = SimpleNamespace(perf_counter=lambda: now)  # type: ignore[assignment]
    return measure_node_links(mesh, own, 2**20)


@pytest.mark.slow
def test_a_slow_node_is_seen_in_what_it_sends() -> None:
    """Each of three nodes is idle in one round. The answer's own time, half of one message's, is subtracted."""
    measured = on_ranks(3, "cpu", by_a_clock_of_messages, (1, 1, 1))
    assert measured[0] == measured[1] == measured[2]
    (links,) = set(measured)
    assert (links.hosts, links.devices) == (("node0", "node1", "node2"), (1, 1, 1))
    for node, rates in enumerate(links.bandwidth):
        seconds = (MESSAGES - 0.5) * (SLOW if node == 1 else FAST)
        expected = [0.0 if other == node else MESSAGES * 2**20 / seconds for other in range(3)]
        assert rates == pytest.approx(expected)
    assert links.latency == pytest.approx(FAST / 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "message"),
    [((2,), "all ranks are on one node"), ((1, 2), "started with 1, 2 ranks; start the same number on each")],
)
def test_nodes_that_cannot_be_paired(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(Exception, match=message):
        on_ranks(sum(sizes), "cpu", by_a_clock_of_messages, sizes)


def test_the_file_has_the_nodes_and_their_links() -> None:
    hardware = with_node_links(machine(), FOUND)
    (group,) = hardware.groups
    assert (group.num_nodes, group.outside.latency, group.outside.bandwidth) == (2, 2e-5, 2e9)
    assert hardware.link_matrix == FOUND.bandwidth
    assert len(hardware.nodes(8)) == 2


def test_nodes_that_are_not_those_of_the_hardware() -> None:
    with pytest.raises(ConfigError, match="has 2 nodes of 4 devices, but 2 nodes of 3 ranks were started"):
        with_node_links(machine(), replace(FOUND, devices=(3, 3)))
    (group,) = machine().groups
    several = replace(machine(), groups=(group, replace(group, name="other", num_nodes=2)))
    with pytest.raises(ConfigError, match="has 3 nodes of 4 devices, but 2 nodes"):
        with_node_links(several, FOUND)


def start(node: int, nodes: int, port: int, folder: Path, *flags: str) -> subprocess.Popen[str]:
    """One node of a job on this host."""
    launcher = ["--nnodes", str(nodes), "--node_rank", str(node), "--nproc_per_node", "1"]
    launcher += ["--master_addr", "127.0.0.1", "--master_port", str(port)]
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, str(ROOT / "tools" / "plan.py"), "links"]
    return subprocess.Popen(
        [*command, "--parallel.device=cpu", *flags],
        cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_two_nodes_measure_their_links(tmp_path: Path) -> None:
    (group,) = machine().groups
    one_device = replace(machine(), groups=(replace(group, devices_per_node=1),))
    (tmp_path / "machine.yaml").write_text(written(one_device))
    port = free_port()
    flags = ["--hardware=machine.yaml", "--output=cluster.yaml", "--megabytes=1", "--json"]
    jobs = [start(node, 2, port, tmp_path, *flags) for node in range(2)]
    said = [job.communicate(timeout=120) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    (report,) = [out for out, _ in said if out]
    hardware = load_hardware(str(tmp_path / "cluster.yaml"))
    assert hardware.link_matrix is not None
    assert json.loads(report)["bandwidth"][0][1] == pytest.approx(hardware.link_matrix[0][1], rel=1e-5)
    assert hardware.groups[0].num_nodes == 2


@pytest.mark.slow
def test_one_process_has_no_links(tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "tools" / "plan.py"), "links", "--hardware=cpu", "--output=cluster.yaml"]
    done = subprocess.run(program, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: links are measured between nodes: start this command on two or more")
    wrong = [*program[:-1], "--output=folder/of/no/name"]
    done = subprocess.run(wrong, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "not a name of a hardware file" in done.stderr
    assert not list(tmp_path.iterdir())
