"""Muon (Jordan 2024) for hidden matrices and AdamW for the rest, on UnitStates; and the choice of an optimizer.

An update is the momentum with its singular values brought near 1 by Newton and Schulz's iteration, scaled to the size
of AdamW's updates (Liu et al. 2025, "Muon is scalable for LLM training", 2502.16982, section 2.2). It needs whole
matrices: tensor ranks gather their shards of the momentum; each orthogonalises the whole matrix and keeps its own
part. If replicas shard the state, most matrices are whole on one replica; for those that are cut
(`layout.units.place`), replicas gather the momentum too.
"""

from collections.abc import Iterator, Sequence
from math import sqrt

import torch
from torch import Tensor

from megapipe.config.optimizer import MuonConfig, OptimizerConfig
from megapipe.kernels.ops import OPS
from megapipe.kernels.registry import Registry
from megapipe.optim.optimizer import ELEMENTWISE, FIRST, MOMENTUM, SECOND, FlatAdamW, FlatOptimizer
from megapipe.parallel.collectives import unsharded
from megapipe.parallel.groups import Group, SoloGroup
from megapipe.parallel.segments import Segment
from megapipe.parallel.unit_state import UnitState
from megapipe.spec.parameters import ParameterSpec

A, B, C = 3.4445, -4.7750, 2.0315
"""Coefficients with the steepest slope at 0: five steps bring singular values from 0.01 to 0.7 .. 1.2, not to 1."""
SMALLEST_NORM = 1e-7
ITERATION_DTYPE = torch.bfloat16


def orthogonalised(matrix: Tensor, steps: int) -> Tensor:
    """Return approximately U V^T, for `matrix` [rows, columns] = U S V^T; computed in bf16."""
    x = matrix.to(ITERATION_DTYPE)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.t()
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.t() if tall else x


def separate_matrices(whole: Tensor) -> Iterator[Tensor]:
    """Return views of the matrices that a parameter in canonical shape consists of: [..., in], in which all axes but
    the last are rows.

    (kv groups, query heads per group + 2, head_dim, hidden): query, key and value. (2, ffn, hidden): gate and up.
    """
    if whole.dim() == 4:
        yield from (whole[:, :-2], whole[:, -2], whole[:, -1])
    elif whole.dim() == 3:
        yield from whole.unbind(0)
    else:
        yield whole


def update_of(whole: Tensor, config: MuonConfig) -> Tensor:
    """Return the fp32 update before it is multiplied by the learning rate. whole: a whole parameter's momentum in
    canonical shape."""
    update = torch.empty_like(whole, dtype=torch.float32)
    for momentum, part in zip(separate_matrices(whole), separate_matrices(update), strict=True):
        matrix = momentum.reshape(-1, momentum.shape[-1])
        rows, columns = matrix.shape
        scale = 0.2 * sqrt(max(rows, columns)) if config.scale == "match_rms" else sqrt(max(1.0, rows / columns))
        part.copy_(orthogonalised(matrix, config.newton_schulz_steps).view(momentum.shape)).mul_(scale)
    return update


