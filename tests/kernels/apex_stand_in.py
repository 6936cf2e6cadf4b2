"""A stand-in for NVIDIA's apex: its extensions with the arguments of the table, computed with torch.

Every call is compared with `megapipe.kernels.apex_backend.kernels`: the number of arguments, the kind of each, and
the rules that apex's sources have for dtypes and shapes. A call that apex would refuse, or misread, fails here.
"""

import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.kernels.apex_backend.kernels import FUNCTIONS, Form, Function
from megapipe.kernels.reference import attention as reference_attention
from megapipe.kernels.reference import norms as reference_norms

Call = SimpleNamespace
"""The arguments of a call, by name."""

BUILDS = ("oldest", "newest")


def _is_tensors(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, Tensor) and entry.is_contiguous() for entry in value)


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "tensor": ("torch.Tensor", lambda value: isinstance(value, Tensor) and value.is_contiguous()),
    "shape": (
        "collections.abc.Sequence[typing.SupportsInt]",
        lambda value: isinstance(value, torch.Size) and len(value) == 1,
    ),
    "lists": (
        "collections.abc.Sequence[collections.abc.Sequence[torch.Tensor]]",
        lambda value: isinstance(value, list) and len(value) > 0 and all(map(_is_tensors, value)),
    ),
    "int": ("typing.SupportsInt", lambda value: type(value) is int),
    "float": ("typing.SupportsFloat", lambda value: type(value) in (int, float)),
    "bool": ("bool", lambda value: type(value) is bool),
}
"""Kind of an argument -> its type as pybind11 writes it, and whether a value has it."""


def docstring(name: str, form: Form) -> str:
    """The first line is the signature, as pybind11 writes it for arguments without names."""
    kinds = [argument.partition(":")[2] for argument in form.arguments]
    types = ", ".join(f"arg{place}: {_KINDS[kind][0]}" for place, kind in enumerate(kinds))
    return f"{name}({types}) -> list[torch.Tensor]\n\nA function of apex (CUDA)"


def checked(function: Function, form: Form) -> Callable[..., object]:
    """The function of one build."""
    compute, names = _COMPUTE[function.extension, function.name]

    def call(*arguments: object) -> object:
        assert len(arguments) == len(form.arguments), f"{function.name} got {len(arguments)} arguments"
        values = {}
        for value, described in zip(arguments, form.arguments, strict=True):
            name, _, kind = described.partition(":")
            assert _KINDS[kind][1](value), f"{function.name}: {name} is {value!r}, not a {kind}"
            values[name] = value
        assert list(values) == names.split()[: len(values)], f"{function.name} has the arguments {names}"
        return compute(Call(**values))

    call.__doc__ = docstring(function.name, form)
    return call


def install(monkeypatch: pytest.MonkeyPatch, build: str = "newest") -> None:
    """Put the extensions of one build in the place of apex's."""
    for extension in {function.extension for function in FUNCTIONS}:
        module = ModuleType(extension)
        module.__spec__ = importlib.machinery.ModuleSpec(extension, None)
        for function in FUNCTIONS:
            if function.extension == extension:
                form = function.forms[0 if build == "oldest" else -1]
                setattr(module, function.name, checked(function, form))
        monkeypatch.setitem(sys.modules, extension, module)


def _same_dtype(*tensors: Tensor) -> None:
    assert len({tensor.dtype for tensor in tensors}) == 1, [tensor.dtype for tensor in tensors]


def _rows(x: Tensor, *statistics: Tensor) -> tuple[Tensor, ...]:
    assert x.numel(), "CUDA refuses a launch without blocks"
    assert all(each.shape == (x.shape[:-1].numel(),) and each.dtype == torch.float32 for each in statistics)
    return tuple(each.view(*x.shape[:-1], 1) for each in statistics)


def _norm(call: Call) -> list[Tensor]:
    _rows(call.input)
    parameters = _parameters(call)
    _same_dtype(call.input, *parameters)
    with_bias = len(parameters) == 2
    norm = reference_norms.layer_norm if with_bias else reference_norms.rms_norm
    y, *statistics = norm.forward(call.input, *parameters, call.epsilon)
    return [y, *(statistic.flatten() for statistic in statistics)]


def _norm_backward(call: Call) -> list[Tensor]:
    assert not getattr(call, "memory_efficient", False)  # the tensor `input` would be the result
    parameters = _parameters(call)
    _same_dtype(call.dout, call.input, *parameters)
    if len(parameters) == 2:
        statistics = _rows(call.input, call.mean, call.invvar)
        return list(reference_norms.layer_norm.backward(call.dout, call.input, *statistics, call.gamma))
    return list(reference_norms.rms_norm.backward(call.dout, call.input, *_rows(call.input, call.invvar), call.gamma))


def _parameters(call: Call) -> list[Tensor]:
    return [call.gamma, call.beta] if hasattr(call, "beta") else [call.gamma]


