"""Turn this process's Triton into its interpreter, in which kernels run on CPU tensors.

Triton decides when a kernel is decorated, and other tests may have imported it before. TRITON_INTERPRET is set only
meanwhile: the registry reads it too, and the rest of the suite is to run on the reference.
"""

import importlib
import os
import pkgutil

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
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for library in (language, language.standard, language.math, language.random):
        for name, value in vars(library).items():
            if isinstance(value, JITFunction):
                setattr(library, name, InterpretedFunction(value.fn))
    assert isinstance(triton.jit(_interpret_library), InterpretedFunction)
