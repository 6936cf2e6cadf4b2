"""The examples of precisions and optimizers can start as their first lines say."""

import re
from pathlib import Path

import pytest

from megapipe.config.load import parse
from megapipe.training.validate import validate

FOLDER = Path(__file__).parents[2] / "examples" / "parallel"


@pytest.mark.parametrize("name", ["fp16", "bf16_no_master", "fp8", "muon"])
def test_the_launch_line_passes_the_checks_of_a_run(name: str) -> None:
    path = FOLDER / f"{name}.yaml"
    launch = re.search(r"^#   megapipe train -n (\d+) --config (\S+)$", path.read_text(), re.M)
    assert launch is not None
    assert launch[2] == name
    validate(parse(["--config", str(path)]), int(launch[1]))
