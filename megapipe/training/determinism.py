"""training.deterministic: the same bits from the same program, twice on one device."""

import os

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def require_determinism() -> None:
    """Refuse every operation whose result may differ between two runs; call it before the first product on a GPU.

    cuBLAS reads its workspace setting once, when it starts; without a fixed workspace its results depend on which
    streams ran before.
    """
    os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    # That also fills every uninitialised tensor, a launch each. Nothing here reads what was not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
