"""The figures of docs/memory.md are those of the formulas."""

import re
from collections.abc import Collection
from pathlib import Path

import pytest

from megapipe.config.model import ModelConfig
from megapipe.config.recompute import RecomputeConfig, RecomputedPart
from megapipe.spec.dtypes import AttentionPath
from megapipe.spec.layers import model_layers
from tests.spec.sizes import message_bytes, predicted_bytes

GUIDE = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
GPT3 = ModelConfig(
    vocabulary_size=51200,
    num_layers=96,
    hidden_size=12288,
    num_heads=96,
    max_positions=2048,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)


def kept(attention: AttentionPath, parts: Collection[RecomputedPart]) -> int:
    block = model_layers(GPT3)[1]
    return predicted_bytes(GPT3, block, 1, 2048, "bf16", attention, tensor=8, recompute=parts)


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("nothing", []),
        ("`recompute.method selective`", RecomputeConfig().parts),
        ("`recompute.method selective`, `recompute.parts [attention]`", ["attention"]),
        ("`recompute.method full`", None),
    ],
)
def test_what_a_block_keeps(setting: str, parts: list[RecomputedPart] | None) -> None:
    row = re.search(rf"^\| {re.escape(setting)} \| (\d+) \| (\d+) \|", GUIDE, re.M)
    assert row is not None
    paths: tuple[AttentionPath, ...] = ("unfused", "sdpa")
    full = message_bytes(GPT3, 1, 2048, "bf16")
    expected = [full if parts is None else kept(path, parts) for path in paths]
    assert [int(figure) for figure in row.groups()] == [round(each / 2**20) for each in expected]
