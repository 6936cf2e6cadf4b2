"""What docs/parallelism.md shows is what the code does: its picture, its example, its table of layouts."""

import re
import runpy
from pathlib import Path

import pytest

from megapipe.config.mesh_shape import DIMENSIONS, MeshShape
from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.units import Unit, UnitCosts
from megapipe.spec.layers import layer_ops, model_layers
from megapipe.spec.ops import MicrobatchShape, exchanges
from tests.support.layout_table import GUIDE, table, written

DOCS = Path(__file__).resolve().parents[1] / "docs"
MODEL = ModelConfig(num_layers=1, hidden_size=5120, num_heads=40, max_positions=2048)
MIB = 2**20


def test_the_picture_is_of_the_mesh() -> None:
    script = runpy.run_path(str(DOCS / "draw_mesh.py"))
    picture = (DOCS / "pictures" / "mesh.svg").read_text(encoding="utf-8")
    assert picture == script["draw"](), "run docs/draw_mesh.py again"
    assert tuple(script["SIZES"]) == DIMENSIONS
    shape = MeshShape(script["SIZES"])
    drawn = re.findall(r'data-rank="([\d ]+)">rank (\d+)<', picture)
    assert len(drawn) == shape.world_size
    for place, rank in drawn:
        assert shape.coordinates(int(rank)) == dict(zip(DIMENSIONS, map(int, place.split()), strict=True))


def example(dimension: str) -> int:
    found = re.search(
        rf"^\| {dimension} \|[^|]*\|[^|]*\| ([\d,]+) \|", GUIDE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert found is not None
    return int(found[1].replace(",", ""))


def test_the_example_is_that_of_the_formulas() -> None:
    shape = MicrobatchShape(MODEL, 1, 2048, "bf16", tensor=8)
    tensor = exchanges(layer_ops("block", shape))["tensor"]
    assert example("tensor") == round(sum(each.sent(8) for each in tensor) / MIB)
    assert example("pipeline") == round(shape.stream / MIB)
    unit = Unit(tuple(model_layers(MODEL)[1].parameters.values()))
    (data,) = UnitCosts(PretrainConfig(), replicas=8).reduction(unit)["data+context"]
    assert example("data") == round(data.sent(8) / MIB)


def test_the_table_has_many_layouts_of_one_result() -> None:
    rows = [line.split("|") for line in written().splitlines()[2:]]
    assert len(rows) >= 40
    assert len({tuple(row[5:7]) for row in rows}) == 1
    assert {row[7].strip() for row in rows} == {"every bit", "to rounding"}


@pytest.mark.slow
def test_the_table_is_what_a_run_gives() -> None:
    assert written() == table(), "python -m tests.support.layout_table write"
