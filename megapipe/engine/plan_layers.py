"""What a sequence of modules is before it has memory: parameters and their names, and what passes between layers.

The layers run once on meta tensors, which have shapes and no elements: nothing is computed, and every rank knows the
whole model without building it.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megapipe.costs.parameters import Init, LayerSpec, ParameterSpec
from megapipe.engine.errors import PipelineError
from megapipe.engine.stage import TensorSpec
from megapipe.engine.units import as_tuple

Layer = nn.Module | Callable[[], nn.Module]
"""A module, or what makes one: then a rank builds only the layers that it runs."""

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class LayerPlan:
    """One layer. aliases: further paths of a parameter within the layer -> its path in `spec`. outputs: see there."""

    spec: LayerSpec
    aliases: dict[str, str]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class ModelPlan:
    """All layers, and the one dtype of their parameters."""

    layers: tuple[LayerPlan, ...]
    dtype: torch.dtype

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        """The layers' parameters."""
        return tuple(layer.spec for layer in self.layers)


def clone(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of `module` with `convert` of every parameter and buffer in their places; nothing is copied for them."""
    tensors = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(tensor): convert(tensor) for tensor in tensors})


def plan_layers(layers: Sequence[Layer], sample: Sequence[Tensor]) -> ModelPlan:
    """Find out what passes between layers when micro-batches look like `sample`.

    Raises PipelineError naming the layer that cannot take what it gets, changes a buffer, or has a parameter that no
    gradient reaches.
    """
    modules = [
        _on_meta(index, layer) for index, layer in enumerate(layers)
    ]  # all alive, so that identities are unique
    names: dict[int, str] = {}
    meta: dict[int, Tensor] = {}
    passed = tuple(TensorSpec(tuple(each.shape), each.dtype, requires_grad=False) for each in sample)
    plans = []
    for index, module in enumerate(modules):
        spec, aliases = _parameters(index, module, names)
        outputs = _dry_run(index, _skeleton(index, module, meta), passed)
        plans.append(LayerPlan(spec, aliases, outputs))
        passed = outputs
    return ModelPlan(tuple(plans), _common_dtype(modules))


def _on_meta(index: int, layer: Layer) -> nn.Module:
    if isinstance(layer, nn.Module):
        return layer
    with torch.device("meta"):
        module = layer()
    if not isinstance(module, nn.Module):
        raise PipelineError(f"layer {index}: {layer} made a {type(module).__name__}; it must make a torch.nn.Module")
    return module


def _parameters(index: int, module: nn.Module, names: dict[int, str]) -> tuple[LayerSpec, dict[str, str]]:
    """Names as in torch.nn.Sequential; a parameter that an earlier layer has as well keeps its first name."""
    specs: dict[str, ParameterSpec] = {}
    aliases: dict[str, str] = {}
    paths: dict[int, str] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        name = f"{index}.{path}"
        if not parameter.requires_grad:
            raise PipelineError(f"parameter {name} has requires_grad=False; register it as a buffer to keep it fixed")
        if id(parameter) in paths:
            aliases[path] = paths[id(parameter)]
            continue
        paths[id(parameter)] = path
        axes = parameter.dim()
        specs[path] = ParameterSpec(
            names.setdefault(id(parameter), name),
            tuple(parameter.shape),
            None,
            Init("zeros"),
            decay=axes >= 2,
            matrix=axes == 2,
        )
    return LayerSpec(str(index), "block", index, specs), aliases


def _skeleton(index: int, module: nn.Module, meta: dict[int, Tensor]) -> nn.Module:
    """The module without memory. meta: what stands for the tensors of all layers, by identity."""

    def convert(tensor: Tensor) -> Tensor:
        if id(tensor) not in meta:
            empty = torch.empty_like(tensor, device="meta")
            meta[id(tensor)] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
        return meta[id(tensor)]

    try:
        return clone(module, convert)
    except Exception as error:
        raise PipelineError(f"layer {index} ({type(module).__name__}) cannot be copied: {error}") from error


def _dry_run(index: int, skeleton: nn.Module, passed: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    inputs = [
        torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=spec.requires_grad) for spec in passed
    ]
    buffers = {name: (id(buffer), buffer._version) for name, buffer in skeleton.named_buffers()}
    try:
        with torch.device("meta"), torch.enable_grad():
            outputs = as_tuple(skeleton(*inputs))
    except Exception as error:
        source = f"layer {index - 1} gives" if index else "the sample is"
        raise PipelineError(
            f"layer {index} ({type(skeleton).__name__}) cannot take what {source}, {described(passed)}: {error}"
        ) from error
    for name, buffer in skeleton.named_buffers():
        if buffers.get(name) != (id(buffer), buffer._version):
            raise PipelineError(
                f"layer {index} ({type(skeleton).__name__}) changes its buffer {name!r} in the forward; micro-batches "
                "run in the order of the schedule and replicas apart, so its value would depend on both: use a layer "
                "without running statistics (LayerNorm, GroupNorm), or put it into eval mode"
            )
    _require_gradients(index, skeleton, outputs)
    return tuple(TensorSpec(tuple(each.shape), each.dtype, each.requires_grad) for each in outputs)


def _require_gradients(index: int, skeleton: nn.Module, outputs: Sequence[Tensor]) -> None:
    """Raise PipelineError for a parameter that no output was made of."""
    seen: set[object] = set()
    reached: set[int] = set()
    waiting = [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            reached.add(id(node.variable))
        waiting.extend(following for following, _ in node.next_functions)
    for name, parameter in skeleton.named_parameters():
        if id(parameter) not in reached:
            raise PipelineError(
                f"parameter {index}.{name} gets no gradient: nothing that layer {index} ({type(skeleton).__name__}) "
                "returns depends on it; remove it, or register it as a buffer"
            )


def _common_dtype(modules: Sequence[nn.Module]) -> torch.dtype:
    found: dict[torch.dtype, str] = {}
    for index, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            found.setdefault(parameter.dtype, f"{index}.{name}")
    if len(found) > 1:
        each = ", ".join(f"{name} {short(dtype)}" for dtype, name in found.items())
        raise PipelineError(f"parameters have several dtypes ({each}); convert the layers to one of them")
    dtype = next(iter(found), torch.float32)
    if dtype not in DTYPES:
        raise PipelineError(
            f"parameters are {short(dtype)}; convert the layers to one of {', '.join(map(short, DTYPES))}"
        )
    return dtype


def short(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def described(specs: Sequence[TensorSpec]) -> str:
    """`[4, 8] float32, [4] int64`."""
    return ", ".join(f"{list(spec.shape)} {short(spec.dtype)}" for spec in specs) or "nothing"
