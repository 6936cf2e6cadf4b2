"""What one rank keeps and sends for the parameters of a unit: state that replicas keep whole or share out (ZeRO).

Rajbhandari et al. (2020, arXiv 1910.02054), sections 5 and 7.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import cast

from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.whole_matrices import MatrixPlacement, place
from megapipe.spec.dtypes import ELEMENT_BYTES, FULL_BYTES, Precision
from megapipe.spec.ops import Exchange
from megapipe.spec.parameters import SEGMENT_ALIGNMENT, ParameterSpec


@dataclass(frozen=True)
class StateBytes:
    """Bytes of parameters and what belongs to them on one rank.

    weights: compute-dtype copies, all versions. master: fp32 weights under bf16 and fp16; under fp32 the newest copy
    is the master and this is 0. gradients: fp32 accumulators. moments: what the optimizer keeps between steps.
    """

    weights: int
    master: int
    gradients: int
    moments: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.master + self.gradients + self.moments


def num_moments(optimizer: OptimizerConfig, matrix: bool = False) -> int:
    """Return how many numbers the optimizer keeps between steps for every element of a parameter.

    matrix: one of those that Muon treats as matrices (`ParameterSpec.matrix`).
    """
    if optimizer.name == "muon" and matrix:
        return 1
    if optimizer.name in ("adamw", "muon"):
        return 2
    return 1 if optimizer.momentum else 0


def flat_elements(
    specs: Iterable[ParameterSpec],
    *,
    tensor_size: int = 1,
    alignment: int = 1,
    num_shards: int = 1,
    whole_matrices: bool = False,
) -> int:
    """Return the elements of a unit's flat buffers: every parameter's tensor shard, aligned, and padding that makes it
    divide.

    whole_matrices: Muon's shards, which cut no matrix that fits in one (`layout.whole_matrices`).
    """
    if whole_matrices:
        return place(specs, num_shards, tensor_size=tensor_size, alignment=alignment).num_elements
    sizes = (prod(spec.local_shape(tensor_size, alignment)) for spec in specs)
    elements = sum(-(-size // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT for size in sizes)
    whole = SEGMENT_ALIGNMENT * num_shards
    return -(-elements // whole) * whole


@dataclass(frozen=True)
class Unit:
    """Parameters that lie in one flat buffer: a layer's own, or one tied weight, with the number of its uses here."""

    specs: tuple[ParameterSpec, ...]
    tied: bool = False
    uses: int = 1


