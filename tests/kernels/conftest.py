"""Without a GPU, Triton's kernels run in its interpreter, for these tests alone."""

import torch

from megapipe.kernels import triton_backend
from tests.kernels.interpreter import interpret

if not torch.cuda.is_available() and triton_backend.installed():
    interpret()
