"""The functions of NVIDIA's apex that megapipe calls, with the arguments of every supported build.

apex has no version numbers: a form is identified by a commit of github.com/NVIDIA/apex, or of a fork, that has it, and
by the change that introduced it. pybind11 checks arguments only when a function is called, and some are first called
in the backward of the first step, so a build is compared with this table when a backend is chosen (`why_unsupported`).
"""

import functools
import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ARGUMENT = re.compile(r"[(,] *(?:arg\d+|\w+): ")


@dataclass(frozen=True)
class Form:
    """The arguments of a function, in order, as `name:kind`.

    commit: a commit whose sources have them. since: what introduced them: a pull request and its month, or a year.
    """

    commit: str
    since: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Function:
    """A function of one of apex's extensions. forms: each has the arguments of the one before it, and one more."""

    extension: str
    name: str
    forms: tuple[Form, ...]

    def __call__(self, *arguments: Any) -> Any:
        """Call the function with the leading arguments that the installed build takes, on the device of the first
        tensor.

        Raises ImportError without the extension, and ValueError if the build is not in the table.
        """
        function = getattr(importlib.import_module(self.extension), self.name)
        count = _count(function)
        if count not in self.counts:
            raise ValueError(f"apex: {self.flaw()}")
        device = next(tensor.device for tensor in _tensors(arguments))
        if device.type != "cuda":
            return function(*arguments[:count])
        with torch.cuda.device(device):
            return function(*arguments[:count])

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of arguments of the known forms."""
        return tuple(len(form.arguments) for form in self.forms)

    def flaw(self) -> str | None:
        """Return why the installed extension cannot be called; None if it can. Raises ImportError."""
        function = getattr(importlib.import_module(self.extension), self.name, None)
        if function is None:
            return f"{self.extension} has no function {self.name}; build an apex that has it ({self.forms[0].since})"
        if _count(function) in self.counts:
            return None
        known, taken = " or ".join(map(str, self.counts)), _count(function) or "unknown"
        return (
            f"{self.extension}.{self.name} takes {taken} arguments instead of {known}; build apex at commit "
            f"{self.forms[-1].commit[:9]}"
        )


def why_unsupported(functions: Iterable[Function]) -> str | None:
    """Return why the installed build cannot run these functions; None if it can. Raises ImportError."""
    return next((flaw for function in functions if (flaw := function.flaw()) is not None), None)


@functools.cache
def _count(function: Callable[..., Any]) -> int:
    """Return the number of arguments in pybind11's docstring, `name(arg0: type, ...) -> type`; 0 if it does not list
    them."""
    signature = (function.__doc__ or "").partition(" -> ")[0].partition("\n")[0]
    return len(_ARGUMENT.findall(signature))


def _tensors(arguments: Iterable[Any]) -> Iterable[Tensor]:
    return (argument for argument in arguments if isinstance(argument, Tensor))


def _function(extension: str, name: str, *forms: tuple[tuple[str, str], str]) -> Function:
    """Return a function, and add it to `FUNCTIONS`. forms: for each its source (commit, since), and the arguments that
    it adds to the previous form."""
    arguments: tuple[str, ...] = ()
    forms_so_far = []
    for source, more in forms:
        arguments += tuple(more.split())
        forms_so_far.append(Form(*source, arguments))
    FUNCTIONS.append(Function(extension, name, tuple(forms_so_far)))
    return FUNCTIONS[-1]


FUNCTIONS: list[Function] = []
"""Every function of the table."""

_LAYER_NORM = ("adee29f690e1fe2d45449f179ae2b6d17e497dfe", "2019")
_RMS_NORM = ("028ef04cb7a5ca79a5c2929fb4416209c27555ac", "pull request 1274, January 2022")
_MEMORY_EFFICIENT = ("6ff45486f432f91eb86937a0def5eb5f2cf792ae", "pull request 1715, August 2023")
_AMP = ("9082484be7ee36f12c300b2bd56cc427b9c70e2c", "2019")
_CAPTURABLE = ("6bd01c4b99a84648ad5e5238a959735e6936c813", "pull request 1560, January 2023")
"""An Adam for CUDA graphs: its step, rate, scale and skip flag are on the device."""
_FUSION = ("23c1f86520e22b505e8fdfcf6298273dff2d93d8", "pull request 1297, February 2022")
_SOFTMAX = ("23c1f86520e22b505e8fdfcf6298273dff2d93d8", "2021")

LAYER_NORM_FORWARD = _function(
    "fused_layer_norm_cuda",
    "forward_affine",
    (_LAYER_NORM, "input:tensor normalized_shape:shape gamma:tensor beta:tensor epsilon:float"),
)
LAYER_NORM_BACKWARD = _function(
    "fused_layer_norm_cuda",
    "backward_affine",
    (
        _LAYER_NORM,
        "dout:tensor mean:tensor invvar:tensor input:tensor normalized_shape:shape gamma:tensor beta:tensor "
        "epsilon:float",
    ),
    (_MEMORY_EFFICIENT, "memory_efficient:bool"),
)
RMS_NORM_FORWARD = _function(
    "fused_layer_norm_cuda",
    "rms_forward_affine",
    (_RMS_NORM, "input:tensor normalized_shape:shape gamma:tensor epsilon:float"),
)
RMS_NORM_BACKWARD = _function(
    "fused_layer_norm_cuda",
    "rms_backward_affine",
    (_RMS_NORM, "dout:tensor invvar:tensor input:tensor normalized_shape:shape gamma:tensor epsilon:float"),
    (_MEMORY_EFFICIENT, "memory_efficient:bool"),
)
L2_NORM = _function(
    "amp_C",
    "multi_tensor_l2norm",
    (_AMP, "chunk_size:int noop_flag:tensor tensor_lists:lists per_tensor:bool"),
)
ADAM = _function(
    "amp_C",
    "multi_tensor_adam_capturable",
    (
        _CAPTURABLE,
        "chunk_size:int noop_flag:tensor tensor_lists:lists lr:tensor beta1:float beta2:float epsilon:float "
        "step:tensor mode:int bias_correction:int weight_decay:float inv_scale:tensor",
    ),
)
CAUSAL_SOFTMAX_FORWARD = _function(
    "scaled_upper_triang_masked_softmax_cuda", "forward", (_SOFTMAX, "input:tensor scale_factor:float")
)
CAUSAL_SOFTMAX_BACKWARD = _function(
    "scaled_upper_triang_masked_softmax_cuda",
    "backward",
    (_SOFTMAX, "output_grads:tensor softmax_results:tensor scale_factor:float"),
)
WEIGHT_GRADIENT = _function(
    "fused_weight_gradient_mlp_cuda",
    "wgrad_gemm_accum_fp32",
    (_FUSION, "input:tensor d_output:tensor d_weight:tensor"),
)
