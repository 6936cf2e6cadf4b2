"""Kernels compile for three generations of GPUs without spills and move their tensors in 128-bit pieces."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megapipe.kernels import triton_backend
from tests.kernels.cases import needs_triton

pytestmark = needs_triton

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(Path(triton_backend.__file__).parent.glob("*.py"))
KERNELS = [
    (file.stem, name) for file in FILES for name in re.findall(r"@triton\.jit\ndef (\w*kernel)\(", file.read_text())
]
MODULES = sorted({module for module, _ in KERNELS})
EACH_MODULE = [
    pytest.param(name, marks=pytest.mark.slow if name == "dropout" else pytest.mark.exhaustive) for name in MODULES
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python, in a process whose Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("module", EACH_MODULE)
def test_machine_code_of_every_specimen(module: str) -> None:
    done = run("-m", "tests.kernels.ahead_of_time", module)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "good" in done.stdout


def test_every_kernel_has_a_specimen() -> None:
    from tests.kernels.specimens import specimens

    kernels = {specimen.launch.kernel.fn for specimen in specimens()}
    launched = {(kernel.__module__.rpartition(".")[2], kernel.__name__) for kernel in kernels}
    assert KERNELS
    assert launched == set(KERNELS)


@pytest.mark.slow
def test_bad_machine_code_is_reported() -> None:
    """Rows of odd length are read piecemeal; rows too long for registers ask for too many warps, or spill."""
    code = (
        "from megapipe.kernels.triton_backend import launch\n"
        "from tests.kernels.ahead_of_time import check\n"
        "from tests.kernels.specimens import Specimen, norm\n"
        "launch.RESIDENT = 1 << 16\n"
        "print(check((Specimen('odd', norm(64, 4095, True, True), loads=4, stores=2), 90)))\n"
        "print(check((Specimen('long', norm(64, 1 << 16, True, True), loads=4, stores=2), 90)))\n"
        "launch.ELEMENTS_PER_WARP = 2048\n"
        "print(check((Specimen('long', norm(64, 1 << 16, True, True), loads=4, stores=2), 90)))\n"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    odd, crowded, spilling = done.stdout.splitlines()
    assert re.match(r"\(False, .*: 128 warps, above 32", crowded)
    assert re.match(r"\(False, .*spills: \d+ bytes of stack", spilling)
    assert re.match(r"\(False, .*: 0 128-bit loads for 4 tensors; 0 128-bit stores for 2 tensors", odd)
