"""Optimizer state in host memory: a checkpoint does not tell where it lay, and a run goes on with the other."""

from dataclasses import replace
from pathlib import Path

import pytest

from megapipe.config.offload import OffloadConfig
from megapipe.config.run import PretrainConfig
from tests.checkpoint.runs import assert_same_bits, config_in, run
from tests.support.gpt_runs import GPT2_SHAPE, write_shard

OFFLOADED = OffloadConfig(optimizer=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("offloaded", [(True, True), (True, False), (False, True)], ids=str)
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, precision: str, offloaded: tuple[bool, bool]) -> None:
    corpus = write_shard(tmp_path)

    def config(folder: str, moves: bool) -> PretrainConfig:
        found = config_in(tmp_path / folder, corpus, GPT2_SHAPE, training={"precision": precision})
        return replace(found, offload=OFFLOADED if moves else OffloadConfig())

    run({}, config("cut", offloaded[0]), 2)
    assert_same_bits(run({"pipeline": 2}, config("cut", offloaded[1]), 4), run({}, config("whole", False), 4))
