"""A user's torch modules as a model table: measured on meta tensors, copied, and bound to unit states.

The layers run once on meta tensors, which have shapes but no elements. So nothing is computed, and every rank knows
the whole model without building it. The stages then run copies of the layers that a rank needs.
"""

import copy
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from megapipe.engine.assembly import Assembly, ModelTable
from megapipe.engine.reductions import Communicators
from megapipe.engine.stage import Specs, TensorSpec, described, graph_nodes, short
from megapipe.layers.adoption import adopt, adopted_modules, recording
from megapipe.layers.context_parallel import DotProductAttention
from megapipe.layers.linear import partition_axis, set_tensor_group
from megapipe.layers.split import SplitTape, Tensors
from megapipe.parallel.groups import Group
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules.schedule import Header
from megapipe.spec.ops import ContextAttention
from megapipe.spec.parameters import Init, LayerSpec, ParameterSpec
from megapipe.spec.token_order import Share, TokenOrder, order_of

Loss = Callable[..., Tensor]
"""(the last layer's outputs, then the micro-batch's targets) -> loss summed over the micro-batch, 0-dim."""


class PipelineError(ValueError):
    """Modules, data or settings that a Pipeline cannot run; the message names the value, the rule, and how to fix
    it."""


@dataclass(frozen=True)
class Microbatch:
    """One micro-batch: the first layer's inputs and the loss's targets, each empty if this rank does not need them.

    tape: collects a split backward. random: for each unit that will be recomputed, the states of torch's generators
    before its forward.
    """

    inputs: tuple[Tensor, ...] = ()
    targets: tuple[Tensor, ...] = ()
    tape: SplitTape | None = None
    random: dict[int, list[Tensor]] = field(default_factory=dict, compare=False)


