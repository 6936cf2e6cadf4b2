"""The state units of a run: which state of each unit is sharded (ZeRO), and the memory and traffic of one rank for it.

Sharding is that of Rajbhandari et al. (2020, arXiv 1910.02054), sections 5 and 7. A rank's pools of whole weights and
gradients are numbers of layers by default: each unit has size 1. If the configuration limits a pool in GiB, sizes and
pools are elements of flat buffers.

An optimizer that steps whole matrices (Muon) has most of them whole on one rank: `place` divides a unit into equal
shards that cut as few of them as possible. Parameters that it does not treat as matrices are first and may be cut
anywhere. Matrices longer than an equal part of the buffer are last and are cut: if they were whole, every shard would
have the length of the longest one. The others are between these two groups, placed by the longest-first rule of
scheduling (Graham 1969, "Bounds on multiprocessing timing anomalies") in the emptiest shards that have room.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from math import prod
from typing import NamedTuple, cast

from megapipe.config.parallel import ZeroConfig, zero_stage_of
from megapipe.config.run import PretrainConfig
from megapipe.layout.stages import VOCABULARY_ALIGNMENT, StageLayout
from megapipe.schedules.states import StateTable, StateUnit, WeightHome
from megapipe.spec.ops import ELEMENT_BYTES, FULL_BYTES, Exchange, Precision
from megapipe.spec.parameters import SEGMENT_ALIGNMENT, LayerSpec, ParameterSpec, TiedNames, tied_names


@dataclass(frozen=True)
class MatrixPlacement:
    """Elements of a unit's flat buffer, `num_shards` equal shards of `shard_size`.

    starts, stops: parameter -> its half-open range of elements; starts are multiples of 64. decayed: end of the
    decayed parameters that are not matrices. elementwise: end of all that are not matrices; matrices follow.
    cut: names of the matrices that are not whole in any shard.
    """

    shard_size: int
    num_shards: int
    starts: dict[str, int]
    stops: dict[str, int]
    decayed: int
    elementwise: int
    cut: frozenset[str]

    @property
    def num_elements(self) -> int:
        """Elements of the buffer, including padding.

        At most the sum of those of the parameters, 64 per shard, and the longest whole matrix times the number of
        shards; so at most twice the parameters plus 64 per shard.
        """
        return self.shard_size * self.num_shards

    def elementwise_in(self, shard: int) -> int:
        """Return the elements of a shard that do not belong to a matrix."""
        return min(max(self.elementwise - shard * self.shard_size, 0), self.shard_size)

    def has_some(self, name: str, shard: int) -> bool:
        """Return whether a shard has elements of a parameter."""
        start, stop = shard * self.shard_size, (shard + 1) * self.shard_size
        return self.starts[name] < stop and start < self.stops[name]


def place(
    specs: Iterable[ParameterSpec], num_shards: int, *, tensor_size: int = 1, alignment: int = 1
) -> MatrixPlacement:
    """Return the positions of the parameters of a unit. tensor_size, alignment: as in `ParameterSpec.local_shape`."""
    ordered = sorted(specs, key=lambda spec: (spec.matrix, not spec.decay))
    lengths = {spec.name: prod(spec.local_shape(tensor_size, alignment)) for spec in ordered}
    sizes = {name: _aligned(length) for name, length in lengths.items()}
    total = sum(sizes.values())
    starts: dict[str, int] = {}
    position = decayed = 0
    for spec in ordered:
        if not spec.matrix:
            starts[spec.name] = position
            position += sizes[spec.name]
            decayed = position if spec.decay else decayed
    matrices = {spec.name: sizes[spec.name] for spec in ordered if spec.matrix}
    long = {name: size for name, size in matrices.items() if size * num_shards > total}
    whole = {name: size for name, size in matrices.items() if name not in long}
    order = sorted(whole, key=lambda name: -whole[name])
    size_of_long = sum(long.values())

    def place_at(shard_size: int) -> list[int] | None:
        stop = num_shards * shard_size - size_of_long
        bins = [(max(i * shard_size, position), min((i + 1) * shard_size, stop)) for i in range(num_shards)]
        return _packed([whole[name] for name in order], bins)

    shard_size = _smallest(place_at, -(-total // num_shards), max(whole.values(), default=0))
    packed = place_at(shard_size)
    assert packed is not None
    starts |= dict(zip(order, packed, strict=True))
    first = num_shards * shard_size - size_of_long
    for name, size in long.items():
        starts[name] = first
        first += size
    cut = frozenset(name for name in long if starts[name] % shard_size + sizes[name] > shard_size)
    stops = {name: start + lengths[name] for name, start in starts.items()}
    return MatrixPlacement(shard_size, num_shards, starts, stops, decayed, position, cut)


def _smallest(place_at: Callable[[int], list[int] | None], share: int, longest: int) -> int:
    """Return the smallest shard size, by bisection, for which `place_at` returns positions; `share` plus `longest`
    always suffices."""
    low, high = _aligned(max(share, longest)), _aligned(share + longest)
    sizes = range(low, high + 1, SEGMENT_ALIGNMENT)
    return sizes[bisect_left(sizes, True, hi=len(sizes) - 1, key=lambda size: place_at(size) is not None)]


def _packed(sizes: Sequence[int], bins: Sequence[tuple[int, int]]) -> list[int] | None:
    """Return a start for each size, longest first, in the bin with most room (the first of equals); None if one does
    not fit.

    bins: start and stop of each.
    """
    room = [(start - stop, number, start) for number, (start, stop) in enumerate(bins)]
    heapify(room)
    starts = []
    for size in sizes:
        negative, number, start = room[0]
        if size > -negative:
            return None
        heapreplace(room, (negative + size, number, start + size))
        starts.append(start)
    return starts


def _aligned(size: int, parts: int = 1) -> int:
    """Return a size rounded up to whole segments in each of `parts` equal parts."""
    whole = SEGMENT_ALIGNMENT * parts
    return -(-size // whole) * whole


class StateBytes(NamedTuple):
    """Bytes of parameters, gradients and optimizer state on one rank.

    weights: compute-dtype copies, all versions. master: fp32 weights under bf16 and fp16; under fp32 the newest copy
    is the master and this is 0. gradients: fp32 accumulators. moments: state of the optimizer.
    """

    weights: int
    master: int
    gradients: int
    moments: int

    @property
    def total(self) -> int:
        """Sum of all four."""
        return sum(self)


def flat_elements(
    specs: Iterable[ParameterSpec],
    *,
    tensor_size: int = 1,
    alignment: int = 1,
    num_shards: int = 1,
) -> int:
    """Return the elements of a unit's flat buffers: every parameter's tensor shard, aligned, and padding that makes
    the sum divisible by the shards. Muon's shards have other sizes (`place`)."""
    sizes = (prod(spec.local_shape(tensor_size, alignment)) for spec in specs)
    return _aligned(sum(map(_aligned, sizes)), num_shards)


