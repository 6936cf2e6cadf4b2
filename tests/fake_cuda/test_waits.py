"""No wait of the product is there for nothing, and none could be lost unseen: left out, each is found."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.fake_cuda import runs
from tests.fake_cuda.options import WIDE, shortened
from tests.fake_cuda.server import run_fake
from tests.fake_cuda.timeline import ROOT
from tests.support.gpt_runs import make_config, write_shard
from tests.support.ranks import free_port

RUNS = {
    "offloaded activations": (1, {"offload": {"activations": "blocks"}}),
    "offloaded weights": (1, {"offload": {"optimizer": True, "weights": True}}),
    "pipeline": (2, {"parallel": {"pipeline": 2}}),
    "replicas": (2, {"parallel": {"data": 2}}),
    "replicas with shards": (2, {"parallel": {"data": 2}, "zero": {"stage": 3}}),
    "ring": (2, {"parallel": {"context": 2}}),
    "tensor": (2, {"parallel": {"tensor": 2, "sequence": True}}),
    "hidden sums": (1, {"schedule": {"name": "2bw"}}),
}
FAST = ("replicas",)
NOT_NEEDED_HERE = {
    "self._done.synchronize()": "for readers of optimizer state on the host between steps; these runs have none",
    "stream.record_event().synchronize()": "the function before it has read the sums, which waits too",
}
"""Lines of the product that wait for what these runs do not need."""


@pytest.mark.parametrize(
    "name",
    [each if each in FAST else pytest.param(each, marks=(pytest.mark.slow, pytest.mark.one_in(3))) for each in RUNS],
)
def test_a_wait_that_is_left_out_is_found(tmp_path: Path, name: str) -> None:
    ranks, groups = RUNS[name]
    config = shortened(make_config(write_shard(tmp_path), WIDE, training={"precision": "bf16"}, **groups), 2)  # type: ignore[arg-type]
    reports = run_fake(runs.train, config, ranks=ranks)
    assert [report.faults for report in reports] == [[]] * ranks
    places = {place for report in reports for place in report.waits if line_of(place) not in NOT_NEEDED_HERE}
    assert places
    missed = []
    for place in sorted(places):
        reports = run_fake(runs.train, config, dropped=place, ranks=ranks)
        if not any(report.faults for report in reports):
            missed.append(place)
    assert missed == []


@pytest.mark.slow
def test_saved_optimizer_state_is_on_the_host(tmp_path: Path) -> None:
    groups = {
        "training": {"precision": "bf16", "steps": 2, "directory": str(tmp_path / "run"), "memory_check": "warn"},
        "checkpoint": {"every": 1},
        "offload": {"optimizer": True},
    }
    config = shortened(make_config(write_shard(tmp_path), WIDE, **groups), 2)  # type: ignore[arg-type]
    config.parallel = replace(config.parallel, device="cuda")
    (report,) = run_fake(runs.pretrain_and_resume, config, free_port(), free_port())
    assert report.faults == []


def test_tensors_for_another_thread_are_awaited_and_kept() -> None:
    (report,) = run_fake(runs.hands_over)
    assert report.faults == []


def test_the_origin_of_a_device_s_clock_has_passed() -> None:
    (report,) = run_fake(runs.clock)
    assert report.results == [True]


def line_of(place: str) -> str:
    """The source line at `file:line`."""
    file, number = place.rsplit(":", 1)
    return (ROOT / file).read_text().splitlines()[int(number) - 1].strip()