def _flag(noop_flag: Tensor) -> int:
    assert noop_flag.dtype == torch.int32
    assert noop_flag.shape == (1,)
    return int(noop_flag.item())


def _l2_norm(call: Call) -> tuple[Tensor, Tensor]:
    assert _flag(call.noop_flag) == 0
    (tensors,) = call.tensor_lists
    assert all(0 < tensor.numel() < 2**31 for tensor in tensors)
    norms = torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors])
    return norms.square().sum().sqrt().reshape(1), norms if call.per_tensor else norms[:0]


def _adam(call: Call) -> None:
    assert (call.lr.dtype, call.step.dtype, call.inv_scale.dtype) == (torch.float32, torch.int32, torch.float32)
    assert call.lr.shape == call.step.shape == call.inv_scale.shape == (1,)
    assert call.mode in (0, 1)
    assert call.bias_correction in (0, 1)
    gradients, parameters, firsts, seconds = call.tensor_lists
    if _flag(call.noop_flag) == 1:
        return
    beta1, beta2 = (torch.tensor(beta, dtype=torch.float32).item() for beta in (call.beta1, call.beta2))
    correct1, correct2 = (1 - beta ** call.step.item() if call.bias_correction else 1.0 for beta in (beta1, beta2))
    for g, p, m, v in zip(gradients, parameters, firsts, seconds, strict=True):
        _same_dtype(g, p, m, v)
        g.mul_(call.inv_scale)
        scaled = g if call.mode == 1 else g + call.weight_decay * p
        m.mul_(beta1).add_(scaled * (1 - beta1))
        v.mul_(beta2).add_(scaled * (1 - beta2) * scaled)
        update = (m / correct1) / ((v / correct2).sqrt() + call.epsilon)
        p.sub_(call.lr * (update + call.weight_decay * p if call.mode == 1 else update))


def _rows_per_block(length: int) -> int:
    """Rows of a block of 128 threads: a warp, or fewer threads, for each row, or for two short ones."""
    padded = 1 << (length - 1).bit_length()
    return 128 // min(padded, 32) * (2 if padded <= 128 else 1)


def _check_scores(*tensors: Tensor) -> None:
    for scores in tensors:
        samples, length, keys = scores.shape
        assert scores.dtype in (torch.bfloat16, torch.float16)
        assert length == keys <= 16_384
        assert length % 4 == 0, "rows are read four numbers at a time"
        assert scores.data_ptr() % 8 == 0
        assert samples % _rows_per_block(length) == 0


def _causal_softmax(call: Call) -> Tensor:
    _check_scores(call.input)
    return reference_attention.softmax_forward(call.input.unsqueeze(0), None, call.scale_factor, True, None)[0]


def _causal_softmax_backward(call: Call) -> Tensor:
    _check_scores(call.output_grads, call.softmax_results)
    return call.output_grads.copy_(
        reference_attention.softmax_input_gradient(call.output_grads, call.softmax_results, call.scale_factor)
    )


def _weight_gradient(call: Call) -> None:
    _same_dtype(call.input, call.d_output)
    assert call.input.dim() == call.d_output.dim() == 2
    assert call.d_weight.dtype == torch.float32
    call.d_weight.addmm_(call.d_output.float().t(), call.input.float())


_ADAM_NAMES = "lr beta1 beta2 epsilon step mode bias_correction weight_decay inv_scale"
_COMPUTE: dict[tuple[str, str], tuple[Callable[[Call], object], str]] = {
    ("fused_layer_norm_cuda", "forward_affine"): (_norm, "input normalized_shape gamma beta epsilon"),
    ("fused_layer_norm_cuda", "backward_affine"): (
        _norm_backward,
        "dout mean invvar input normalized_shape gamma beta epsilon memory_efficient",
    ),
    ("fused_layer_norm_cuda", "rms_forward_affine"): (_norm, "input normalized_shape gamma epsilon"),
    ("fused_layer_norm_cuda", "rms_backward_affine"): (
        _norm_backward,
        "dout invvar input normalized_shape gamma epsilon memory_efficient",
    ),
    ("amp_C", "multi_tensor_l2norm"): (_l2_norm, "chunk_size noop_flag tensor_lists per_tensor"),
    ("amp_C", "multi_tensor_adam_capturable"): (_adam, f"chunk_size noop_flag tensor_lists {_ADAM_NAMES}"),
    ("scaled_upper_triang_masked_softmax_cuda", "forward"): (_causal_softmax, "input scale_factor"),
    ("scaled_upper_triang_masked_softmax_cuda", "backward"): (
        _causal_softmax_backward,
        "output_grads softmax_results scale_factor",
    ),
    ("fused_weight_gradient_mlp_cuda", "wgrad_gemm_accum_fp32"): (_weight_gradient, "input d_output d_weight"),
}
"""Each function of apex, and the names of its arguments in the newest build."""
