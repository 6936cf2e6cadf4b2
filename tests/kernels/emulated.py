"""csrc/ built for this processor (tests/kernels/emulated_cuda), so that its kernels run where there is no GPU."""

import ctypes
import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megapipe.kernels.cuda_backend.library import Library

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "csrc").glob("*.cu"))
EMULATION = Path(__file__).parent / "emulated_cuda"

# Sums and products must not fuse where the source does not say so, as under nvcc's --fmad=false.
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")

SANITIZERS = "MEGAPIPE_EMULATED_SANITIZERS"
"""Environment variable: what g++ adds checks for, as -fsanitize takes it."""

NAME = "libmegapipe_emulated.so"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def build(folder: Path) -> Library:
    """Compile csrc/ with g++ in `folder`, and load it for CPU tensors."""
    output = folder / NAME
    sources = [*SOURCES, EMULATION / "emulation.cpp"]
    checks = os.environ.get(SANITIZERS)
    added = [f"-fsanitize={checks}", "-fno-sanitize-recover=all", "-g"] if checks else []
    command = ["g++", *FLAGS, *WARNINGS, *added, f"-I{EMULATION}", "-x", "c++", *map(str, sources), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return Library(output, device="cpu")


def shared_library(factory: pytest.TempPathFactory) -> Path:
    """Return the file of the library, which the workers of a session compile once."""
    base = factory.getbasetemp()
    # Not by the environment: a test may start another session, with other sources, within a worker.
    folder = (base.parent if base.name.startswith("popen-") else base) / "emulated_csrc"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / NAME).exists():
            build(folder)
    return folder / NAME


def set_clusters(library: Library, present: bool) -> None:
    """Whether the emulated GPU has thread-block clusters, as those before compute capability 9.0 have not."""
    ctypes.c_int32.in_dll(library._library, "emulated_clusters").value = int(present)
