"""Optimizer state and weights in host memory: a checkpoint does not tell where they lay, and it goes on anywhere."""

from dataclasses import replace
from pathlib import Path

import pytest

from megapipe.config.offload import OffloadConfig
from megapipe.config.run import PretrainConfig
from tests.checkpoint.runs import assert_same_bits, config_in, run
from tests.support.gpt_runs import GPT2_SHAPE, write_shard

NOTHING, STATE, WEIGHTS = OffloadConfig(), OffloadConfig(optimizer=True), OffloadConfig(optimizer=True, weights=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param(STATE, WEIGHTS, id="state-weights"),
        pytest.param(WEIGHTS, NOTHING, id="weights-nothing"),
        pytest.param(NOTHING, STATE, id="nothing-state"),
    ],
)
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, precision: str, first: OffloadConfig, then: OffloadConfig) -> None:
    corpus = write_shard(tmp_path)

    def config(folder: str, offload: OffloadConfig) -> PretrainConfig:
        found = config_in(tmp_path / folder, corpus, GPT2_SHAPE, training={"precision": precision})
        return replace(found, offload=offload)

    run({}, config("cut", first), 2)
    assert_same_bits(run({"pipeline": 2}, config("cut", then), 4), run({}, config("whole", NOTHING), 4))
