"""Fused kernels on a device that is not there: each is one operation with its real tensors.

The project's own in Triton; torch's attention; csrc/ and apex, of which every call is checked. The functions of csrc/
are those that its sources declare, apex's those of the table in the project. A call that the compiled extension would
refuse or misread ends with an error.
"""

import ast
import ctypes
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from megapipe.kernels import registry
from megapipe.kernels.apex_backend.kernels import FUNCTIONS
from megapipe.kernels.cuda_backend import library
from megapipe.kernels.triton_backend.launch import Launch
from megapipe.layers import attention as layers_attention
from tests.fake_cuda.mode import Watch, tensors_in
from tests.fake_cuda.timeline import ROOT
from tests.kernels import apex_stand_in
from tests.kernels.launches import arguments

STORES = {"store", "atomic_add", "atomic_max", "atomic_min", "atomic_cas", "atomic_xchg"}


def install_triton(watch: Watch) -> None:
    """Let launches reach the timeline in place of a compiler, for the rest of the process."""

    def run(launch: Launch) -> None:
        stored, loaded = touched_arguments(launch.kernel, frozenset(launch.constants.items()))
        tensors = {name: each for name, each in arguments(launch).items() if isinstance(each, Tensor)}
        reads = [each for name, each in tensors.items() if name in loaded]
        writes = [each for name, each in tensors.items() if name in stored]
        module, name = launch.kernel.fn.__module__.rpartition(".")[2], launch.kernel.fn.__name__.lstrip("_")
        watch.launch(f"triton {module}.{name}", reads, writes)

    Launch._run = run  # type: ignore[method-assign]
    registry._PLAIN = (*registry._PLAIN, FakeTensor)  # type: ignore[misc]  # run as a GPU would, not as a compiler traces


class _Compiled(ast.NodeTransformer):
    """Leaves out the branches that constants rule out, as the compiler does."""

    def __init__(self, constants: dict[str, Any]) -> None:
        self._constants = constants

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        negated = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
        test = node.test.operand if isinstance(node.test, ast.UnaryOp) else node.test
        if not isinstance(test, ast.Name) or test.id not in self._constants:
            return node
        return node.body if bool(self._constants[test.id]) != negated else node.orelse


