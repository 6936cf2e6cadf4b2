"""csrc/ on the emulated GPU with the compiler's sanitizers: aligned accesses, bounds, and no undefined behaviour."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.emulated import ROOT, SANITIZERS, needs_compiler

pytestmark = needs_compiler

CHECKS = "address,undefined"
"""As -fsanitize takes them."""


def library(name: str) -> str:
    """Path of one of g++'s libraries."""
    done = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def run_tests(chosen: str, csrc: Path = ROOT / "csrc") -> subprocess.CompletedProcess[str]:
    """Tests of csrc/ on the sources in a folder; a sanitizer that finds something ends them.

    chosen: as pytest's -k takes it.
    """
    # It has to be loaded first, and the right unwinder for exceptions after it.
    preloaded = f"{library('libasan.so')} {library('libstdc++.so')}"
    environment = os.environ | {SANITIZERS: CHECKS, "LD_PRELOAD": preloaded, "ASAN_OPTIONS": "detect_leaks=0"}
    code = (
        "import sys, pytest\n"
        "from pathlib import Path\n"
        "from tests.kernels import emulated\n"
        f"emulated.SOURCES = sorted(Path({str(csrc)!r}).glob('*.cu'))\n"
        # The message of a process that ends at once must not stay with pytest.
        "options = ['-q', '-s', '-x', '-p', 'no:faulthandler', '-p', 'no:cacheprovider']\n"
        "files = ['tests/kernels/test_cuda_wrappers.py', 'tests/kernels/test_backends.py']\n"
        f"sys.exit(pytest.main([*options, '-k', 'cuda and ({chosen})', *files]))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )


@pytest.mark.parametrize(
    "chosen",
    [pytest.param("layout or adamw", marks=pytest.mark.slow), pytest.param("test", marks=pytest.mark.exhaustive)],
)
def test_sanitizers_find_nothing(chosen: str) -> None:
    done = run_tests(chosen)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "launch.cuh",
            "reinterpret_cast<uintptr_t>(pointers) % kAccessBytes == 0",
            "pointers == pointers",
            "misaligned",
        ),
        ("tile.cuh", "if (c < width) row[c] =", "if (c < width + 40) row[c] =", "heap-buffer-overflow"),
    ],
)
def test_sanitizers_find_broken_accesses(file: str, old: str, new: str, message: str, tmp_path: Path) -> None:
    csrc = shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    text = (csrc / file).read_text()
    assert text.count(old) == 1
    (csrc / file).write_text(text.replace(old, new))
    done = run_tests("layout", csrc)
    assert done.returncode != 0
    assert message in done.stderr
