"""The commands of docs/data.md run as they are written."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.preprocess_runs import ROOT

TEXT = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]


@pytest.mark.slow
def test_every_command_runs(tmp_path: Path) -> None:
    assert len(COMMANDS) == 10
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for written in COMMANDS:
        command = written.replace("runs/data", str(tmp_path))
        finished = subprocess.run(
            command,
            shell=True,
            cwd=ROOT,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert finished.returncode == 0, f"{command}\n{finished.stdout}\n{finished.stderr}"
    assert json.loads((tmp_path / "stalls.json").read_text())["tokens_per_second"]["preparation"] > 0
    assert (tmp_path / "lengths.png").stat().st_size > 1000
    for kind in ("bin", "idx"):
        merged, original = (tmp_path / f"{name}.{kind}" for name in ("whole", "gpt_text_document"))
        assert merged.read_bytes() == original.read_bytes()
