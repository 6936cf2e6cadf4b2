"""Traces of a GPU hold the device's times, not those of the host that launched the work."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megapipe.engine.trace import DeviceClock
from megapipe.schedules.command.main import main
from megapipe.schedules.measured.traces import read_rank
from tests.support.gpt_runs import GPT2_SHAPE, make_config, write_shard
from tests.support.meshes import run_threads
from tests.training.test_profile import trained

pytestmark = pytest.mark.gpu

CYCLES = 50_000_000
"""Cycles of the device's clock; 25 to 50 ms."""


def test_the_clock_counts_what_the_host_only_launched() -> None:
    clock = DeviceClock(torch.device("cuda"))
    start = clock.mark()
    torch.cuda._sleep(CYCLES)
    end = clock.mark()
    assert 5e6 < clock.nanoseconds(end) - clock.nanoseconds(start) < 5e9


@pytest.mark.parametrize("name", ["1f1b", "2bw"])
def test_a_pipeline_of_threads_is_traced(tmp_path: Path, name: str) -> None:
    config = make_config(write_shard(tmp_path), replace(GPT2_SHAPE, num_layers=3), schedule={"name": name})
    config.profile = replace(config.profile, trace=str(tmp_path / "trace"))
    run_threads({"pipeline": 2}, trained, config, 6, -1, device="cuda")
    for rank in range(2):
        trace = read_rank(tmp_path / "trace" / f"rank-{rank}.json")
        assert trace.about["device"] == torch.cuda.get_device_name()
        for event in trace.events:
            assert 0 <= event.wait <= event.end - event.start
    assert main(["overlay", str(tmp_path / "trace"), "-o", str(tmp_path / "overlay.html")]) == 0
