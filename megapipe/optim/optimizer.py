"""Optimizers of UnitStates, which the engine calls for UPDATE actions: AdamW and SGD.

They step flat buffers, and the bits do not depend on where segments are cut.

AdamW (Loshchilov and Hutter, 2019, algorithm 2): a kernel of the registry runs the step, a buffer at a time, if one is
chosen; otherwise torch's fused kernel does. On CPUs that kernel computes whole vector registers with fused
multiply-adds, and the remaining elements without them, so the end of a shard would differ from the same elements
inside a longer shard. Buffers of units are cut at multiples of `SEGMENT_ALIGNMENT`, which no register straddles. The
registry's reference, in elementwise operations, processes the elements of a tensor beyond such a multiple, fp64
tensors, whose gradients torch's kernel would scale in fp32, and bf16 moments, which torch's kernel does not support.

SGD has the recursion of torch.optim.SGD. Its decay is *coupled*: it is added to the gradient, and so enters the
momentum (AdamW's is decoupled). There is no dampening, and the learning rate multiplies the momentum, so that changing
it also affects past gradients (unlike Sutskever et al., 2013). The step consists of torch's elementwise operations.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megapipe.config.optimizer import OptimizerConfig
from megapipe.kernels.ops import OPS
from megapipe.kernels.reference.optimizer import Buffers, Coefficients, Elements
from megapipe.kernels.registry import Registry
from megapipe.parallel.segments import Segment
from megapipe.parallel.unit_state import UnitState
from megapipe.random.bits import rounding_key
from megapipe.spec.parameters import SEGMENT_ALIGNMENT, ParameterSpec


def elements_of(segment: Segment, skipped: int = 0) -> Elements:
    """Return the indices, in the whole parameter, of the elements of a tensor rank's shard after the first
    `skipped`."""
    shape, starts, own = segment.spec.shape, segment.box.starts, segment.box.shape
    axis = segment.spec.partition_axis or 0
    inner = prod(shape[axis + 1 :])
    return Elements(starts[axis] * inner, own[axis] * inner, shape[axis] * inner, skipped)


def round_weights(state: UnitState, wide: Tensor, seed: int, update: int, kernels: Registry = OPS) -> None:
    """Overwrite the newest weights with `wide`, their fp32 values, rounded to the same bits however the weights are
    sharded.

    update: number of the unit's update. kernels: which backend rounds. Padding stays as it is.
    """
    op = kernels.pick("stochastic_rounding", wide)
    for segment in state.table:
        elements = state.held(segment)
        if elements:
            target, source = state.in_shard(state.master, segment), state.in_shard(wide, segment)
            key = rounding_key(seed, segment.spec.name, update)
            op.apply(target, source, key, elements_of(segment, elements.start))


FIRST, SECOND = "first_moment", "second_moment"
MOMENTUM = "momentum"
MOMENT_DTYPES = {"fp32": None, "bf16": torch.bfloat16}
"""Name of the moments' dtype in the configuration -> dtype; None for the gradients' dtype."""


@dataclass(frozen=True)
class ParameterGroup:
    """Elements of flat buffers that take the same step: the decayed elements of some units, or the others.

    step: number of the units' update, from 1. moments: name -> one view per unit. decay: weight decay, 0 for the
    others. copies: bf16 buffers to which the step also writes the new parameters; empty if it need not.
    """

    step: int
    parameters: list[Tensor]
    gradients: list[Tensor]
    moments: dict[str, list[Tensor]]
    decay: float
    copies: list[Tensor]


class FlatOptimizer(ABC):
    """Base of the optimizers. Weight decay applies only to the decayed range of every unit's flat buffer.

    Moments are in UnitState.moments, allocated at a unit's first update. `applied`, unit name -> number of updates,
    only counts updates that were applied: a skipped step does not advance it. kernels: which backends run the steps'
    ops. seed: seed of the stochastic rounding of weights that are only kept in bf16.
    """

    writes_copies: ClassVar[bool] = False
    """Whether `_step` writes bf16 working copies along with their masters."""

    def __init__(self, config: OptimizerConfig, kernels: Registry = OPS, seed: int = 0) -> None:
        self._config = config
        self._kernels = kernels
        self._seed = seed
        self.moment_dtype = MOMENT_DTYPES[config.moment_dtype]
        self.applied: dict[str, int] = {}

    @property
    @abstractmethod
    def moment_names(self) -> tuple[str, ...]:
        """Every moment that a unit keeps between updates, by its name in UnitState.moments and in checkpoints."""

    @property
    def _part_moments(self) -> tuple[str, ...]:
        """The moments that are passed to `_step`."""
        return self.moment_names

    def kinds(self, spec: ParameterSpec) -> tuple[str, ...]:
        """Return the names of the moments that a parameter has."""
        return self.moment_names

    def allocate(self, state: UnitState) -> None:
        """Allocate a unit's moments, all zero."""
        part = state.within_shard(slice(0, state.table.num_elements))
        for name in self.moment_names:
            state.add_moment(name, part, self.moment_dtype)

    @abstractmethod
    def _step(self, part: ParameterGroup, learning_rate: float, coefficient: Tensor) -> None:
        """Change the parameters, moments and copies of a group in place; gradients are multiplied by `coefficient`."""

    def update(self, states: Sequence[UnitState], version: int, learning_rate: float, coefficient: Tensor) -> None:
        """Advance `states` to absolute weight `version`; gradients are multiplied by `coefficient`, a 0-dim tensor."""
        self.prepare(states)
        for state in states:
            state.begin_update(version)
            self.applied[state.name] = self.applied.get(state.name, 0) + 1
            _balance(state)
        rounded = [state for state in states if state.master.dtype not in (torch.float32, torch.float64)]
        for state in rounded:  # one by one, so that wide weights exist for one unit at a time
            self._step_rounded(state, learning_rate, coefficient)
        exact = [state for state in states if state not in rounded]
        for step in sorted({self.applied[state.name] for state in exact}):
            same_step = [state for state in exact if self.applied[state.name] == step]
            self._step_units(same_step, [state.master for state in same_step], step, learning_rate, coefficient)
        for state in states:
            if self._bf16_copy(state) is not None:
                state.mark_published()

    def prepare(self, states: Sequence[UnitState]) -> None:
        """Allocate the moments that the first update of `states` would allocate."""
        for state in states:
            if not state.moments:
                self.allocate(state)

    def rehearse(self, states: Sequence[UnitState]) -> None:
        """Run the kernels of an update on copies of `states`, one unit at a time. Their moments must be allocated."""
        for state in states:
            twin, optimizer = state.twin(), copy.copy(self)
            optimizer.applied = dict(self.applied)
            optimizer.update([twin], twin.newest + 1, 0.0, torch.ones((), device=twin.weights[0].device))

    def _step_rounded(self, state: UnitState, learning_rate: float, coefficient: Tensor) -> None:
        step, wide = self.applied[state.name], state.master.to(state.accumulate_dtype)
        self._step_units([state], [wide], step, learning_rate, coefficient)
        round_weights(state, wide, self._seed, step, self._kernels)

    def _step_units(
        self, states: Sequence[UnitState], masters: Sequence[Tensor], step: int, rate: float, coefficient: Tensor
    ) -> None:
        """Step the decayed elements of units, then the others. masters: the buffers to change, one per unit."""
        for decayed in (True, False):
            self._step(self._part(states, masters, step, decayed), rate, coefficient)

    def _part(
        self, states: Sequence[UnitState], masters: Sequence[Tensor], step: int, decayed: bool
    ) -> ParameterGroup:
        ranges = [(state, self._range(state, decayed)) for state in states]
        filled = [(state, part) for state, part in ranges if part.stop > part.start]
        pairs = zip(masters, ranges, strict=True)
        return ParameterGroup(
            step,
            [master[part] for master, (_, part) in pairs if part.stop > part.start],
            # The newest version serves as the number of the update: it is larger by the number of versions, which is a
            # multiple of the number of buffers.
            [state.reduced_gradient(state.newest)[part] for state, part in filled],
            {name: [state.moment(name, part) for state, part in filled] for name in self._part_moments},
            self._config.weight_decay if decayed else 0.0,
            [working_copy[part] for state, part in filled if (working_copy := self._bf16_copy(state)) is not None],
        )

    def _bf16_copy(self, state: UnitState) -> Tensor | None:
        """Return the working copy that `_step` writes along with the master weights; None if it writes none."""
        weights = state.working_copy if self.writes_copies else None
        return weights if weights is not None and weights.dtype == torch.bfloat16 else None

    def _range(self, state: UnitState, decayed: bool) -> slice:
        """Return the decayed elements, or the others, of this rank's part of a unit's buffers."""
        stop, end = state.table.undecayed.start, state.table.undecayed.stop
        return state.within_shard(slice(0, stop) if decayed else slice(stop, end))


