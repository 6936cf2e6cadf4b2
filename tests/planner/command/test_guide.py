"""docs/planning.md and the README say what the planner says now. Redraw: python -m tests.planner.command.redraw"""

import re

import pytest

from megapipe.planner.command.arguments import COMMANDS
from tests.planner.command.redraw import (
    BLOCK,
    GUIDE,
    LAUNCH,
    LAUNCHES,
    PICTURES,
    README,
    README_LINES,
    answered,
    launched,
)


@pytest.mark.slow
def test_outputs_and_pictures_are_up_to_date(tmp_path):
    text = GUIDE.read_text(encoding="utf-8")
    assert answered(text, tmp_path) == text
    drawn = {each.name for each in tmp_path.iterdir()}
    assert drawn == {each.name for each in PICTURES.iterdir()} == {"breakdown.svg", *DRAWN}
    for name in drawn:
        assert (tmp_path / name).read_text() == (PICTURES / name).read_text()
        assert f"(pictures/planning/{name})" in text


DRAWN = ("memory.svg", "pareto.svg", "timeline.svg")


def test_the_readme_s_plan_is_up_to_date(tmp_path):
    text = README.read_text(encoding="utf-8")
    block = BLOCK.search(text).group()
    assert answered(block, tmp_path, README_LINES) == block


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHES)
def test_launch_examples_start_the_planner_s_layout(name):
    assert launched(name) == (LAUNCH / name).read_text()


def test_every_command_is_in_the_guide():
    rows = re.findall(r"^\| `([a-z-]+)` \|", GUIDE.read_text(encoding="utf-8"), re.M)
    assert rows == list(COMMANDS)
