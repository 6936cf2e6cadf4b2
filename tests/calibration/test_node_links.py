"""Links between nodes: every pair measured once in a round without others, slow ones seen, and put into the file."""

import json
import socket
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megapipe.calibration import collectives
from megapipe.calibration.collectives import (
    MESSAGES,
    NodeLinks,
    Place,
    measure_node_links,
    rounds,
    with_node_links,
)
from megapipe.calibration.machine import on_ranks
from megapipe.config import ConfigError
from megapipe.layout.hardware.description import load_hardware, written
from megapipe.parallel.mesh import Mesh
from tests.planner.measured.machines import machine
from tests.support.launch import ROOT, environment

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
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
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
