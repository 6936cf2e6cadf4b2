"""The split backward (the halves B and W of zero-bubble pipelining: Qi et al. 2023, 2401.10241).

In split mode every module with parameters passes its output through a *probe*, a leaf that takes no memory and whose
gradient is the gradient of that output, and records the tensors for its weight half on a tape. The input half is then
`torch.autograd.grad` with respect to the inputs and the probes, and the weight half is a plain computation outside of
autograd. Probes are inputs and saved tensors are outputs of the forward, so a compiled forward stays a pure function.

`accumulate` and `gradients_of` call autograd's engine directly. `torch.autograd.backward` and `grad` check every
argument before they call the engine. Between two waits for another rank, when caches are cold, this takes a quarter of
a small backward's CPU time (measured). A pipeline does not need these checks: it passes one gradient of the right
shape for each edge, and the engine itself refuses others.

A backward may recompute tensors instead of saving them (Korthikanti et al. 2022, 2205.05198, section 5): `Rerun`.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._C import _FunctionBase
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

Tensors = tuple[Tensor, ...]

WeightGradients = Iterable[tuple[nn.Parameter, Tensor]]
"""Parameters with their gradients."""

Place = Tensor | GradientEdge
"""An edge of the autograd graph at which a gradient enters or leaves."""


def gradient_edge(tensor: Tensor) -> GradientEdge:
    """Return the edge that torch's `get_gradient_edge` returns, in a form that keeps the graph of a tensor alive, but
    not the tensor's memory."""
    node = tensor.grad_fn
    if node is None or isinstance(node, _FunctionBase):
        # A leaf, or a Python node, which only lives while C++ code refers to it.
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)