@dataclass(frozen=True)
class UnitCosts:
    """Sizes of one rank's units.

    config: of the run. replicas: ranks that hold the same weights, over data and context. alignment: rows of a padded
    vocabulary shard come in its multiples. shard: which one of the state's the rank has; only under Muon do they
    differ.
    """

    config: PretrainConfig
    replicas: int
    alignment: int = 1
    shard: int = 0

    @property
    def shards(self) -> int:
        """Of the replicas those that share one copy of the state; 1 where each has its own."""
        return self.config.zero.num_shards(self.replicas)

    @property
    def shard_group(self) -> str:
        """The group that shares one copy of the state: all replicas, unless zero.shard_size is smaller."""
        return "data+context" if self.shards == self.replicas else "shards"

    @property
    def _weight_bytes(self) -> int:
        """Of an element in the compute dtype."""
        return ELEMENT_BYTES[cast(Precision, self.config.training.precision)]

    def elements(self, unit: Unit) -> int:
        """Of a flat buffer of the unit, whole."""
        return flat_elements(
            unit.specs,
            tensor_size=self.config.parallel.tensor,
            alignment=self.alignment,
            num_shards=self.shards,
            whole_matrices=self._whole_matrices,
        )

    @property
    def _whole_matrices(self) -> bool:
        """Whether shards are Muon's, which cut as few matrices as they can."""
        return self.config.optimizer.name == "muon" and self.shards > 1

    def _placement(self, unit: Unit) -> MatrixPlacement:
        """Where Muon's shards have a unit's parameters."""
        return place(unit.specs, self.shards, tensor_size=self.config.parallel.tensor, alignment=self.alignment)

    def sharded(self, unit: Unit, stage: int) -> bool:
        """Whether what ZeRO shards from `stage` on is sharded of this unit: of tied weights stage 1 alone."""
        if self.shards == 1 or not unit.specs:
            return False
        return (1 if unit.tied else self.config.zero.stage_of(unit.specs[0].name)) >= stage

    def own_elements(self, unit: Unit, stage: int) -> int:
        """Of a buffer that ZeRO shards from `stage` on, the elements that a rank keeps between its uses."""
        return self.elements(unit) // (self.shards if self.sharded(unit, stage) else 1)

    def state(self, unit: Unit, *, num_versions: int = 1, gradient_buffers: int = 1) -> StateBytes:
        """What a rank keeps of a unit between steps, wherever: weights and gradients that are whole for a while not
        counted. num_versions, gradient_buffers: as in `schedules.Header`."""
        training, optimizer = self.config.training, self.config.optimizer
        part = self.own_elements(unit, 1)
        master = self._weight_bytes != FULL_BYTES and training.master_weights
        return StateBytes(
            weights=num_versions * self.own_elements(unit, 3) * self._weight_bytes,
            master=part * FULL_BYTES if master else 0,
            gradients=gradient_buffers * unit.uses * self.own_elements(unit, 2) * FULL_BYTES,
            moments=self._moments(unit, part) * (2 if optimizer.moment_dtype == "bf16" else FULL_BYTES),
        )

    def _moments(self, unit: Unit, part: int) -> int:
        """Numbers that the optimizer keeps of a unit, of which this rank has `part` elements."""
        optimizer = self.config.optimizer
        if optimizer.name != "muon":
            return part * num_moments(optimizer)
        if self._whole_matrices:
            matrices = part - self._placement(unit).elementwise_in(self.shard)
        else:
            matrices = flat_elements(
                [spec for spec in unit.specs if spec.matrix],
                tensor_size=self.config.parallel.tensor,
                alignment=self.alignment,
            )
        others = part - matrices
        return matrices * num_moments(optimizer, matrix=True) + others * num_moments(optimizer)

    def reduction(self, unit: Unit) -> dict[str, list[Exchange]]:
        """One sum of a unit's gradient over its replicas, by group; further copies of shards are summed behind the
        last one alone (`copies_reduction`)."""
        elements = self.elements(unit)
        if self.replicas == 1 or elements == 0:
            return {}
        if self.shards == 1:
            return {"data+context": [Exchange("all_reduce", elements, FULL_BYTES)]}
        size = 2 if self.config.zero.reduce_dtype == "bf16" else FULL_BYTES
        return {self.shard_group: [Exchange("reduce_scatter", elements, size)]}

    def summand_bytes(self, unit: Unit, over_gloo: bool) -> int:
        """What one such sum holds until it is over: where gradients travel in bf16 the copy that does, and over gloo,
        which takes them into memory of its own, the parts of the others."""
        if self.shards == 1:
            return 0
        elements, narrow = self.elements(unit), self.config.zero.reduce_dtype == "bf16"
        received = elements // self.shards * (self.shards - 1) if over_gloo else 0
        return received * (2 if narrow else FULL_BYTES) + (2 * elements if narrow else 0)

    def copies_reduction(self, unit: Unit) -> dict[str, list[Exchange]]:
        """The sum of a shard over the copies of the state, where there are several (hybrid sharding)."""
        if self.shards in (1, self.replicas) or self.elements(unit) == 0:
            return {}
        return {"shard copies": [Exchange("all_reduce", self.own_elements(unit, 1), FULL_BYTES)]}

    def gather(self, unit: Unit) -> dict[str, list[Exchange]]:
        """One gather of a unit's weights from those that share them out."""
        elements = self.elements(unit)
        if self.shards == 1 or elements == 0:
            return {}
        return {self.shard_group: [Exchange("all_gather", elements, self._weight_bytes)]}

    def update(self, unit: Unit) -> dict[str, list[Exchange]]:
        """What one update exchanges: Muon brings together the momentum of each matrix that this rank has some of, over
        the tensor ranks, and before that all of the unit's over the shards where these cut a matrix."""
        config, found = self.config, dict[str, list[Exchange]]()
        if config.optimizer.name != "muon":
            return found
        matrices = [spec for spec in unit.specs if spec.matrix]
        if self._whole_matrices:
            placement = self._placement(unit)
            matrices = [spec for spec in matrices if placement.has_some(spec.name, self.shard)]
            if placement.cut:
                found[self.shard_group] = [Exchange("all_gather", placement.gathered_elements, FULL_BYTES)]
        if config.parallel.tensor > 1:
            shared = [spec for spec in matrices if spec.partition_axis is not None]
            found["tensor"] = [Exchange("all_gather", spec.num_elements, FULL_BYTES) for spec in shared]
        return found