@dataclass(frozen=True)
class Unit:
    """Parameters in one flat buffer: a layer's own, or one tied weight, with the gradients of its uses on this rank.

    state_unit: number within its layer, as in `ParameterSpec`.
    """

    specs: tuple[ParameterSpec, ...]
    tied: bool = False
    uses: int = 1
    state_unit: str = "layer"


def layer_units(layer: LayerSpec, tied: Collection[TiedNames], zero: ZeroConfig) -> tuple[Unit, ...]:
    """Return the state units of a layer, without weights that are tied to other layers: one unit, or a separate one
    for its experts."""
    untied = (spec for spec in layer.parameters.values() if not any(spec.name in names for names in tied))
    own = tuple(dict.fromkeys(untied))
    experts = tuple(spec for spec in own if spec.state_unit == "experts")
    if zero.expert_shard_size is None or not experts:
        return (Unit(own),)
    return Unit(tuple(spec for spec in own if spec not in experts)), Unit(experts, state_unit="experts")


def tied_unit(names: TiedNames, layers: Iterable[LayerSpec]) -> Unit:
    """Return the state unit of a tied weight on a rank with these layers, at least one of which uses it."""
    named = [{spec.name: spec for spec in layer.parameters.values()} for layer in layers]
    users = [specs for specs in named if names[0] in specs]
    specs = tuple(users[0][name] for name in names)
    return Unit(specs, tied=True, uses=1 if specs[0].one_accumulator else len(users))


