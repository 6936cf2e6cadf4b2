"""Kernels of NVIDIA's apex, recognised by its compiled extensions: the `apex` on PyPI is another project."""

import importlib.util
from collections.abc import Callable

from megapipe.kernels.registry import not_nvidia

EXTENSIONS = {
    "layer_norm": "fused_layer_norm_cuda",
    "rms_norm": "fused_layer_norm_cuda",
    "adamw": "amp_C",
    "gradient_norm": "amp_C",
    "softmax": "scaled_upper_triang_masked_softmax_cuda",
    "attention_probabilities": "scaled_upper_triang_masked_softmax_cuda",
    "weight_gradient": "fused_weight_gradient_mlp_cuda",
}
"""Op -> the extension of apex that has its functions; `--cuda_ext` builds all of them."""


def unavailable(op: str) -> Callable[[str], str | None]:
    """Return a rule: device type -> why apex cannot run this op there, or None."""

    def rule(device: str) -> str | None:
        if (reason := not_nvidia(device)) is not None:
            return reason
        if not _installed(EXTENSIONS[op]):
            return f"NVIDIA's apex is not installed with its extension {EXTENSIONS[op]}"
        return None

    return rule


def described() -> str | None:
    """Return a line with the ops for which the installed apex has kernels; None without apex."""
    ops = [op for op, extension in EXTENSIONS.items() if _installed(extension)]
    missing = sorted({extension for op, extension in EXTENSIONS.items() if op not in ops})
    if not ops:
        return None
    return f"apex: has {', '.join(ops)}" + (f"; not built: {', '.join(missing)}" if missing else "")


def _installed(extension: str) -> bool:
    return importlib.util.find_spec(extension) is not None
