"""Without a GPU, Triton's kernels run in its interpreter, for these tests alone, and csrc/ on an emulated GPU."""

import pytest
import torch

from megapipe.kernels import triton_backend
from megapipe.kernels.cuda_backend.library import Library
from tests.kernels.emulated import shared_library
from tests.kernels.interpreter import interpret

if not torch.cuda.is_available() and triton_backend.installed():
    interpret()


@pytest.fixture(scope="module")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """csrc/ for tensors on the processor."""
    return Library(shared_library(tmp_path_factory), device="cpu")
