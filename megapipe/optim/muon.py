"""Muon (Jordan 2024) on hidden matrices, AdamW on the rest, over UnitStates.

An update is the momentum with its singular values brought near 1, scaled to the size of AdamW's updates (Liu et al.
2025, "Muon is scalable for LLM training", 2502.16982, section 2.2). It needs whole matrices: tensor ranks gather their
shards of the momentum, and each orthogonalises all of the matrix and keeps its own part.
"""

from collections.abc import Iterator, Sequence
from math import sqrt

import torch
from torch import Tensor

from megapipe.config.muon import MuonConfig
from megapipe.config.optimizer import OptimizerConfig
from megapipe.costs.parameters import ParameterSpec
from megapipe.kernels.ops import OPS
from megapipe.kernels.registry import Registry
from megapipe.optim.newton_schulz import orthogonalised
from megapipe.optim.optimizer import FIRST, MOMENTUM, SECOND, FlatAdamW
from megapipe.parallel.groups import Group, SoloGroup
from megapipe.parallel.segments import Segment
from megapipe.parallel.unit_state import UnitState


def separate_matrices(whole: Tensor) -> Iterator[Tensor]:
    """Views of the matrices that a parameter in canonical shape consists of: [..., in], all axes but the last rows.

    (kv groups, query heads per group + 2, head_dim, hidden): query, key and value. (2, ffn, hidden): gate and up.
    """
    if whole.dim() == 4:
        yield from (whole[:, :-2], whole[:, -2], whole[:, -1])
    elif whole.dim() == 3:
        yield from whole.unbind(0)
    else:
        yield whole


def update_of(whole: Tensor, config: MuonConfig) -> Tensor:
    """What the learning rate multiplies, for a whole parameter's momentum in canonical shape; fp32."""
    update = torch.empty_like(whole, dtype=torch.float32)
    for given, found in zip(separate_matrices(whole), separate_matrices(update), strict=True):
        matrix = given.reshape(-1, given.shape[-1])
        rows, columns = matrix.shape
        scale = 0.2 * sqrt(max(rows, columns)) if config.scale == "match_rms" else sqrt(max(1.0, rows / columns))
        found.copy_(orthogonalised(matrix, config.newton_schulz_steps).view(given.shape)).mul_(scale)
    return update


class FlatMuon(FlatAdamW):
    """Muon. A matrix has one moment, `momentum`; what AdamW trains has its two.

    tensor_group: ranks that share matrices.
    """

    writes_copies = False

    def __init__(
        self,
        config: OptimizerConfig,
        kernels: Registry = OPS,
        seed: int = 0,
        tensor_group: Group | None = None,
    ) -> None:
        super().__init__(config, kernels, seed)
        self._muon = config.muon
        self._group = SoloGroup("tensor") if tensor_group is None else tensor_group

    @property
    def moment_names(self) -> tuple[str, ...]:
        return MOMENTUM, FIRST, SECOND

    @property
    def _part_moments(self) -> tuple[str, ...]:
        return FIRST, SECOND

    def kinds(self, spec: ParameterSpec) -> tuple[str, ...]:
        return (MOMENTUM,) if spec.matrix else (FIRST, SECOND)

    def allocate(self, state: UnitState) -> None:
        stop, end = (state.within_shard(each) for each in (state.table.matrix_stop, state.table.num_elements))
        state.add_moment(MOMENTUM, slice(0, stop), self.moment_dtype)
        for name in (FIRST, SECOND):
            state.add_moment(name, slice(stop, end), self.moment_dtype)

    def _range(self, state: UnitState, decayed: bool) -> slice:
        """Of what AdamW trains."""
        whole = super()._range(state, decayed)
        return slice(max(whole.start, state.within_shard(state.table.matrix_stop)), whole.stop)

    def _step_units(
        self, states: Sequence[UnitState], masters: Sequence[Tensor], step: int, rate: float, coefficient: Tensor
    ) -> None:
        super()._step_units(states, masters, step, rate * self._muon.elementwise_rate, coefficient)
        for state, master in zip(states, masters, strict=True):
            for segment in state.table:
                if segment.spec.matrix:
                    self._step_matrix(state, master, segment, rate, coefficient)

    @torch.no_grad()
    def _step_matrix(
        self, state: UnitState, master: Tensor, segment: Segment, rate: float, coefficient: Tensor
    ) -> None:
        momentum = state.view(state.moments[MOMENTUM], segment)  # matrices lie first in both buffers
        gradient = state.view(state.reduced_gradient(state.newest), segment) * coefficient
        momentum.lerp_(gradient, 1 - self._muon.momentum)
        ahead = gradient.lerp_(momentum, self._muon.momentum) if self._muon.nesterov else momentum
        update = self._own_part(update_of(self._whole(ahead, segment), self._muon), segment)
        weight = state.view(master, segment)
        weight.mul_(1 - rate * self._config.weight_decay).add_(update.to(weight.dtype), alpha=-rate)

    def _whole(self, shard: Tensor, segment: Segment) -> Tensor:
        axis = segment.spec.partition_axis
        if axis is None or self._group.size == 1:
            return shard
        return torch.cat(self._group.all_gather(shard.contiguous()).unbind(0), axis)

    def _own_part(self, whole: Tensor, segment: Segment) -> Tensor:
        axis = segment.spec.partition_axis
        if axis is None or self._group.size == 1:
            return whole
        return whole.chunk(self._group.size, axis)[self._group.rank]
