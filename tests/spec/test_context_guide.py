"""The figures of docs/context_parallel.md are those of the formulas, and its picture is that of the code."""

import re
from pathlib import Path

import pytest

from megapipe.config.load import parse
from megapipe.spec.layers import model_layers
from tests.layers.redraw import PICTURE, picture
from tests.spec.sizes import predicted_bytes, sent_bytes

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "context_parallel.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_what_a_block_keeps_and_sends(size: int) -> None:
    row = re.search(rf"^\| {size} ((?:\| \d+ )+)\|$", GUIDE, re.M)
    assert row is not None
    model = parse(["--model", str(ROOT / "examples/models/llama3_8b.yaml")]).model
    shape = (1, 131072)
    expected: list[int] = [
        predicted_bytes(model, model_layers(model)[1], *shape, "bf16", "sdpa", context_attention=kind, context=size)
        for kind in ("ring", "all_to_all")
    ]
    for kind in ("ring", "all_to_all"):
        expected += sent_bytes(model, *shape, "bf16", kind, size)
    assert [int(figure) for figure in re.findall(r"\d+", row[1])] == [round(each / 2**20) for each in expected]


def test_the_picture_is_that_of_the_code() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture()