@dataclass(frozen=True)
class UnitCosts:
    """Sizes of one rank's units.

    config: of the run. replicas: ranks that hold the same weights, over data and context. alignment: rows of a padded
    vocabulary shard are multiples of it. shard: the rank's shard of the state; sizes differ between shards only under
    Muon.
    """

    config: PretrainConfig
    replicas: int
    alignment: int = 1
    shard: int = 0

    @property
    def shards(self) -> int:
        """Number of replicas that share one copy of the state of most units; 1 if each has its own."""
        return self.config.zero.num_shards(self.replicas)

    def shards_of(self, unit: Unit) -> int:
        """Return the number of replicas that share one copy of a unit's state."""
        return self.config.zero.num_shards(self.replicas, unit.state_unit)

    def shard_group(self, unit: Unit) -> str:
        """Return the group that shares one copy of a unit's state: all replicas, or some."""
        return "data+context" if self.shards_of(unit) == self.replicas else "shards"

    @property
    def _weight_bytes(self) -> int:
        """Bytes of an element in the compute dtype."""
        return ELEMENT_BYTES[cast(Precision, self.config.training.precision)]

    def elements(self, unit: Unit) -> int:
        """Return the elements of a whole flat buffer of the unit."""
        if self._whole_matrices:
            return self._placement(unit).num_elements
        return flat_elements(unit.specs, **self._local_sizes, num_shards=self.shards_of(unit))

    @property
    def _local_sizes(self) -> dict[str, int]:
        """Arguments of `ParameterSpec.local_shape`."""
        return {"tensor_size": self.config.parallel.tensor, "alignment": self.alignment}

    @property
    def _whole_matrices(self) -> bool:
        """Whether shards are those of Muon, which cut as few matrices as possible."""
        return self.config.optimizer.name == "muon" and self.shards > 1

    def _placement(self, unit: Unit) -> MatrixPlacement:
        """Return the positions of a unit's parameters in Muon's shards."""
        return place(unit.specs, self.shards, **self._local_sizes)

    def sharded(self, unit: Unit, stage: int) -> bool:
        """Return whether state that ZeRO shards at `stage` and above is sharded here; for tied weights only stage 1
        applies."""
        if self.shards_of(unit) == 1 or not unit.specs:
            return False
        return (1 if unit.tied else zero_stage_of(self.config, unit.specs[0].name)) >= stage

    def own_elements(self, unit: Unit, stage: int) -> int:
        """Return the number of elements that a rank keeps, between uses, of a buffer that ZeRO shards at `stage` and
        above."""
        return self.elements(unit) // (self.shards_of(unit) if self.sharded(unit, stage) else 1)

    def state(self, unit: Unit, *, num_versions: int = 1, gradient_buffers: int = 1) -> StateBytes:
        """Return the state of a unit on one rank between steps, in device and host memory, without weights and
        gradients that are whole only temporarily. num_versions, gradient_buffers: as in `schedules.Header`."""
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
        """Return the elements of the moments of a unit, of which this rank has `part` elements."""
        optimizer = self.config.optimizer
        if optimizer.name != "muon":
            return part * optimizer.num_moments()
        if self._whole_matrices:
            matrices = part - self._placement(unit).elementwise_in(self.shard)
        else:
            matrices = flat_elements([spec for spec in unit.specs if spec.matrix], **self._local_sizes)
        others = part - matrices
        return matrices * optimizer.num_moments(matrix=True) + others * optimizer.num_moments()

    def reduction(self, unit: Unit) -> dict[str, list[Exchange]]:
        """Return one sum of a unit's gradient over its replicas, by group; copies of shards are summed once, after the
        last of these sums (`copies_reduction`)."""
        elements = self.elements(unit)
        if self.replicas == 1 or elements == 0:
            return {}
        if self.shards_of(unit) == 1:
            return {"data+context": [Exchange("all_reduce", elements, FULL_BYTES)]}
        size = 2 if self.config.zero.reduce_dtype == "bf16" else FULL_BYTES
        return {self.shard_group(unit): [Exchange("reduce_scatter", elements, size)]}

    def summand_bytes(self, unit: Unit, over_gloo: bool) -> int:
        """Return the bytes that one such sum holds until it ends: a copy of the gradients if they are sent in bf16
        and, over gloo, which receives into its own memory, the parts of other ranks."""
        if self.shards_of(unit) == 1:
            return 0
        elements, narrow = self.elements(unit), self.config.zero.reduce_dtype == "bf16"
        received = elements // self.shards_of(unit) * (self.shards_of(unit) - 1) if over_gloo else 0
        return received * (2 if narrow else FULL_BYTES) + (2 * elements if narrow else 0)

    def copies_reduction(self, unit: Unit) -> dict[str, list[Exchange]]:
        """Return the sum of a shard over the copies of the state, if there are several (hybrid sharding)."""
        if self.shards_of(unit) in (1, self.replicas) or self.elements(unit) == 0:
            return {}
        return {"shard copies": [Exchange("all_reduce", self.own_elements(unit, 1), FULL_BYTES)]}

    def gather(self, unit: Unit) -> dict[str, list[Exchange]]:
        """Return one gather of a unit's sharded weights."""
        elements = self.elements(unit)
        if self.shards_of(unit) == 1 or elements == 0:
            return {}
        return {self.shard_group(unit): [Exchange("all_gather", elements, self._weight_bytes)]}

    def update(self, unit: Unit) -> dict[str, list[Exchange]]:
        """Return the exchanges of one update. Muon gathers the momentum of each matrix of which this rank has elements
        over the tensor ranks. If the shards cut a matrix, it gathers that of the whole unit over the shards first."""
        config, exchanges = self.config, dict[str, list[Exchange]]()
        if config.optimizer.name != "muon":
            return exchanges
        matrices = [spec for spec in unit.specs if spec.matrix]
        if self._whole_matrices:
            placement = self._placement(unit)
            matrices = [spec for spec in matrices if placement.has_some(spec.name, self.shard)]
            if placement.cut:
                exchanges[self.shard_group(unit)] = [Exchange("all_gather", placement.num_elements, FULL_BYTES)]
        if config.parallel.tensor > 1:
            shared = [spec for spec in matrices if spec.partition_axis is not None]
            exchanges["tensor"] = [Exchange("all_gather", spec.num_elements, FULL_BYTES) for spec in shared]
        return exchanges