def _balance(state: UnitState) -> None:
    """Move the biases that balance experts against their load (Wang et al. 2024, arXiv 2408.15664, algorithm 1).

    Their gradients are then cleared, so that the optimizer's own step does not change them.
    """
    for segment in state.table:
        if segment.spec.balance_rate and state.held(segment):
            load = state.in_shard(state.reduced_gradient(state.newest), segment)
            weight = state.in_shard(state.master, segment)
            weight.sub_(load.sign().to(weight.dtype), alpha=segment.spec.balance_rate)
            load.zero_()


BLOCK = 1 << 16
"""Number of elements per block of a step on the CPU."""


def blocks(lists: Sequence[Sequence[Tensor]]) -> Iterator[tuple[Tensor, ...]]:
    """Yield tensors that belong together, block by block; whole on a GPU. Raises ValueError if lengths differ."""
    for tensors in zip(*lists, strict=True):
        if tensors[0].is_cuda:
            yield tensors
        else:
            yield from zip(*(torch.split(tensor, BLOCK) for tensor in tensors), strict=True)


Lists = list[list[Tensor]]


@torch.no_grad()
def adamw_step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first_moments: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    update: Coefficients,
    *,
    kernels: Registry = OPS,
    gradient_scale: Tensor | None = None,
    copies: Sequence[Tensor] = (),
) -> None:
    """Update parameters and both moments in place; all are flat fp32 (or fp64) tensors of equal sizes, list by list.
    The moments may be bf16.

    kernels: which backend runs the step. gradient_scale: 0-dim, multiplies every gradient first (clipping; 1 / loss
    scale), without synchronizing a GPU with the host. Gradients may be overwritten. copies: bf16, one per parameter or
    none, overwritten with the rounded new parameters.
    """
    if not parameters:
        return
    rounded = first_moments[0].dtype == torch.bfloat16
    kernel = kernels.pick("adamw", parameters[0])
    is_reference = kernel is kernels.reference("adamw")
    lists: Sequence[Sequence[Tensor]] = [parameters, gradients, first_moments, second_moments]
    lists = [*lists, copies] if copies else lists
    if is_reference and not rounded and parameters[0].dtype == torch.float32:
        fused, lists = _split_for_fused(lists)
        _fused(fused, update, gradient_scale)
    for buffers in blocks(lists) if is_reference else zip(*lists, strict=True):
        master, gradient, first, second, *bf16 = buffers
        kernel.step(Buffers(master, gradient, first, second, bf16[0] if copies else None, gradient_scale), update)


