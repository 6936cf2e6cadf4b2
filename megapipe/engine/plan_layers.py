"""What a sequence of modules is before it has memory: parameters and their names, and what passes between layers.

The layers run once on meta tensors, which have shapes and no elements: nothing is computed, and every rank knows the
whole model without building it.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megapipe.engine.errors import PipelineError
from megapipe.engine.stage import TensorSpec, described, short
from megapipe.engine.units import as_tuple
from megapipe.spec.parameters import Init, LayerSpec, ParameterSpec

Layer = nn.Module | Callable[[], nn.Module]
"""A module, or what makes one: then a rank builds only the layers that it runs."""

_META_HINT = (
    " (layers are tried on meta tensors, which have no values: register what a layer keeps as a buffer, and read no "
    "values in its forward)"
)

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class LayerPlan:
    """One layer. spec: its parameters, each under the first of its paths. outputs: what it returns."""

    spec: LayerSpec
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


@dataclass(frozen=True)
class _Trial:
    """A layer's forward on meta tensors: the graph between `inputs`, leaves, and `outputs`."""

    skeleton: nn.Module
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def clone(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of `module` with `convert` of every parameter and buffer in their places; nothing is copied for them."""
    tensors = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(tensor): convert(tensor) for tensor in tensors})


def plan_layers(layers: Sequence[Layer], sample: Sequence[Tensor]) -> ModelPlan:
    """Find out what passes between layers when micro-batches look like `sample`.

    Raises PipelineError naming the layer that cannot take what it gets, changes a buffer or an input, or has a
    parameter that no gradient reaches.
    """
    # All alive, so that identities are unique.
    modules = [_on_meta(index, layer) for index, layer in enumerate(layers)]
    names: dict[int, str] = {}
    meta: dict[int, Tensor] = {}
    passed = tuple(TensorSpec(tuple(each.shape), each.dtype, requires_grad=False) for each in sample)
    plans, trials = [], []
    for index, module in enumerate(modules):
        spec = _parameters(index, module, names)
        trials.append(_dry_run(index, _skeleton(index, module, meta), passed))
        passed = tuple(TensorSpec(tuple(each.shape), each.dtype, each.requires_grad) for each in trials[-1].outputs)
        plans.append(LayerPlan(spec, passed))
    if not names:
        raise PipelineError(f"none of the {len(layers)} layers has a parameter; there is nothing to train")
    _require_gradients(trials)
    return ModelPlan(tuple(plans), _common_dtype(modules))


def _on_meta(index: int, layer: Layer) -> nn.Module:
    if isinstance(layer, nn.Module):
        return layer
    with torch.device("meta"):
        module = layer()
    if not isinstance(module, nn.Module):
        raise PipelineError(f"layer {index}: {layer} made a {type(module).__name__}; it must make a torch.nn.Module")
    return module


def _parameters(index: int, module: nn.Module, names: dict[int, str]) -> LayerSpec:
    """Names as in torch.nn.Sequential; a parameter that an earlier layer has as well keeps its first name."""
    specs: dict[str, ParameterSpec] = {}
    for path, parameter in module.named_parameters():
        name = f"{index}.{path}"
        if not parameter.requires_grad:
            raise PipelineError(f"parameter {name} has requires_grad=False; register it as a buffer to keep it fixed")
        axes = parameter.dim()
        specs[path] = ParameterSpec(
            names.setdefault(id(parameter), name),
            tuple(parameter.shape),
            None,
            Init("zeros"),
            decay=axes >= 2,
            matrix=axes == 2,
        )
    return LayerSpec(str(index), "block", index, specs)


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


def _dry_run(index: int, skeleton: nn.Module, passed: Sequence[TensorSpec]) -> _Trial:
    inputs = tuple(
        torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=spec.requires_grad) for spec in passed
    )
    buffers = {name: (id(buffer), buffer._version) for name, buffer in skeleton.named_buffers()}
    layer = f"layer {index} ({type(skeleton).__name__})"
    try:
        with torch.device("meta"), torch.enable_grad():
            outputs = as_tuple(skeleton(*inputs))
    except Exception as error:
        source = f"the output of layer {index - 1}" if index else "the sample"
        hint = _META_HINT if "meta" in str(error) else ""
        raise PipelineError(f"{layer} fails for {source}, {described(passed)}: {error}{hint}") from error
    for name, buffer in skeleton.named_buffers():
        if buffers.get(name) != (id(buffer), buffer._version):
            raise PipelineError(
                f"{layer} changes its buffer {name!r} in the forward; micro-batches run in the order of the "
                "schedule, on several replicas, so its value would depend on both: use a layer without running "
                "statistics (LayerNorm, GroupNorm), or put it into eval mode"
            )
    if any(tensor._version for tensor in inputs):
        raise PipelineError(
            f"{layer} changes an input in place; whether other layers see the change would depend on their rank: "
            "change a clone instead"
        )
    return _Trial(skeleton, inputs, outputs)


def _require_gradients(trials: Sequence[_Trial]) -> None:
    """Raise PipelineError for a parameter that nothing the model returns was made of.

    From the last layer to the first: of what a layer returns, only that counts which the next one makes use of.
    """
    used: set[int] | None = None
    for index, trial in reversed(list(enumerate(trials))):
        reached = _behind([each for place, each in enumerate(trial.outputs) if used is None or place in used])
        for name, parameter in trial.skeleton.named_parameters():
            if id(parameter) not in reached:
                layer = f"layer {index} ({type(trial.skeleton).__name__})"
                why = f"nothing that {layer} returns depends on it"
                if id(parameter) in _behind(trial.outputs):
                    why = f"the layers after {layer} drop or detach its result"
                raise PipelineError(
                    f"parameter {index}.{name} gets no gradient: {why}; remove it, or register it as a buffer"
                )
        used = {place for place, each in enumerate(trial.inputs) if id(each) in reached}


def _behind(outputs: Sequence[Tensor]) -> set[int]:
    """Identities of the leaves that tensors were made of."""
    reached = {id(output) for output in outputs if output.requires_grad and output.is_leaf}
    seen: set[object] = set()
    waiting = [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            reached.add(id(node.variable))
        waiting.extend(following for following, _ in node.next_functions)
    return reached


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
