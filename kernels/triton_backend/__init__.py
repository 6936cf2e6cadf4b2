"""Kernels in Triton. This file does not import triton, so that the registry can call it even if triton is not
installed."""

import functools
import importlib.util
import os

import torch

_LOWEST_CAPABILITY = (8, 0)


def unavailable(device: str) -> str | None:
    """Return why no Triton kernel can run on this type of device; None if they can.

    On the CPU they run only in Triton's interpreter, for tests: with TRITON_INTERPRET=1 set before the start.
    """
    if device == "cpu" and not interpreting():
        return "needs a GPU"
    if device not in ("cpu", "cuda"):
        return f"runs on NVIDIA GPUs, not on {device}"
    if not installed():
        return "triton is not installed; pip install 'triton>=3.6'"
    if device == "cuda" and not torch.cuda.is_available():
        return "needs a GPU"
    if device == "cuda":
        capability = torch.cuda.get_device_capability()
        if capability < _LOWEST_CAPABILITY:
            return f"needs compute capability 8.0 or above, not {capability[0]}.{capability[1]}"
    return None


def interpreting() -> bool:
    """Return whether Triton interprets kernels instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def installed() -> bool:
    """Return whether triton can be imported."""
    return importlib.util.find_spec("triton") is not None
