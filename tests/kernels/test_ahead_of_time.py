"""Kernels compile for three generations of GPUs without spills and move their tensors in 128-bit pieces."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megapipe.kernels import triton_backend
from tests.kernels.cases import needs_triton

pytestmark = needs_triton

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(Path(triton_backend.__file__).parent.glob("*.py"))
MODULES = [file.stem for file in FILES if "def specimens(" in file.read_text()]


@pytest.mark.parametrize("module", MODULES)
def test_every_specimen_is_good(module: str) -> None:
    """In a process whose Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.ahead_of_time", module]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "good" in done.stdout
