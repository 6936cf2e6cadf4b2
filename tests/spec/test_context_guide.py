"""The figures of docs/context_parallel.md are those of the formulas, and its picture is that of the code."""

import re
from pathlib import Path

import pytest

from megapipe.config.load import parse
from megapipe.spec.context import ContextBytes, all_to_all_bytes, context_activation_bytes, ring_bytes
from megapipe.spec.gpt import gpt_layers
from tests.layers.redraw import PICTURE, picture

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "context_parallel.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_what_a_block_keeps_and_sends(size: int) -> None:
    row = re.search(rf"^\| {size} ((?:\| \d+ )+)\|$", GUIDE, re.M)
    assert row is not None
    model = parse(["--model", str(ROOT / "examples/models/llama3_8b.yaml")]).model
    shape = (1, 131072)
    expected: list[int] = [
        context_activation_bytes(model, gpt_layers(model)[1], *shape, "bf16", "sdpa", kind, size)
        for kind in ("ring", "all_to_all")
    ]
    sent: list[ContextBytes] = [formula(model, *shape, "bf16", size) for formula in (ring_bytes, all_to_all_bytes)]
    expected += [number for each in sent for number in (each.forward, each.backward)]
    assert [int(figure) for figure in re.findall(r"\d+", row[1])] == [round(each / 2**20) for each in expected]


def test_the_picture_is_that_of_the_code() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture()
