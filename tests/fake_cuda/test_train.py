"""Training steps and evaluations on devices that are not there: no fault, and the host waits where it may."""

from pathlib import Path

import pytest

from megapipe.config.model import ModelConfig
from tests.fake_cuda import runs
from tests.fake_cuda.communicators import check_logs
from tests.fake_cuda.server import run_fake
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, make_config, write_shard


@pytest.mark.parametrize("model", [GPT2_SHAPE, LLAMA_SHAPE], ids=["gpt2", "llama"])
def test_a_gpt_trains_and_is_evaluated_without_a_fault(tmp_path: Path, model: ModelConfig) -> None:
    config = make_config(write_shard(tmp_path), model, training={"precision": "bf16"})
    (report,) = run_fake(runs.train, config, 2, True)
    assert report.faults == []
    assert not any(result.skipped or result.stop for result in report.results[:-1])


def test_two_stages_send_what_the_other_receives(tmp_path: Path) -> None:
    config = make_config(write_shard(tmp_path), GPT2_SHAPE, parallel={"pipeline": 2}, training={"precision": "bf16"})
    reports = run_fake(runs.train, config, ranks=2)
    assert [report.faults for report in reports] == [[], []]
    assert check_logs([report.log for report in reports]) == []
