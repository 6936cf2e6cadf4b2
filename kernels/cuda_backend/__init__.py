"""Kernels in CUDA C++ (csrc/), called through ctypes. This file loads no library, so that the registry can import it
anywhere."""

import torch

from megapipe.kernels.cuda_backend import library

_LOWEST_CAPABILITY = (8, 0)


def unavailable(device: str) -> str | None:
    """Return why no CUDA C++ kernel can run on this type of device; None if they can."""
    if device == "cpu":
        return "needs a GPU"
    if device != "cuda":
        return f"runs on NVIDIA GPUs, not on {device}"
    if not library.PATH.exists():
        return "was not built; install megapipe with nvcc on the PATH and MEGAPIPE_CUDA=1"
    capability = torch.cuda.get_device_capability()
    if capability < _LOWEST_CAPABILITY:
        return f"needs compute capability 8.0 or above, not {capability[0]}.{capability[1]}"
    return None
