"""Norms of NVIDIA's apex, known by its compiled extension: the `apex` on PyPI is another project."""

import importlib.util

EXTENSION = "fused_layer_norm_cuda"


def unavailable(device: str) -> str | None:
    """Why apex's norms cannot run on this type of device; None where they can."""
    if device != "cuda":
        return "needs a GPU" if device == "cpu" else f"runs on NVIDIA GPUs, not on {device}"
    if importlib.util.find_spec(EXTENSION) is None:
        return f"NVIDIA's apex is not installed with its norms (there is no module {EXTENSION})"
    return None
