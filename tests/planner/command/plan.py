"""Running ``tools/plan.py`` inside the test's process."""

import json
from pathlib import Path
from typing import Any

from megapipe.planner.command.main import main

ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "examples" / "models" / "gpt2_1.5b.yaml")
LAYOUT = [
    "--model",
    MODEL,
    "--hardware=a100-80",
    "--devices=16",
    "--batch.global_size=32",
    "--parallel.pipeline=2",
    "--model.num_heads=24",
    "--model.hidden_size=1536",
    "--parallel.tensor=2",
]
"""Flags of a layout that fits."""


def output(capsys, *arguments: str) -> str:
    """Return the output of a command; it must succeed."""
    status = main(arguments, {})
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return captured.out


def json_of(capsys, *arguments: str) -> Any:
    """Return the JSON output of a command."""
    return json.loads(output(capsys, *arguments, "--json"))


def refusal(capsys, *arguments: str) -> list[str]:
    """The lines of a command that has to be refused, without `error: `."""
    assert main(arguments, {}) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert lines
    assert all(line.startswith("error: ") for line in lines)
    return [line.removeprefix("error: ") for line in lines]
