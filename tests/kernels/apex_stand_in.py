"""A stand-in for NVIDIA's apex: its extensions with the arguments of the table, computed with torch.

Every call is compared with `megapipe.kernels.apex_backend.kernels`: the number of arguments, the kind of each, and
the rules that apex's sources have for dtypes and shapes. A call that apex would refuse, or misread, fails here.
"""

import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.kernels.apex_backend.kernels import FUNCTIONS, Form, Function
from megapipe.kernels.reference import attention as reference_attention
from megapipe.kernels.reference import norms as reference_norms

BUILDS = ("oldest", "newest")

_TYPES = {
    "tensor": "torch.Tensor",
    "shape": "collections.abc.Sequence[typing.SupportsInt]",
    "lists": "collections.abc.Sequence[collections.abc.Sequence[torch.Tensor]]",
    "int": "typing.SupportsInt",
    "float": "typing.SupportsFloat",
    "bool": "bool",
}
"""As pybind11 writes the types of arguments."""


def _is_tensors(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, Tensor) and entry.is_contiguous() for entry in value)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "tensor": lambda value: isinstance(value, Tensor) and value.is_contiguous(),
    "shape": lambda value: isinstance(value, torch.Size) and len(value) == 1,
    "lists": lambda value: isinstance(value, list) and len(value) > 0 and all(map(_is_tensors, value)),
    "int": lambda value: type(value) is int,
    "float": lambda value: type(value) in (int, float),
    "bool": lambda value: type(value) is bool,
}


def docstring(name: str, form: Form) -> str:
    """The first line is the signature, as pybind11 writes it for arguments without names."""
    kinds = [argument.partition(":")[2] for argument in form.arguments]
    types = ", ".join(f"arg{place}: {_TYPES[kind]}" for place, kind in enumerate(kinds))
    return f"{name}({types}) -> list[torch.Tensor]\n\nA function of apex (CUDA)"


def checked(function: Function, form: Form) -> Callable[..., object]:
    """The function of one build."""
    compute = _COMPUTE[function.extension, function.name]

    def call(*arguments: object) -> object:
        assert len(arguments) == len(form.arguments), f"{function.name} got {len(arguments)} arguments"
        values = {}
        for value, described in zip(arguments, form.arguments, strict=True):
            name, _, kind = described.partition(":")
            assert _KINDS[kind](value), f"{function.name}: {name} is {value!r}, not a {kind}"
            values[name] = value
        return compute(**values)

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


def _layer_norm(
    input: Tensor, normalized_shape: torch.Size, gamma: Tensor, beta: Tensor, epsilon: float
) -> list[Tensor]:
    _rows(input)
    _same_dtype(input, gamma, beta)
    y, mean, rstd = reference_norms.layer_norm_forward(input, gamma, beta, epsilon)
    return [y, mean.flatten(), rstd.flatten()]


def _layer_norm_backward(
    dout: Tensor,
    mean: Tensor,
    invvar: Tensor,
    input: Tensor,
    normalized_shape: torch.Size,
    gamma: Tensor,
    beta: Tensor,
    epsilon: float,
    memory_efficient: bool = False,
) -> list[Tensor]:
    assert not memory_efficient  # the fourth argument would be the result
    _same_dtype(dout, input, gamma, beta)
    return list(reference_norms.layer_norm_backward(dout, input, *_rows(input, mean, invvar), gamma))


def _rms_norm(input: Tensor, normalized_shape: torch.Size, gamma: Tensor, epsilon: float) -> list[Tensor]:
    _rows(input)
    _same_dtype(input, gamma)
    y, rstd = reference_norms.rms_norm_forward(input, gamma, epsilon)
    return [y, rstd.flatten()]


def _rms_norm_backward(
    dout: Tensor,
    invvar: Tensor,
    input: Tensor,
    normalized_shape: torch.Size,
    gamma: Tensor,
    epsilon: float,
    memory_efficient: bool = False,
) -> list[Tensor]:
    assert not memory_efficient
    _same_dtype(dout, input, gamma)
    return list(reference_norms.rms_norm_backward(dout, input, *_rows(input, invvar), gamma))


def _flag(noop_flag: Tensor) -> int:
    assert noop_flag.dtype == torch.int32
    assert noop_flag.shape == (1,)
    return int(noop_flag.item())


def _l2_norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool
) -> tuple[Tensor, Tensor]:
    assert _flag(noop_flag) == 0
    (tensors,) = tensor_lists
    assert all(0 < tensor.numel() < 2**31 for tensor in tensors)
    norms = torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors])
    return norms.square().sum().sqrt().reshape(1), norms if per_tensor else norms[:0]


def _adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    assert (lr.dtype, step.dtype, inv_scale.dtype) == (torch.float32, torch.int32, torch.float32)
    assert lr.shape == step.shape == inv_scale.shape == (1,)
    assert mode in (0, 1)
    assert bias_correction in (0, 1)
    gradients, parameters, firsts, seconds = tensor_lists
    if _flag(noop_flag) == 1:
        return
    beta1, beta2 = (torch.tensor(beta, dtype=torch.float32).item() for beta in (beta1, beta2))
    correct1, correct2 = (1 - beta ** step.item() if bias_correction else 1.0 for beta in (beta1, beta2))
    for g, p, m, v in zip(gradients, parameters, firsts, seconds, strict=True):
        _same_dtype(g, p, m, v)
        g.mul_(inv_scale)
        scaled = g if mode == 1 else g + weight_decay * p
        m.mul_(beta1).add_(scaled * (1 - beta1))
        v.mul_(beta2).add_(scaled * (1 - beta2) * scaled)
        update = (m / correct1) / ((v / correct2).sqrt() + epsilon)
        p.sub_(lr * (update + weight_decay * p if mode == 1 else update))


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


def _causal_softmax(input: Tensor, scale_factor: float) -> Tensor:
    _check_scores(input)
    return reference_attention.softmax_forward(input.unsqueeze(0), None, scale_factor, True, None)[0]


def _causal_softmax_backward(output_grads: Tensor, softmax_results: Tensor, scale_factor: float) -> Tensor:
    _check_scores(output_grads, softmax_results)
    return output_grads.copy_(reference_attention.softmax_input_gradient(output_grads, softmax_results, scale_factor))


def _weight_gradient(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    _same_dtype(input, d_output)
    assert input.dim() == d_output.dim() == 2
    assert d_weight.dtype == torch.float32
    d_weight.addmm_(d_output.float().t(), input.float())


_COMPUTE: dict[tuple[str, str], Callable[..., object]] = {
    ("fused_layer_norm_cuda", "forward_affine"): _layer_norm,
    ("fused_layer_norm_cuda", "backward_affine"): _layer_norm_backward,
    ("fused_layer_norm_cuda", "rms_forward_affine"): _rms_norm,
    ("fused_layer_norm_cuda", "rms_backward_affine"): _rms_norm_backward,
    ("amp_C", "multi_tensor_l2norm"): _l2_norm,
    ("amp_C", "multi_tensor_adam_capturable"): _adam,
    ("scaled_upper_triang_masked_softmax_cuda", "forward"): _causal_softmax,
    ("scaled_upper_triang_masked_softmax_cuda", "backward"): _causal_softmax_backward,
    ("fused_weight_gradient_mlp_cuda", "wgrad_gemm_accum_fp32"): _weight_gradient,
}
