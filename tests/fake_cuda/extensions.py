"""csrc/ and apex on a device that is not there: every call is checked, and is one operation with its real tensors.

The functions of csrc/ are those that its sources declare, apex's those of the table in the project. A call that the
compiled extension would refuse or misread ends with an error.
"""

import ctypes
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megapipe.kernels.apex_backend.kernels import FUNCTIONS
from megapipe.kernels.cuda_backend import library
from tests.fake_cuda.mode import Watch, tensors_in
from tests.fake_cuda.timeline import ROOT
from tests.kernels import apex_stand_in

_DECLARED = re.compile(r"MEGAPIPE_EXPORT int32_t megapipe_(\w+)\(([^)]*)\)")
_DTYPES = {number: dtype for dtype, number in library.DTYPES.items()}
_POINTED = {"float": torch.float32, "uint8_t": torch.bool}
_C_TYPES = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float}


class Parameter(NamedTuple):
    """A parameter in C: `const float* x` is read, `float* x` is written."""

    type: str
    name: str

    @property
    def is_pointer(self) -> bool:
        return self.type.endswith("*")

    @property
    def is_read(self) -> bool:
        return self.type.startswith("const ")

    @property
    def pointed(self) -> str:
        return self.type.removeprefix("const ").removesuffix("*")


def declared() -> dict[str, list[Parameter]]:
    """The functions that csrc/ exports, by name."""
    functions = {}
    for source in sorted((ROOT / "csrc").glob("*.cu")):
        for name, parameters in _DECLARED.findall(source.read_text()):
            parts = (each.split() for each in parameters.split(","))
            functions[name] = [Parameter(" ".join(words[:-1]), words[-1]) for words in parts]
    return functions


class FakeLibrary(library.Library):
    """The functions of csrc/, with the shapes that wrappers give them."""

    def __init__(self, watch: Watch) -> None:
        self.device = "cuda"
        self._watch = watch
        self._declared = declared()

    def launch(self, name: str, *arguments: Tensor | float | None) -> None:
        parameters = self._declared[name]
        assert parameters[-1] == Parameter("int64_t", "stream")
        assert len(arguments) == len(parameters) - 1, f"{name} takes {len(parameters) - 1} arguments"
        values = {each.name: value for each, value in zip(parameters, arguments, strict=False)}
        reads, writes = [], []
        for parameter in parameters[:-1]:
            value = values[parameter.name]
            if not parameter.is_pointer:
                allowed = (int, float) if parameter.type == "float" else (int,)
                assert type(value) in allowed, f"{name}: {parameter.name} is {value!r}, not a {parameter.type}"
                _C_TYPES[parameter.type](value)
                continue
            if value is None:
                continue
            assert isinstance(value, Tensor), f"{name}: {parameter.name} is {value!r}, not a tensor"
            assert value.device.type == "cuda", f"{name}: {parameter.name} is on {value.device}, not on cuda"
            assert value.numel(), f"{name}: {parameter.name} is empty"
            expected = _POINTED.get(parameter.pointed) or _untyped(parameter.name, values)
            assert value.dtype == expected, f"{name}: {parameter.name} is {value.dtype}, not {expected}"
            assert value.is_contiguous() or parameter.pointed == "uint8_t", f"{name}: {parameter.name} has gaps"
            (reads if parameter.is_read else writes).append(value)
        self._watch.launch(f"csrc {name}", reads, writes)

    def norm_slabs(self, rows: int, width: int) -> int:
        """As csrc/weight_gradient.cuh chooses it by the shape."""
        threads = -(-width // 512) * 32
        return max(1, min(65536 // threads, -(-rows // 8), 1024))


def _untyped(name: str, values: dict[str, Any]) -> torch.dtype:
    """Return the dtype of a `void*`: that of the call, or adamw's for moments (bf16 or fp32) and weights (bf16)."""
    if "dtype" in values:
        return _DTYPES[values["dtype"]]
    return torch.bfloat16 if name == "parameter" or values["bf16_moments"] else torch.float32


def install_csrc(watch: Watch) -> None:
    """Let this process have csrc/ installed, for the rest of it."""
    installed = FakeLibrary(watch)
    library.PATH = Path(__file__)
    library.current = lambda: installed  # type: ignore[assignment]


def install_apex(watch: Watch) -> None:
    """Install the tests' stand-in for apex, with its results and rules, for the rest of the process."""
    apex_stand_in.install(pytest.MonkeyPatch())
    for function in FUNCTIONS:
        module = sys.modules[function.extension]
        checked = getattr(module, function.name)
        fused = partial(_fused, watch, function.name, checked)
        fused.__doc__ = checked.__doc__
        setattr(module, function.name, fused)


WRITTEN: dict[str, Callable[..., list[Tensor]]] = {
    "multi_tensor_adam_capturable": lambda *arguments: [each for listed in arguments[2] for each in listed],
    "backward": lambda *arguments: [arguments[0]],
    "wgrad_gemm_accum_fp32": lambda *arguments: [arguments[2]],
}
"""Arguments that a function of apex writes; the others write their results alone."""


def _fused(watch: Watch, name: str, checked: Callable[..., object], *arguments: object) -> object:
    with watch.unseen():
        result = checked(*arguments)
    given = tensors_in(*arguments)
    written = WRITTEN[name](*arguments) if name in WRITTEN else tensors_in(result)
    reads = [each for each in given if all(each is not other for other in written)]
    watch.launch(f"apex {name}", reads, written)
    return result
