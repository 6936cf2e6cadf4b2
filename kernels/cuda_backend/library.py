"""The shared library of csrc/, through ctypes: launches on torch's current stream, and errors as exceptions."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

PATH = Path(__file__).with_name("libmegapipe_cuda.so")

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtype -> its number in csrc/launch.cuh."""

_POINTER, _INTEGER, _REAL, _CODE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int32
_KINDS = {"p": _POINTER, "n": _INTEGER, "f": _REAL, "c": _CODE}

# Arguments of each function before the stream: pointers, sizes, fp32 numbers and 32-bit codes.
_SIGNATURES = {
    "layer_norm_forward": "pppp" + "pppp" + "nn" + "f" + "c",
    "layer_norm_backward": "pppppp" + "pppp" + "nn" + "c",
    "rms_norm_forward": "ppp" + "ppp" + "nn" + "f" + "c",
    "rms_norm_backward": "ppppp" + "ppp" + "nn" + "c",
    "softmax_forward": "ppp" + "nnnn" + "f" + "nnn" + "n" + "c",
    "softmax_input_gradient": "ppp" + "nn" + "f" + "c",
    "adamw": "ppppp" + "n" + "fffffff" + "pp" + "c",
}


class CudaError(RuntimeError):
    """CUDA refused a launch; the message has the name of the function and CUDA's own text."""


class Library:
    """The functions of one build of csrc/, for tensors of one type of device.

    device: `cuda`; tests build the same sources for the CPU and pass `cpu`. Raises OSError if the file cannot be
    loaded, AttributeError if it lacks a function.
    """

    def __init__(self, path: Path, device: str = "cuda") -> None:
        self.device = device
        self._library = ctypes.CDLL(str(path))
        self._functions = {}
        for name, kinds in _SIGNATURES.items():
            function = getattr(self._library, f"megapipe_{name}")
            function.argtypes = [*(_KINDS[kind] for kind in kinds), _INTEGER]
            function.restype = _CODE
            self._functions[name] = function
        self._library.megapipe_error_string.argtypes = [_CODE]
        self._library.megapipe_error_string.restype = ctypes.c_char_p
        self._library.megapipe_norm_slabs.argtypes = [_INTEGER, _INTEGER]
        self._library.megapipe_norm_slabs.restype = _CODE

    def launch(self, name: str, *arguments: Tensor | float | None) -> None:
        """Launch `megapipe_<name>` on the device of its tensors. Raises ValueError for a wrong device, and
        CudaError."""
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        device = tensors[0].device
        if device.type != self.device or any(tensor.device != device for tensor in tensors):
            places = ", ".join(str(tensor.device) for tensor in tensors)
            raise ValueError(f"{name} got tensors on {places}; they must all be on one {self.device} device")
        plain = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
        if device.type == "cuda":
            with torch.cuda.device(device):
                self.launch_plain(name, *plain, stream=torch.cuda.current_stream().cuda_stream)
        else:
            self.launch_plain(name, *plain, stream=0)

    def launch_plain(self, name: str, *arguments: float | None, stream: int) -> None:
        """Call `megapipe_<name>` with addresses and numbers. Raises CudaError, in CUDA's own words."""
        code = self._functions[name](*arguments, stream)
        if code:
            raise CudaError(f"{name} failed: {self._library.megapipe_error_string(code).decode()} (CUDA error {code})")

    def norm_slabs(self, rows: int, width: int) -> int:
        """Return the number of partial sums per column that the weight gradient of a norm writes."""
        return self._library.megapipe_norm_slabs(rows, width)


@functools.cache
def current() -> Library:
    """Return the installed library."""
    return Library(PATH)