def accumulate(outputs: Sequence[Place], gradients: Sequence[Tensor]) -> None:
    """Add to the `.grad` of every leaf of the graph of `outputs`, as `torch.autograd.backward` does. Frees the
    graph."""
    _engine_run_backward(
        tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def gradients_of(
    inputs: Sequence[Place], outputs: Sequence[Place], gradients: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `inputs`, None for inputs that `outputs` do not use, as `torch.autograd.grad` does.
    Frees the graph."""
    return _engine_run_backward(tuple(outputs), tuple(gradients), False, False, tuple(inputs), True, False)


class SplitModule(nn.Module):
    """A module with its own parameters that can compute their gradients separately from its input's gradient.

    exclusive: only the module's own forward uses its parameters.
    """

    exclusive: ClassVar[bool] = True

    def weight_half(self, saved: Tensors, gradient: Tensor) -> WeightGradients:
        """Return (parameter, gradient) for each own parameter.

        saved: tensors that the forward recorded on the tape. gradient: of the probed output. The fused backward of a
        module uses the same arithmetic, so both give the same bits.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define weight_half")


class SplitError(RuntimeError):
    """Halves of a split backward run in the wrong order, or a module that cannot be split."""


@dataclass
class Record:
    """One use of a module: the probe of its output, and the detached tensors that its weight half needs.

    probe: a leaf, or the output's own edge in the autograd graph. rerun: recomputes, from `saved`, the one tensor that
    the weight half needs. integers: small integer tensors that are passed to the weight half after these.
    """

    module: SplitModule
    probe: Tensor | GradientEdge
    saved: Tensors = ()
    rerun: Callable[[], Tensor] | None = None
    integers: Tensors = ()

    def keep_input(self, x: Tensor, rerun: "Rerun | None") -> None:
        """Save the input x for the weight half, or the sources from which `rerun` recomputes it."""
        self.saved, self.rerun = ((x.detach(),), None) if rerun is None else (rerun.sources, rerun)


def unsplit_parameters(module: nn.Module) -> tuple[nn.Parameter, ...]:
    """Return the parameters whose gradients autograd may compute in a forward of `module`, even if it records on a
    tape."""
    owners = (part for part in module.modules() if not (isinstance(part, SplitModule) and part.exclusive))
    parameters = {id(own): own for owner in owners for own in owner.parameters(recurse=False) if own.requires_grad}
    return tuple(parameters.values())


def new_probe(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a leaf of zeros of this shape, in the dtype and on the device of `like`, that occupies one element."""
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(tuple(shape)).requires_grad_()


class InsteadOf(torch.autograd.Function):
    """Puts data into a graph in place of a leaf that takes no memory; the leaf gets the gradient of the data."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, data: Tensor) -> Tensor:
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class SplitTape:
    """Records of one forward of one micro-batch for the two halves of its backward.

    Created for one forward. Probes are created when needed, unless `provide` supplied them.

    unsplit: parameters of modules that cannot split, which the forward may use without recording it. Their whole
    gradient is computed in the input half.
    """

    def __init__(self, unsplit: Sequence[nn.Parameter] = ()) -> None:
        self._unsplit = unsplit
        self._provided: list[Tensor] | None = None
        self._records: list[Record] = []
        self._gradients: tuple[Tensor | None, ...] | None = None
        self._nested: list[SplitTape] = []

    def nested(self) -> "SplitTape":
        """Return a tape for a part of the forward that the input half reruns. This tape runs its weight half too."""
        self._nested.append(SplitTape())
        return self._nested[-1]

    def provide(self, probes: list[Tensor]) -> None:
        """Supply the probes for the next forward, in order of use, because a compiled forward needs them
        beforehand."""
        self._provided = probes

    def record(self, module: SplitModule, shape: Sequence[int], like: Tensor) -> Record:
        """Record a use of `module`, with the probe for its output of this shape; the caller fills in `saved`.

        like: a tensor with the output's dtype and device.
        """
        probe = new_probe(shape, like) if self._provided is None else self._provided[len(self._records)]
        record = Record(module, probe)
        self._records.append(record)
        return record

    def record_output(self, module: SplitModule, output: Tensor, saved: Tensors) -> None:
        """Record a use of `module` by the autograd node that has just computed its `output`, without a probe.

        The gradient that reaches this node is the output's, even if the output is changed in place later. A view is
        represented by its base, because the graph of a changed view bypasses the view's own node.
        """
        whole = output._base if output._is_view() and output._base is not None else output
        self._records.append(Record(module, gradient_edge(whole), saved))

    def extend(self, other: "SplitTape") -> None:
        """Append the records of a tape on which another part of this forward was recorded."""
        self._records += other._records

    def fresh_probes(self) -> list[Tensor]:
        """Return new probes of the shapes in this forward, for another forward of the same module and shapes."""
        probes = (record.probe for record in self._records)
        return [new_probe(probe.shape, probe) for probe in probes if isinstance(probe, Tensor)]

    def emptied(self) -> "SplitTape":
        """Return this tape without its tensors; only `fresh_probes` can be called on it."""
        for record in self._records:
            record.saved, record.rerun = (), None
        return self

    @property
    def records(self) -> Sequence[Record]:
        """Return the records so far, in order."""
        return self._records

    @property
    def kept(self) -> list[Tensor]:
        """Return the tensors for the weight half: the inputs that the forward saved and, after the input half, the
        gradients."""
        saved = [tensor for record in self._records for tensor in record.saved]
        saved += [tensor for tape in self._nested for tensor in tape.kept]
        return saved + [gradient for gradient in self._gradients or () if gradient is not None]

    def backward_input(
        self, outputs: Sequence[Place], grad_outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """Run the input half: return the gradients of `inputs`, and save the gradients of all probes on the tape.
        Frees the autograd graph.

        An input that needs no gradient gets None. Parameters whose uses the forward did not record get their whole
        gradient now, with a warning the first time. Raises SplitError when called twice.
        """
        if self._gradients is not None:
            raise SplitError("the input half of this micro-batch has run; each half runs once")
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        probes = [record.probe for record in self._records]
        sought: list[Place] = [*wanted, *probes, *self._unsplit]
        gradients: Sequence[Tensor | None] = [None] * len(sought)
        if outputs and sought:
            gradients = gradients_of(sought, outputs, grad_outputs)
        self._gradients = tuple(gradients[len(wanted) : len(wanted) + len(probes)])
        self._add_unsplit(gradients[len(wanted) + len(probes) :])
        of_wanted = iter(gradients)
        return tuple(next(of_wanted) if tensor.requires_grad else None for tensor in inputs)

    def _add_unsplit(self, gradients: Sequence[Tensor | None]) -> None:
        pairs = [(p, gradient) for p, gradient in zip(self._unsplit, gradients, strict=True) if gradient is not None]
        for parameter, gradient in pairs:
            _accumulate(parameter, gradient)
        if pairs:
            warnings.warn(
                "the input half computes the gradients of modules without a weight half, "
                "so that less work is left to fill bubbles; megapipe.layers.adoption.report(module) names them",
                stacklevel=3,
            )

    def backward_weight(self) -> None:
        """Run the weight half: add every parameter's gradient to its `.grad`. Frees the tape's tensors.

        Raises SplitError before the input half, or when called twice.
        """
        if self._gradients is None:
            raise SplitError("the weight half needs the gradients that backward_input leaves; run each once")
        # Add up a parameter's uses first, from the last to the first, as autograd does, to get the same bits. No name
        # may keep the zip, which refers to its last pair.
        reached = [
            (record, gradient)
            for record, gradient in zip(self._records, self._gradients, strict=True)
            if gradient is not None
        ]
        self._records, self._gradients = [], None
        uses_left = Counter(id(own) for record, _ in reached for own in record.module._parameters.values())
        sums: dict[int, Tensor] = {}
        with torch.no_grad():
            # A record and its parameters' gradients are freed before the next one's are computed.
            while reached:
                _add_gradients(*reached.pop(), uses_left, sums)
        while self._nested:
            self._nested.pop().backward_weight()


def _add_gradients(record: Record, gradient: Tensor, uses_left: Counter[int], sums: dict[int, Tensor]) -> None:
    """Accumulate the gradients of a module's parameters, or add them to `sums` if there are further uses.

    gradient: of the module's output. uses_left, sums: by the id of the parameter.
    """
    saved = record.saved if record.rerun is None else (record.rerun(),)
    for parameter, contribution in record.module.weight_half((*saved, *record.integers), gradient):
        key = id(parameter)
        uses_left[key] -= 1
        total = sums.pop(key) + contribution if key in sums else contribution
        if uses_left[key]:
            sums[key] = total
        else:
            _accumulate(parameter, total)


def _accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Accumulate a gradient, as autograd does at a leaf."""
    if not parameter.requires_grad:
        return
    gradient = gradient.view(parameter.shape)
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.grad_dtype or parameter.dtype)
    else:
        parameter.grad.add_(gradient)


@dataclass(frozen=True)
class Rerun:
    """How to recompute a tensor, with the same bits.

    make: a pure function. sources: its arguments, detached from the graph; other ops save them for their own backward.
    """

    make: Callable[..., Tensor]
    sources: Tensors

    def __call__(self) -> Tensor:
        """Return the tensor."""
        with torch.no_grad():
            return self.make(*self.sources)


def save_input(ctx: Any, x: Tensor, rerun: Rerun | None, *others: Tensor) -> None:
    """Save the tensors of an operation's backward for `saved_input`: `others`, and x or the sources that recompute it.

    Autograd frees saved tensors directly after the operation's backward; all else that a node refers to lives as long
    as the graph.
    """
    ctx.make = None if rerun is None else rerun.make
    ctx.save_for_backward(*others, *((x,) if rerun is None else rerun.sources))


def saved_input(ctx: Any, saved: Sequence[Tensor]) -> Tensor:
    """Return the input x, from the tensors that `save_input` saved after `others`."""
    return saved[0] if ctx.make is None else Rerun(ctx.make, tuple(saved))()


class _RerunProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[..., Tensor], value: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(value, *tensors)
        ctx.make = make
        return torch.bmm(make(*tensors), value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        value, *tensors = ctx.saved_tensors
        leaves = tuple(tensor.detach().requires_grad_() for tensor in tensors)
        with torch.enable_grad():
            weights = ctx.make(*leaves)
        of_weights = torch.bmm(gradient, value.transpose(1, 2))
        of_value = torch.bmm(weights.detach().transpose(1, 2), gradient)
        return None, of_value, *torch.autograd.grad(weights, leaves, of_weights)


def rerun_product(make: Callable[..., Tensor], value: Tensor, *tensors: Tensor) -> Tensor:
    """Return the batched product of `make(*tensors)` and `value`, and save only these tensors, which all require grad.
    The backward makes the first factor again, but not the product.

    make: has no parameters, and returns the same bits every time.
    """
    output: Tensor = _RerunProduct.apply(make, value, *tensors)
    return output


class _RerunModule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor, SplitTape | None], Tensor], tape: SplitTape | None, x: Tensor
    ) -> Tensor:
        ctx.run, ctx.tape = run, tape
        ctx.save_for_backward(x)
        return run(x, None)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        leaf = ctx.saved_tensors[0].detach().requires_grad_()
        tape = None if ctx.tape is None else ctx.tape.nested()
        with torch.enable_grad():
            edge = gradient_edge(ctx.run(leaf, tape))
        if tape is None:
            accumulate([edge], [gradient])
            return None, None, leaf.grad
        return None, None, *tape.backward_input([edge], [gradient], [leaf])


def rerun_in_backward(run: Callable[[Tensor, SplitTape | None], Tensor], tape: SplitTape | None, x: Tensor) -> Tensor:
    """Return `run(x, None)`, but save only x: the backward calls `run` again, with a tape if it is split.

    run: returns the same bits every time; its modules have parameters of their own. tape: of the whole forward.
    """
    output: Tensor = _RerunModule.apply(run, tape, x)
    return output
