"""Builds csrc/ with nvcc. This needs neither torch nor megapipe: setup.py runs this file by its path."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ARCHITECTURES = (80, 90, 100)
"""Architectures with machine code; newer GPUs compile the PTX of the last one when a kernel runs for the first
time."""

FLAGS = (
    "-std=c++17",
    "-O3",
    # Multiply-adds are fused only where the source says so, to get the same bits from every compiler.
    "--fmad=false",
    "-Werror",
    "all-warnings",
    "-Xcompiler",
    "-fPIC,-fvisibility=hidden",
    "-shared",
)


class BuildError(RuntimeError):
    """The CUDA C++ kernels were requested but cannot be built; the message says how to fix it."""


def find_nvcc() -> str | None:
    """Return the path of nvcc: on the PATH, under CUDA_HOME, or in the folder of NVIDIA's installer."""
    folders = [os.path.join(os.environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for folder in (None, *folders, "/usr/local/cuda/bin"):
        nvcc = shutil.which("nvcc", path=folder)
        if nvcc is not None:
            return nvcc
    return None


def has_gpu() -> bool:
    """Return whether the driver lists an NVIDIA GPU."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.stdout.startswith("GPU")


def reason_to_skip() -> str | None:
    """Return why an installation skips the kernels; None if it builds them.

    MEGAPIPE_CUDA=1 requires them, MEGAPIPE_CUDA=0 skips them; otherwise they are built on a machine with a GPU. Raises
    BuildError if they are required and nvcc is missing, or for another value.
    """
    setting = os.environ.get("MEGAPIPE_CUDA", "")
    if setting not in ("", "0", "1"):
        raise BuildError(f"MEGAPIPE_CUDA is {setting!r}; 1 builds the CUDA kernels, 0 does not, unset looks for a GPU")
    if setting == "0":
        return "MEGAPIPE_CUDA=0"
    if find_nvcc() is None:
        if setting == "1":
            raise BuildError("MEGAPIPE_CUDA=1, but there is no nvcc: put it on the PATH, set CUDA_HOME, or unset it")
        return "nvcc was not found"
    if setting != "1" and not has_gpu():
        return "no GPU was found; MEGAPIPE_CUDA=1 builds them anyway"
    return None


def command(nvcc: str, sources: Sequence[Path], output: Path, architectures: Sequence[int]) -> list[str]:
    """Return the nvcc command that builds one shared library."""
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in architectures]
    newest = architectures[-1]
    portable = f"-gencode=arch=compute_{newest},code=compute_{newest}"
    return [nvcc, *FLAGS, "--threads", "0", *targets, portable, *map(str, sources), "-o", str(output)]


def known_architectures(nvcc: str) -> list[int]:
    """Return the ARCHITECTURES for which this nvcc can compile. Raises BuildError if there is none."""
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    supported = [number for number in ARCHITECTURES if f"sm_{number}" in listed]
    if not supported:
        raise BuildError(f"{nvcc} compiles for none of sm_80, sm_90 and sm_100; install CUDA 12 or newer")
    return supported


def build(sources: Sequence[Path], output: Path) -> None:
    """Compile `sources` into the shared library `output`. Raises BuildError with nvcc's messages."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError("there is no nvcc: put it on the PATH, or set CUDA_HOME")
    output.parent.mkdir(parents=True, exist_ok=True)
    call = command(nvcc, sources, output, known_architectures(nvcc))
    done = subprocess.run(call, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"nvcc failed:\n{' '.join(call)}\n{done.stdout}{done.stderr}")