class FlatMuon(FlatAdamW):
    """Muon. A matrix has one moment, `momentum`; parameters that AdamW trains have AdamW's two.

    tensor_group: ranks that shard matrices. shard_group: replicas that share one copy of the state; needed if states
    have matrices that are cut.
    """

    writes_copies = False

    def __init__(
        self,
        config: OptimizerConfig,
        kernels: Registry = OPS,
        seed: int = 0,
        tensor_group: Group | None = None,
        shard_group: Group | None = None,
    ) -> None:
        super().__init__(config, kernels, seed)
        self._muon = config.muon
        self._group = SoloGroup("tensor") if tensor_group is None else tensor_group
        self._shards = SoloGroup("shards") if shard_group is None else shard_group

    @property
    def moment_names(self) -> tuple[str, ...]:
        return MOMENTUM, FIRST, SECOND

    @property
    def _part_moments(self) -> tuple[str, ...]:
        return FIRST, SECOND

    def kinds(self, spec: ParameterSpec) -> tuple[str, ...]:
        return (MOMENTUM,) if spec.matrix else (FIRST, SECOND)

    def allocate(self, state: UnitState) -> None:
        table = state.table
        state.add_moment(MOMENTUM, state.within_shard(table.matrices), self.moment_dtype)
        part = state.within_shard(slice(table.decayed.start, table.undecayed.stop))
        for name in (FIRST, SECOND):
            state.add_moment(name, part, self.moment_dtype)

    def _range(self, state: UnitState, decayed: bool) -> slice:
        """Return the range of the elements that AdamW trains."""
        return state.within_shard(state.table.decayed if decayed else state.table.undecayed)

    def _step_units(
        self, states: Sequence[UnitState], masters: Sequence[Tensor], step: int, rate: float, coefficient: Tensor
    ) -> None:
        super()._step_units(states, masters, step, rate * self._muon.elementwise_rate, coefficient)
        for state, master in zip(states, masters, strict=True):
            self._step_matrices(state, master, rate, coefficient)

    @torch.no_grad()
    def _step_matrices(self, state: UnitState, master: Tensor, rate: float, coefficient: Tensor) -> None:
        for segment, update_input in self._momenta(state, coefficient):
            whole = update_of(unsharded(update_input, self._group, segment.spec.partition_axis), self._muon)
            elements = state.held(segment)
            update = self._own_part(whole, segment).reshape(-1)[elements.start : elements.stop]
            weight = state.in_shard(master, segment)
            weight.mul_(1 - rate * self._config.weight_decay).sub_(update.to(weight.dtype) * rate)

    def _momenta(self, state: UnitState, coefficient: Tensor) -> Iterator[tuple[Segment, Tensor]]:
        """Yield each matrix that has elements on this rank, with the update's input (`_advance`) for its whole tensor
        shard.

        A collective call of the replicas that share the state, if their shards cut matrices.
        """
        segments = [segment for segment in state.table if segment.spec.matrix and state.held(segment)]
        if not state.table.cut:
            for segment in segments:
                yield segment, self._advance(state, segment, coefficient).view(segment.local_shape)
            return
        gathered = torch.empty(state.table.num_elements, dtype=state.accumulate_dtype, device=coefficient.device)
        shard = gathered[state.shard].zero_()
        for segment in segments:
            state.in_shard(shard, segment).copy_(self._advance(state, segment, coefficient))
        self._shards.gather_into(gathered, shard).wait()
        for segment in segments:
            yield segment, state.view(gathered, segment)

    def _advance(self, state: UnitState, segment: Segment, coefficient: Tensor) -> Tensor:
        """Add the gradient to the momentum, and return the flat input of the update for the elements of this rank.

        Multiplications and additions are not fused, so that the bits do not depend on where the matrix is cut.
        """
        beta = self._muon.momentum
        part = state.place(segment)
        gradient = state.reduced_gradient(state.newest)[part] * coefficient
        momentum = state.moment(MOMENTUM, part)
        momentum.mul_(beta).add_(gradient * (1 - beta))
        return gradient.mul_(1 - beta).add_(momentum * beta) if self._muon.nesterov else momentum

    def _own_part(self, whole: Tensor, segment: Segment) -> Tensor:
        axis = segment.spec.partition_axis
        return whole if axis is None else whole.chunk(self._group.size, axis)[self._group.rank]


def make_optimizer(
    config: OptimizerConfig,
    kernels: Registry = OPS,
    seed: int = 0,
    tensor_group: Group | None = None,
    shard_group: Group | None = None,
) -> FlatOptimizer:
    """Return the optimizer that `optimizer.name` names. kernels, seed: see FlatOptimizer. tensor_group, shard_group:
    see FlatMuon."""
    if config.name == "muon":
        return FlatMuon(config, kernels, seed, tensor_group, shard_group)
    return ELEMENTWISE[config.name](config, kernels, seed)
