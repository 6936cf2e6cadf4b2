"""The guide's file is read, its code runs, and what it names exists."""

import contextlib
import io
import re
from dataclasses import replace
from pathlib import Path

import megapipe
from megapipe.config.load import parse_as
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.reader import read_hardware
from megapipe.layout.hardware.writer import written

ROOT = Path(megapipe.__file__).parent.parent
GUIDE = (ROOT / "docs" / "calibration.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def test_the_guides_file_is_read() -> None:
    (text,) = blocks("yaml")
    hardware = read_hardware(text)
    assert hardware.measured is not None
    assert hardware.measured.slowdown(2) == 1.06
    assert hardware.groups[0].inside.measured("send", 2) is not None


def test_the_guides_predictions_and_budget_run(tmp_path: Path) -> None:
    """From the guide's file, which says nothing of this model: the roofline answers."""
    (text,) = blocks("yaml")
    (tmp_path / "machine.yaml").write_text(written(read_hardware(text)))
    config = parse_as(
        PretrainConfig, ["--config", str(ROOT / "examples/quickstart.yaml"), "--training.precision", "fp32"]
    )
    names = {"config": replace(config, parallel=replace(config.parallel, data=1))}
    _, predictions, budget = blocks("python")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.chdir(tmp_path):
        exec(predictions, names)
        exec(budget.replace("world_size=2", "world_size=1"), names)
    closed, simulated, chosen = printed.getvalue().splitlines()
    assert float(closed) > 0.0
    assert float(simulated) > 0.0
    assert chosen.startswith("RecomputeConfig(")


def test_the_guides_call_of_profile_is_one() -> None:
    """Its arguments are profile's own; running it is the slow test of tests/calibration."""
    compile(blocks("python")[0], "guide", "exec")
    source = (ROOT / "megapipe" / "calibration" / "machine.py").read_text()
    for name in ("ranks", "tensor_sizes", "micro_sizes", "say"):
        assert f"{name}=" in blocks("python")[0]
        assert f"    {name}:" in source
