"""The figures of docs/sequence_parallel.md are those of the formulas, and its example is a run that can start."""

import re
from pathlib import Path

import pytest

from megapipe.config.load import parse
from megapipe.config.recompute import RecomputeConfig
from megapipe.spec.layers import model_layers
from megapipe.training.validate import validate
from tests.spec.sizes import message_bytes, predicted_bytes
from tests.spec.test_memory_guide import GPT3

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/sequence_parallel.md").read_text(encoding="utf-8")
TENSOR = 8


def kept(row: str, sequence_parallel: bool) -> int:
    if row == "a message between stages":
        return message_bytes(GPT3, 1, 2048, "bf16", tensor=TENSOR, sequence_parallel=sequence_parallel)
    return predicted_bytes(
        GPT3,
        model_layers(GPT3)[1],
        1,
        2048,
        "bf16",
        "unfused" if "unfused" in row else "sdpa",
        tensor=TENSOR,
        recompute=RecomputeConfig().parts if "selective" in row else (),
        sequence_parallel=sequence_parallel,
    )


@pytest.mark.parametrize(
    "row",
    [
        "a block, unfused attention",
        "a block, fused attention",
        "a block, `recompute.method selective`",
        "a message between stages",
    ],
)
def test_what_a_rank_keeps(row: str) -> None:
    found = re.search(rf"^\| {re.escape(row)} \| (\d+) \| (\d+) \|$", GUIDE, re.M)
    assert found is not None
    assert [int(figure) for figure in found.groups()] == [round(kept(row, each) / 2**20) for each in (False, True)]


def test_the_example_can_start() -> None:
    example = "examples/parallel/sequence.yaml"
    line = re.search(r"megapipe train -n (\d+) --config sequence$", GUIDE, re.MULTILINE)
    assert line is not None
    assert line[0] in (ROOT / example).read_text(encoding="utf-8")
    config = parse(["--config", str(ROOT / example)])
    assert config.parallel.sequence
    validate(config, int(line[1]))