def _split_for_fused(lists: Sequence[Sequence[Tensor]]) -> tuple[Lists, Lists]:
    """Divide tensors that belong together into the parts for torch's fused kernel, whose sizes are multiples of the
    alignment, and the rest."""
    alignment = 1 if lists[0][0].is_cuda else SEGMENT_ALIGNMENT
    fused: Lists = [[] for _ in lists]
    rest: Lists = [[] for _ in lists]
    for tensors in zip(*lists, strict=True):
        end = tensors[0].numel() // alignment * alignment
        for kind, tensor in enumerate(tensors):
            if end:
                fused[kind].append(tensor[:end])
            if end < tensor.numel():
                rest[kind].append(tensor[end:])
    return fused, rest


def _fused(lists: Lists, update: Coefficients, gradient_scale: Tensor | None) -> None:
    """Run torch's kernel, which divides gradients by its scale and counts the step itself."""
    parameters, gradients, first_moments, second_moments, *copies = lists
    if not parameters:
        return
    steps = torch.full((len(parameters),), float(update.step - 1), device=parameters[0].device)
    adamw(
        parameters,
        gradients,
        first_moments,
        second_moments,
        [],
        list(steps.unbind()),
        fused=True,
        grad_scale=None if gradient_scale is None else gradient_scale.float().reciprocal(),
        found_inf=None,
        has_complex=False,
        amsgrad=False,
        beta1=update.betas[0],
        beta2=update.betas[1],
        lr=update.learning_rate,
        weight_decay=update.weight_decay,
        eps=update.epsilon,
        maximize=False,
    )
    for rounded, parameter in zip(*copies, parameters, strict=True) if copies else ():
        rounded.copy_(parameter)


class FlatAdamW(FlatOptimizer):
    """AdamW, with decoupled decay. Bias correction depends on the number of a unit's updates."""

    writes_copies = True

    @property
    def moment_names(self) -> tuple[str, ...]:
        return FIRST, SECOND

    def _step(self, part: ParameterGroup, learning_rate: float, coefficient: Tensor) -> None:
        config = self._config
        step = Coefficients(part.step, learning_rate, config.betas, config.epsilon, part.decay)
        adamw_step(
            part.parameters,
            part.gradients,
            part.moments[FIRST],
            part.moments[SECOND],
            step,
            kernels=self._kernels,
            gradient_scale=coefficient,
            copies=part.copies,
        )


class FlatSGD(FlatOptimizer):
    """Gradient descent with momentum and coupled decay, as in torch.optim.SGD."""

    @property
    def moment_names(self) -> tuple[str, ...]:
        return (MOMENTUM,) if self._config.momentum else ()

    @torch.no_grad()
    def _step(self, part: ParameterGroup, learning_rate: float, coefficient: Tensor) -> None:
        """Gradients are multiplied before the decay, and do not change."""
        for parameter, gradient, *momenta in blocks([part.parameters, part.gradients, *part.moments.values()]):
            scaled = gradient * coefficient
            if part.decay:
                scaled = scaled.add(parameter, alpha=part.decay)
            for momentum in momenta:
                scaled = momentum.mul_(self._config.momentum).add_(scaled)
            parameter.add_(scaled, alpha=-learning_rate)


ELEMENTWISE: dict[str, type[FlatOptimizer]] = {"adamw": FlatAdamW, "sgd": FlatSGD}
"""Elementwise optimizers by `optimizer.name`; `optim.muon.make_optimizer` chooses one."""