class ModuleUnit(nn.Module):
    """Adapts a module to the engine.

    first: whether it takes the micro-batch's inputs. loss: loss function if this is the last layer, whose outputs it
    takes. recomputed: whether its forward runs a second time before its backward, and must then draw the same random
    numbers. order: in which context ranks hold the tokens of samples.
    """

    def __init__(
        self, module: nn.Module, *, first: bool, loss: Loss | None, recomputed: bool = False, order: TokenOrder
    ) -> None:
        super().__init__()
        self.module = module
        self._order = order
        self._first = first
        self._loss = loss
        self._recomputed = recomputed
        self._adopted = tuple(adopted_modules(module))

    def forward(self, *inputs: Tensor, context: Microbatch) -> tuple[Tensor, ...]:
        """Run the module. Raises ValueError if the loss is not a scalar, or has no gradient."""
        numbers = self._same_numbers(context) if self._recomputed else nullcontext()
        with numbers, recording(self._adopted, context.tape):
            outputs = as_tuple(self.module(*(context.inputs if self._first else inputs)))
        if self._loss is None:
            return outputs
        loss = self._loss(*outputs, *context.targets)
        if loss.dim() != 0:
            raise ValueError(f"the loss has shape {list(loss.shape)}; it must be one number, the micro-batch's sum")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ValueError("the loss depends on no parameter by a differentiable path")
        return (loss,)

    @contextmanager
    def _same_numbers(self, context: Microbatch) -> Iterator[None]:
        """Save the states of the random generators in the first forward, and restore them for the second one."""
        devices = sorted({each.device.index for each in self.parameters() if each.device.type == "cuda"})
        if id(self) not in context.random:
            context.random[id(self)] = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
            yield
            return
        cpu, *others = context.random.pop(id(self))
        with torch.random.fork_rng(devices):
            torch.set_rng_state(cpu)
            for device, state in zip(devices, others, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield

    def share_samples(self, group: Group, kind: ContextAttention) -> None:
        """Let every `DotProductAttention` of the module see the tokens of all ranks of a group."""
        for part in self.module.modules():
            if isinstance(part, DotProductAttention):
                part.share_samples(Share(self._order, group.rank, group.size), group)

    def share(self, original: nn.Module, paths: Iterable[str]) -> None:
        """Put the parameters that were bound at `paths` into all other places of the original's parameters: a second
        path, or an attribute that torch does not register, such as a list."""
        kept = {id(each): each for each in (*self.module.parameters(), *self.module.buffers())}
        bound = {id(original.get_parameter(path)): self.module.get_parameter(path) for path in paths}
        self.module = copy.deepcopy(self.module, kept | bound)
        self._adopted = tuple(adopted_modules(self.module))


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """Return the output of a module as a tuple of tensors. Raises TypeError for anything else."""
    results = (outputs,) if isinstance(outputs, Tensor) else outputs
    if not isinstance(results, tuple | list) or not all(isinstance(each, Tensor) for each in results):
        raise TypeError(f"a layer returned {type(outputs).__name__}; it must return a tensor or a tuple of tensors")
    return tuple(results)


Layer = nn.Module | Callable[[], nn.Module]
"""A module, or a function that creates one, so that a rank creates only the layers that it runs."""

_META_HINT = (
    " (layers are tried on meta tensors, which have no values: "
    "register what a layer keeps as a buffer, and read no values in its forward)"
)

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class ModelPlan:
    """A sequence of modules before memory is allocated, and the common dtype of its parameters.

    specs: parameters of each layer, each under the first of its paths. outputs: of each layer. order: in which
    context ranks hold the tokens of samples.
    """

    specs: tuple[LayerSpec, ...]
    outputs: tuple[Specs, ...]
    dtype: torch.dtype
    order: TokenOrder


@dataclass(frozen=True)
class _Trial:
    """A layer's forward on meta tensors: the graph between `inputs`, leaves, and `outputs`."""

    skeleton: nn.Module
    inputs: Tensors
    outputs: Tensors


def clone(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy of `module` in which `convert` replaces every parameter and buffer, which are not copied."""
    tensors = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(tensor): convert(tensor) for tensor in tensors})


def plan_layers(layers: Sequence[Layer], sample: Sequence[Tensor], *, shared: bool = False) -> ModelPlan:
    """Determine the tensors between layers for micro-batches of the shape of `sample`.

    shared: context ranks hold parts of every sample, and the sample is such a part, with tokens in axis 1.

    Raises PipelineError if a layer fails for its inputs, changes a buffer or an input, mixes tokens that are on
    several ranks, or has a parameter that no gradient reaches.
    """
    # All modules stay alive, so that their ids are unique.
    modules = [_on_meta(index, layer) for index, layer in enumerate(layers)]
    names: dict[int, str] = {}
    meta: dict[int, Tensor] = {}
    passed = tuple(TensorSpec(each.shape, each.dtype, requires_grad=False) for each in sample)
    specs, outputs, trials = [], [], []
    for index, module in enumerate(modules):
        specs.append(_parameters(index, module, names))
        with _TokensApart(index, module) if shared else nullcontext():
            trials.append(_dry_run(index, _skeleton(index, module, meta), passed))
        if shared and index < len(modules) - 1:
            _require_tokens(index, module, trials[-1].outputs, sample[0].shape[1])
        returned = trials[-1].outputs
        passed = tuple(TensorSpec(each.shape, each.dtype, each.requires_grad) for each in returned)
        outputs.append(passed)
    if not names:
        raise PipelineError(f"none of the {len(layers)} layers has a parameter to train")
    _require_gradients(trials)
    attention = [part for module in modules for part in module.modules() if isinstance(part, DotProductAttention)]
    order = order_of("ring", causal=any(part.causal for part in attention))
    return ModelPlan(tuple(specs), tuple(outputs), _common_dtype(modules), order)


class _TokensApart(TorchFunctionMode):
    """Refuses layers that mix tokens without DotProductAttention, if context ranks hold parts of samples."""

    MIXING = (functional.scaled_dot_product_attention, torch.conv1d)

    def __init__(self, index: int, module: nn.Module) -> None:
        super().__init__()
        self._layer = f"layer {index} ({type(module).__name__})"
        for path, part in module.named_modules():
            if isinstance(part, nn.MultiheadAttention | nn.RNNBase):
                raise self._refused(f"has {path or 'itself'}, a torch.nn.{type(part).__name__}")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function. Raises PipelineError for one that mixes tokens."""
        if func in self.MIXING:
            raise self._refused(f"calls {func.__name__}")
        return func(*args, **(kwargs or {}))

    def _refused(self, what: str) -> PipelineError:
        return PipelineError(
            f"{self._layer} {what}, which mixes tokens that are on different context ranks; "
            "use megapipe.DotProductAttention, or no context ranks"
        )


def _require_tokens(index: int, module: nn.Module, outputs: Tensors, tokens: int) -> None:
    """Raise PipelineError if axis 1 of a layer's outputs is not this rank's tokens."""
    if any(output.dim() < 2 or output.shape[1] != tokens for output in outputs):
        raise PipelineError(
            f"layer {index} ({type(module).__name__}) returns {described(outputs)} "
            f"for {tokens} tokens of a sample; with context ranks, axis 1 of whatever passes "
            "between layers must be the tokens: keep that axis, or use no context ranks"
        )


def _on_meta(index: int, layer: Layer) -> nn.Module:
    if isinstance(layer, nn.Module):
        return layer
    with torch.device("meta"):
        module = layer()
    if not isinstance(module, nn.Module):
        raise PipelineError(f"layer {index}: {layer} made a {type(module).__name__}; it must make a torch.nn.Module")
    return module


def _parameters(index: int, module: nn.Module, names: dict[int, str]) -> LayerSpec:
    """Return the parameters, with names as in torch.nn.Sequential; a parameter that an earlier layer has keeps its
    first name."""
    specs: dict[str, ParameterSpec] = {}
    for path, parameter in module.named_parameters():
        name = f"{index}.{path}"
        if not parameter.requires_grad:
            raise PipelineError(f"parameter {name} has requires_grad=False; register it as a buffer to keep it fixed")
        axes = parameter.dim()
        specs[path] = ParameterSpec(
            names.setdefault(id(parameter), name),
            tuple(parameter.shape),
            partition_axis(module, path),
            Init("zeros"),
            decay=axes >= 2,
            matrix=axes == 2,
        )
    return LayerSpec(str(index), "block", index, specs)


def _skeleton(index: int, module: nn.Module, meta: dict[int, Tensor]) -> nn.Module:
    """Return the module on the meta device. meta: meta tensors by the id of the tensors that they replace."""

    def convert(tensor: Tensor) -> Tensor:
        if id(tensor) not in meta:
            empty = torch.empty_like(tensor, device="meta")
            meta[id(tensor)] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
        return meta[id(tensor)]

    try:
        return clone(module, convert)
    except Exception as error:
        raise PipelineError(f"layer {index} ({type(module).__name__}) cannot be copied: {error}") from error


def _dry_run(index: int, skeleton: nn.Module, passed: Specs) -> _Trial:
    meta = torch.device("meta")
    inputs = tuple(spec.allocate(meta).requires_grad_(spec.requires_grad) for spec in passed)
    buffers = {name: (id(each), each._version) for name, each in skeleton.named_buffers()}
    layer = f"layer {index} ({type(skeleton).__name__})"
    try:
        with meta, torch.enable_grad():
            outputs = as_tuple(skeleton(*inputs))
    except PipelineError:
        raise
    except Exception as error:
        source = f"the output of layer {index - 1}" if index else "the sample"
        hint = _META_HINT if "meta" in str(error) else ""
        raise PipelineError(f"{layer} fails for {source}, {described(passed)}: {error}{hint}") from error
    for name, buffer in skeleton.named_buffers():
        if buffers.get(name) != (id(buffer), buffer._version):
            raise PipelineError(
                f"{layer} changes its buffer {name!r} in the forward; its value would "
                "depend on the order of micro-batches and on the replica: use a layer "
                "without running statistics (LayerNorm, GroupNorm), or put it into eval mode"
            )
    if any(tensor._version for tensor in inputs):
        raise PipelineError(
            f"{layer} changes an input in place; whether other layers see the change would "
            "depend on their rank: change a clone instead"
        )
    return _Trial(skeleton, inputs, outputs)


def _require_gradients(trials: Sequence[_Trial]) -> None:
    """Raise PipelineError for a parameter that does not affect any output of the model.

    Layers are checked from the last to the first, because an output of a layer counts only if the next layer uses it.
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
                raise PipelineError(f"parameter {index}.{name} gets no gradient: {why}; remove it or make it a buffer")
        used = {place for place, each in enumerate(trial.inputs) if id(each) in reached}


def _behind(outputs: Sequence[Tensor]) -> set[int]:
    """Return the ids of the leaves that tensors depend on."""
    reached = {id(output) for output in outputs if output.requires_grad and output.is_leaf}
    nodes = graph_nodes(output.grad_fn for output in outputs)
    return reached | {id(node.variable) for node in nodes if hasattr(node, "variable")}


def _common_dtype(modules: Sequence[nn.Module]) -> torch.dtype:
    names: dict[torch.dtype, str] = {}
    for index, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            names.setdefault(parameter.dtype, f"{index}.{name}")
    if len(names) > 1:
        each = ", ".join(f"{name} {short(dtype)}" for dtype, name in names.items())
        raise PipelineError(f"parameters have several dtypes ({each}); convert them to one")
    dtype = next(iter(names), torch.float32)
    if dtype not in DTYPES:
        raise PipelineError(f"parameters are {short(dtype)}; convert them to one of {', '.join(map(short, DTYPES))}")
    return dtype


WRAPPED = "module."
"""Prefix of a layer's paths inside its ModuleUnit."""

GENERATOR_LOCK = threading.Lock()
"""All threads have the same random generator of torch, and ranks may be threads."""


@dataclass
class UserModules:
    """The modules of a user. They are not changed: the stages run copies.

    plan: their plan, measured on meta tensors. loss: of the last layer's outputs. seed: for the weights of layers that
    are created by functions, together with the layer's number. recomputed: layers whose forward runs a second time.
    """

    layers: Sequence[Layer]
    plan: ModelPlan
    mesh: Mesh
    loss: Loss
    seed: int
    recomputed: Collection[int]
    _originals: dict[int, nn.Module] = field(default_factory=dict)

    def table(self, ranges: Sequence[range], *, splits: bool) -> ModelTable:
        """Return the model table. ranges: layers of each stage. splits: whether the schedule splits backwards."""
        return ModelTable(
            tuple(_inside_unit(spec) for spec in self.plan.specs),
            ranges,
            [self.plan.outputs[members[-1]] for members in ranges[:-1]],
            lambda index: self._copy(index, splits),
            self.plan.dtype,
            bound=self._bound,
        )

    def initialize(self, assembly: Assembly, header: Header, groups: Communicators) -> None:
        """Copy the weights of the layers; if there are several replicas, tensor ranks or uses of a tied weight, those
        of the first one.

        A collective call."""
        states, tensor = assembly.states, self.mesh.group("tensor")
        whole = {
            id(state): torch.zeros(state.table.num_elements, dtype=state.master.dtype, device=self.mesh.device)
            for state in states
        }
        holders = {segment.spec.name: (state, segment) for state in states for segment in state.table}
        for index, _ in assembly.layers():
            for path, spec in self.plan.specs[index].parameters.items():
                state, segment = holders[spec.name]
                value = self._originals[index].get_parameter(path).detach()
                if tensor.size > 1:
                    value = value.to(self.mesh.device).contiguous().clone()
                    tensor.broadcast(value, 0)
                own = tuple(map(slice, segment.box.starts, segment.box.stops))
                state.owned_view(whole[id(state)], segment).copy_(value[own])
        self._originals.clear()
        for state in states:
            if state.table.num_elements:
                groups.data.broadcast(whole[id(state)], 0)
        for group, members in groups.tied.items():
            owned = [stage.states.get(header.tied_unit(number, group)) for number, stage in assembly.stages.items()]
            members.broadcast(whole[id(next(state for state in owned if state is not None))], 0)
        for state in states:
            _start(state, whole.pop(id(state)))

    def _copy(self, index: int, splits: bool) -> ModuleUnit:
        """Return a copy of a layer whose parameters are not bound yet; buffers are copied to this rank's device."""
        if index not in self._originals:
            self._originals[index] = self._built(index)
        module = clone(self._originals[index], self._place)
        last = index == len(self.layers) - 1
        return ModuleUnit(
            adopt(module) if splits else module,
            first=index == 0,
            loss=self.loss if last else None,
            recomputed=index in self.recomputed,
            order=self.plan.order,
        )

    def _bound(self, index: int, twins: Sequence[nn.Module]) -> None:
        for twin in cast(Sequence[ModuleUnit], twins):
            twin.share(self._originals[index], self.plan.specs[index].parameters)
            set_tensor_group(twin.module, self.mesh.group("tensor"))

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, nn.Parameter) else tensor.to(self.mesh.device)

    def _built(self, index: int) -> nn.Module:
        layer = self.layers[index]
        device = self.mesh.device
        if not isinstance(layer, nn.Module):
            devices = [device] if device.type == "cuda" else []
            with GENERATOR_LOCK, torch.random.fork_rng(devices), device:
                torch.manual_seed(self.seed + index)
                layer = layer()
        if any(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers())):
            raise PipelineError(
                f"layer {index} is on the meta device: "
                "pass a function that creates it instead, so that its parameters get values"
            )
        return layer


def _start(state: UnitState, whole: Tensor) -> None:
    """Give a state its initial weights. whole: in the layout of its table."""
    state.master.copy_(whole[state.shard])
    if not state.transient_weights:
        for copy in state.weights:
            copy.copy_(whole)
    state.restore(state.newest)


def _inside_unit(spec: LayerSpec) -> LayerSpec:
    return replace(spec, parameters={WRAPPED + path: each for path, each in spec.parameters.items()})