GIB = 2**30


def has_memory_limits(config: PretrainConfig) -> bool:
    """Return whether a pool of whole weights or gradients is limited in GiB."""
    zero, offload = config.zero, config.offload
    return any(limit is not None for limit in (zero.weight_memory, zero.gradient_memory, offload.weight_memory))


class _Pool(NamedTuple):
    """Units that a rank holds whole at once. field: of its limit in GiB. width: bytes of an element. size: maximum
    total size of these units."""

    field: str
    limit: float | None
    width: int
    size: int


@dataclass(frozen=True)
class StateUnits:
    """The state units of a run. replicas: ranks that hold the same weights, over data and context."""

    config: PretrainConfig
    layout: StageLayout
    replicas: int

    def table(self) -> StateTable:
        """Return the units of every stage, and the pools."""
        zero, shards = self.config.zero, self.config.zero.num_shards(self.replicas)
        apart = zero.expert_shard_size or 0
        in_host = self.config.offload.weights
        units = []
        for stage in self.layout.ranges:
            own = []
            for layer, index in enumerate(stage):
                stage_of_layer = zero_stage_of(self.config, self.layout.layers[index].name)
                for unit, size in zip(self._units[index], self._sizes(index), strict=True):
                    sharded = stage_of_layer if zero.num_shards(self.replicas, unit.state_unit) > 1 else 0
                    home: WeightHome = "host" if in_host else "sharded" if sharded >= 3 else "whole"
                    own.append(StateUnit(layer, home, sharded >= 2, size, apart * (unit.state_unit == "experts")))
            units.append(tuple(own))
        shares = max(shards, apart) > 1
        gathered, gradients, copied = (pool.size for pool in self._pools)
        weights = copied if in_host else gathered if shares and zero.stage >= 3 else 0
        return StateTable(tuple(units), weights, gradients if shares and zero.stage >= 2 else 0)

    def problems(self) -> list[str]:
        """Return one message for each limit in GiB that is smaller than a layer."""
        return [
            f"{pool.field} is {pool.limit:g} GiB, but the largest layer needs "
            f"{self._largest * pool.width / GIB:.4g}; set it to at least that"
            for pool in self._pools
            if pool.limit is not None and pool.size < self._largest
        ]

    def tight_weights(self) -> str:
        """Return the setting that limits whole weights to less than two of the largest layers; empty if none does."""
        weights = self.table().weight_pool
        if not 0 < weights < 2 * self._largest:
            return ""
        offload = self.config.offload
        field, limits = ("offload", offload) if offload.weights else ("zero", self.config.zero)
        if limits.weight_memory is None:
            return f"{field}.weight_buffers is {limits.weight_buffers}"
        return f"{field}.weight_memory is {limits.weight_memory:g} GiB"

    @property
    def _pools(self) -> list[_Pool]:
        """The pools of gathered weights, of whole gradients, and of weights that are copied from host memory. A number
        of layers means all units of that number of the largest layers."""
        zero, offload = self.config.zero, self.config.offload
        # The precision may be auto.
        weight = ELEMENT_BYTES.get(cast(Precision, self.config.training.precision), FULL_BYTES)
        limits = [
            ("zero.weight_memory", zero.weight_memory, weight, zero.weight_buffers),
            ("zero.gradient_memory", zero.gradient_memory, FULL_BYTES, zero.gradient_buffers),
            ("offload.weight_memory", offload.weight_memory, weight, offload.weight_buffers),
        ]
        return [
            _Pool(field, limit, width, buffers * self._largest if limit is None else int(limit * GIB / width))
            for field, limit, width, buffers in limits
        ]

    def _sizes(self, index: int) -> tuple[int, ...]:
        """Return the parts of a pool that the units of a layer take."""
        return self._elements[index] if has_memory_limits(self.config) else (1,) * len(self._units[index])

    @cached_property
    def _largest(self) -> int:
        """Size of the largest layer."""
        return max(sum(self._sizes(index)) for index in range(len(self._units)))

    @cached_property
    def _elements(self) -> tuple[tuple[int, ...], ...]:
        """Elements of the flat buffers of each layer's units."""
        costs = UnitCosts(self.config, self.replicas, VOCABULARY_ALIGNMENT)
        return tuple(tuple(map(costs.elements, units)) for units in self._units)

    @cached_property
    def _units(self) -> tuple[tuple[Unit, ...], ...]:
        """Units of each layer."""
        tied = tied_names(self.layout.layers)
        return tuple(layer_units(layer, tied, self.config.zero) for layer in self.layout.layers)
