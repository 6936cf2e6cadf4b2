"""Turn this process's Triton into its interpreter, in which kernels run on CPU tensors.

Triton decides when a kernel is decorated, and other tests may have imported it before. TRITON_INTERPRET is set only
meanwhile: the registry reads it too, and the rest of the suite is to run on the reference.
"""

import importlib
import os
import pkgutil
from typing import Any

import numpy as np

from megapipe.kernels import triton_backend


def interpret() -> None:
    """Interpret Triton's own functions and import every module of kernels, interpreted."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        _interpret_library()
        for module in pkgutil.iter_modules(triton_backend.__path__):
            importlib.import_module(f"{triton_backend.__name__}.{module.name}")
    finally:
        del os.environ["TRITON_INTERPRET"]


def _interpret_library() -> None:
    import triton
    import triton.experimental.gluon  # takes functions from the library when a kernel first runs; now it still may
    from triton import language
    from triton.runtime.interpreter import InterpretedFunction, ReduceOps
    from triton.runtime.jit import JITFunction

    for library in (language, language.standard, language.math, language.random):
        for name, value in vars(library).items():
            if isinstance(value, JITFunction):
                setattr(library, name, InterpretedFunction(value.fn))
    assert isinstance(triton.jit(_interpret_library), InterpretedFunction)
    ReduceOps.sum = _sum_as_a_tree


def _sum_as_a_tree(reduction: Any, values: Any) -> Any:
    """`tl.sum` in an order like a GPU's. numpy adds a row pairwise, but columns from top to bottom, with some three
    times a tree's error over 64 rows: more than kernels are allowed."""
    parts, axis, keep = values.handle.data, reduction.axis, reduction.keep_dims
    if axis is not None and axis < parts.ndim - 1:
        parts = np.moveaxis(parts, axis, 0)
        while len(parts) > 1:  # a power of two, as all blocks are
            parts = parts[: len(parts) // 2] + parts[len(parts) // 2 :]
        parts = np.moveaxis(parts, 0, axis)
    return reduction.to_tensor(np.sum(parts, axis=axis, keepdims=keep), values.dtype)
