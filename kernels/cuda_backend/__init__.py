"""Kernels in CUDA C++ (csrc/), called through ctypes. This file loads no library, so that the registry can import it
anywhere."""

from megapipe.kernels.cuda_backend import library
from megapipe.kernels.registry import not_nvidia, too_old


def unavailable(device: str) -> str | None:
    """Return why no CUDA C++ kernel can run on this type of device; None if they can."""
    if (reason := not_nvidia(device)) is not None:
        return reason
    if not library.PATH.exists():
        return "was not built; install megapipe with nvcc on the PATH and MEGAPIPE_CUDA=1"
    return too_old()