@functools.cache
def touched_arguments(kernel: Any, constants: frozenset[tuple[str, Any]]) -> tuple[frozenset[str], frozenset[str]]:
    """The pointer arguments that a Triton kernel stores through and loads through, also in functions that it calls.

    constants: what it is compiled for. Found in its source: of each variable, the parameters that its value is
    computed from.
    """
    function, known = kernel.fn, dict(constants)
    tree = _Compiled(known).visit(ast.parse(textwrap.dedent(inspect.getsource(function))))
    (definition,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    origins = {argument.arg: {argument.arg} for argument in definition.args.args}
    names = function.__globals__

    def sources(node: ast.AST) -> set[str]:
        """Parameters whose address a pointer expression may be; what is loaded through one is a value."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            return set()
        if isinstance(node, ast.Name):
            return origins.get(node.id, set())
        return set().union(*(sources(each) for each in ast.iter_child_nodes(node)), set())

    changed = True
    while changed:  # loops may carry pointers around
        changed = False
        for node in ast.walk(definition):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets, value = node.targets, node.value
            elif isinstance(node, ast.AugAssign):
                targets, value = [node.target], node.value
            for target in targets:
                for name in (each.id for each in ast.walk(target) if isinstance(each, ast.Name)):
                    more = origins.get(name, set()) | sources(value)
                    changed |= more != origins.get(name, set())
                    origins[name] = more
    stored: set[str] = set()
    loaded: set[str] = set()
    for node in ast.walk(definition):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr in STORES:
            stored |= sources(node.args[0])
            if node.func.attr != "store":
                loaded |= sources(node.args[0])
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            loaded |= sources(node.args[0])
        elif isinstance(node.func, ast.Name) and hasattr(names.get(node.func.id), "fn"):
            called = names[node.func.id]
            parameters = list(inspect.signature(called.fn).parameters)
            given = [*zip(parameters, node.args, strict=False), *((each.arg, each.value) for each in node.keywords)]
            passed_on = {
                name: each.value if isinstance(each, ast.Constant) else known[each.id]
                for name, each in given
                if isinstance(each, ast.Constant) or (isinstance(each, ast.Name) and each.id in known)
            }
            inner_stored, inner_loaded = touched_arguments(called, frozenset(passed_on.items()))
            for name, argument in given:
                stored |= sources(argument) if name in inner_stored else set()
                loaded |= sources(argument) if name in inner_loaded else set()
    return frozenset(stored), frozenset(loaded)


FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_HEAD_DIM = 256
PLAIN = functional.scaled_dot_product_attention


def install_attention(watch: Watch) -> None:
    """Put the stand-ins of torch's fused attention in place, for the rest of the process.

    `scaled_dot_product_attention` asks the device which kernel it has. Its rule for the H100 (aten/src/ATen/native/
    transformers/cuda/sdp_utils.cpp): flash attention for half precision without a mask, else the memory-efficient
    kernel, else plain products.
    """
    functional.scaled_dot_product_attention = _chosen
    layers_attention._compiled = lambda: lambda *given, **named: _flex(watch, *given, **named)  # type: ignore[assignment]


def _chosen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if query.device.type != "cuda":
        return PLAIN(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    width = query.shape[-1]
    if attn_mask is None and query.dtype in FLASH_DTYPES and width <= FLASH_HEAD_DIM:
        padded = -width % 8
        given = [functional.pad(each, [0, padded]) if padded else each for each in (query, key, value)]
        scale = width**-0.5 if scale is None else scale
        outputs = torch.ops.aten._scaled_dot_product_flash_attention(*given, dropout_p, is_causal, False, scale=scale)
        return outputs[0][..., :width]
    aligned = width % (4 if query.dtype == torch.float32 else 8) == 0
    if query.shape[1] == key.shape[1] and aligned:
        mask = attn_mask
        if mask is not None:
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)
            mask = _aligned(mask).expand(*query.shape[:3], key.shape[2])
        with_graph = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, with_graph, dropout_p, is_causal, scale=scale
        )[0]
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _aligned(mask: Tensor) -> Tensor:
    """The kernel reads a mask's rows 16 elements at a time."""
    length = mask.shape[-1]
    return mask if length % 16 == 0 else functional.pad(mask, [0, -length % 16])[..., :length]


class _Flex(torch.autograd.Function):
    """flex_attention as torch.compile makes it: a kernel forward; backward one for sums of rows and one."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, watch: Watch, lists: tuple[Tensor, ...]
    ) -> Tensor:
        # The result has its dimensions in the order of the query's.
        mixed = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        watch.launch("flex attention forward", [query, key, value, *lists], [mixed, sums])
        ctx.save_for_backward(query, key, value, mixed, sums)
        ctx.watch, ctx.lists = watch, lists
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mixed, sums = ctx.saved_tensors
        deltas = torch.empty_like(sums)
        ctx.watch.launch("flex attention deltas", [mixed, gradient], [deltas])
        gradients = [torch.empty_like(each) for each in (query, key, value)]
        ctx.watch.launch("flex attention backward", [query, key, value, gradient, sums, deltas, *ctx.lists], gradients)
        return (*gradients, None, None)


def _flex(
    watch: Watch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
) -> Tensor:
    assert enable_gqa == (query.shape[1] != key.shape[1])
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    lists = tuple(getattr(block_mask, name) for name in names if getattr(block_mask, name) is not None)
    return _Flex.apply(query, key, value, watch, lists)


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
        fused = functools.partial(_fused, watch, function.name, checked)
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
