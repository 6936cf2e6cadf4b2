"""Kernels in Triton. This file does not import triton, so that the registry can call it even if triton is not
installed."""

import functools
import importlib.util
import os

import torch

from megapipe.kernels.registry import not_nvidia, too_old


def unavailable(device: str) -> str | None:
    """Return why no Triton kernel can run on this type of device; None if they can.

    On the CPU they run only in Triton's interpreter, for tests: with TRITON_INTERPRET=1 set before the start.
    """
    on_cpu = device == "cpu" and interpreting()
    if not on_cpu and (reason := not_nvidia(device)) is not None:
        return reason
    if not installed():
        return "triton is not installed; pip install 'triton>=3.6'"
    if on_cpu:
        return None
    return too_old() if torch.cuda.is_available() else "needs a GPU"


def interpreting() -> bool:
    """Return whether Triton interprets kernels instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def installed() -> bool:
    """Return whether triton can be imported."""
    return importlib.util.find_spec("triton") is not None
