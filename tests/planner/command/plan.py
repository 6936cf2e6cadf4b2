"""Running ``tools/plan.py`` inside the test's process."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from megapipe.planner.command.main import main

ROOT = Path(__file__).parents[3]
MODELS = ROOT / "examples" / "models"
MODEL = str(MODELS / "gpt2_1.5b.yaml")
LAYOUT = [
    "--model", MODEL, "--hardware=a100-80", "--devices=16", "--batch.global_size=32", "--parallel.pipeline=2",
    "--model.num_heads=24", "--model.hidden_size=1536", "--parallel.tensor=2",
]  # fmt: skip
"""Flags of a layout that fits."""
LARGE = str(MODELS / "gpt3_6.7b.yaml")
SEARCH = ["--model", LARGE, "--hardware=a100-80", "--devices=16", "--batch.global_size=64"]
TRILLION = ["--model", str(MODELS / "megatron_1t.yaml"), "--data.sequence_length=2048"]


def without(flags: list[str], *words: str) -> list[str]:
    """Flags in which no such word is."""
    return [flag for flag in flags if not any(word in flag for word in words)]


def asked(*arguments: str) -> tuple[int, str, str]:
    """Return exit status, output and errors of a command."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(arguments, {})
    return status, out.getvalue(), err.getvalue()


def output(*arguments: str) -> str:
    """Return the output of a command; it must succeed."""
    status, out, err = asked(*arguments)
    assert status == 0, err
    return out


def json_of(*arguments: str) -> Any:
    """Return the JSON output of a command."""
    return json.loads(output(*arguments, "--json"))


def refusal(*arguments: str) -> list[str]:
    """The lines of a command that has to be refused, without `error: `."""
    status, out, err = asked(*arguments)
    assert (status, out) == (2, "")
    lines = err.splitlines()
    assert lines
    assert all(line.startswith("error: ") for line in lines)
    return [line.removeprefix("error: ") for line in lines]
