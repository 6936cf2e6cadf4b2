"""ParameterSpec: the one declaration of a parameter, for layers, initialisation, segment tables and checkpoints."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megapipe.config.model import BASE_KIND

LayerKind = Literal["embedding", "block", "head", "positions", "norm", "output", "words"]
"""Kinds of layers. The last four are those of a GPT whose vocabulary all pipeline ranks shard. words: the table of
word embeddings. positions: the rest of the embedding. norm, output: the two parts of the head."""
SEGMENT_ALIGNMENT = 64
"""Parameters start at multiples of this many elements in the flat buffers of their unit, so that kernels and
collectives see aligned addresses."""


@dataclass(frozen=True)
class Box:
    """A rectangular part of a global tensor: `starts[i] <= index[i] < stops[i]` on every axis."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent on every axis."""
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def num_elements(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Init:
    """Initial values of a parameter: `normal` with standard deviation `std`, or a constant, `zeros` or `ones`."""

    kind: Literal["normal", "zeros", "ones"]
    std: float = 0.0


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of the whole model.

    name: global name, unique in the model, e.g. `blocks.3.attention.qkv.weight`. A tied weight has one name.
    shape: global canonical shape, in which every tensor-parallel shard is one box.
    partition_axis: axis that tensor ranks shard; None if every rank holds the whole parameter.
    init: initial values. decay: weight decay applies. matrix: optimizers for matrices treat it as a matrix.
    padded: the partition axis may be indivisible (vocabulary): shards are of equal padded size, axis 0 only.
    state_unit: the one of its layer's state units that has it, if there are several; by default the layer's own.
    balance_rate: above 0 for biases that balance experts, which the loss does not train: their gradient says how much
    more than an even share each expert got, and an update moves them by this rate against its sign. shards: number of
    ranks that shard the partition axis for each tensor rank: pipeline ranks that shard a vocabulary. one_accumulator:
    all uses of a tied weight on a rank add to one gradient. Otherwise each use has its own gradient, which is needed
    for sums with the same bits on any division into stages.
    """

    name: str
    shape: tuple[int, ...]
    partition_axis: int | None
    init: Init
    decay: bool
    matrix: bool
    padded: bool = False
    balance_rate: float = 0.0
    state_unit: Literal["layer", "experts"] = "layer"
    one_accumulator: bool = False
    shards: int = 1

    @property
    def num_elements(self) -> int:
        """Global number of elements, padding not counted."""
        return math.prod(self.shape)

    def local_shape(self, tensor_size: int, alignment: int = 1) -> tuple[int, ...]:
        """Return the shape of one shard as stored, padding included.

        A padded spec's shards have ceil(n / (tensor_size x shards)) rows rounded up to `alignment`.
        Raises ValueError if the ranks do not divide an unpadded partition axis evenly.
        """
        if self.partition_axis is None:
            return self.shape
        axis, length = self.partition_axis, self.shape[self.partition_axis]
        if self.padded:
            share = -(-length // (tensor_size * self.shards))
            share = -(-share // alignment) * alignment
        elif length % tensor_size:
            raise ValueError(
                f"{self.name}: axis {axis} of shape {self.shape} is not divisible by "
                f"{tensor_size} tensor ranks; choose a tensor size that divides it"
            )
        else:
            share = length // tensor_size
        return (*self.shape[:axis], share, *self.shape[axis + 1 :])

    def box(self, tensor_rank: int, tensor_size: int, alignment: int = 1) -> Box:
        """Return the part of the global tensor that a tensor rank owns, without padding; it may be empty on the last
        ranks.

        tensor_rank: number of the rank among all tensor_size x shards ranks that shard the tensor.

        The owned elements are the leading ones of the stored shard: padding is only at the end of axis 0.
        """
        starts, stops = [0] * len(self.shape), list(self.shape)
        if self.partition_axis is not None:
            axis = self.partition_axis
            share = self.local_shape(tensor_size, alignment)[axis]
            starts[axis] = min(tensor_rank * share, self.shape[axis])
            stops[axis] = min((tensor_rank + 1) * share, self.shape[axis])
        return Box(tuple(starts), tuple(stops))


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a model: the smallest piece that a stage boundary can respect.

    name: global name (`embedding`, `blocks.3`, `head`). kind: kind of module that models/ builds.
    parameters: attribute path within the layer's module -> ParameterSpec. Two layers whose entries share a
    spec *name* use one tied weight. variant: name in model.layer_kinds of the fields that a block has instead of the
    model's. Layers of the same kind and variant have equal shapes and ops.
    """

    name: str
    kind: LayerKind
    index: int
    parameters: dict[str, ParameterSpec]
    variant: str = BASE_KIND


TiedNames = tuple[str, ...]
"""Names of parameters that the same layers use: together one tied weight, which has a copy on each of their ranks."""


def tied_names(layers: Sequence[LayerSpec]) -> tuple[TiedNames, ...]:
    """Return the names of each tied weight, in order of first use: parameters that more than one layer uses. The
    shards of pipeline ranks are tied weights of their own."""
    return tuple(names for users, names in _users(layers).items() for _ in range(_shards(layers, users, names)))


def tied_stages(layers: Sequence[LayerSpec], ranges: Sequence[range]) -> tuple[tuple[int, ...], ...]:
    """Return the stages that use each tied weight, as `tied_names` lists them. ranges[s]: layers of stage s. Stages of
    each layer whose weight pipeline ranks shard are in the order of the ranks."""
    tied: list[tuple[int, ...]] = []
    for users, names in _users(layers).items():
        stages = tuple(stage for stage, members in enumerate(ranges) if any(index in members for index in users))
        shards = _shards(layers, users, names)
        tied += [stages[shard::shards] for shard in range(shards)]
    return tuple(tied)


def _shards(layers: Sequence[LayerSpec], users: tuple[int, ...], names: TiedNames) -> int:
    """Return the number of pipeline ranks that shard a tied weight."""
    return next(spec.shards for spec in layers[users[0]].parameters.values() if spec.name == names[0])


def _users(layers: Sequence[LayerSpec]) -> dict[tuple[int, ...], TiedNames]:
    """Return the names of each tied weight by the numbers of the layers that use it."""
    users: dict[str, tuple[int, ...]] = {}
    for index, layer in enumerate(layers):
        for name in dict.fromkeys(spec.name for spec in layer.parameters.values()):
            users[name] = (*users.get(name, ()), index)
    names_by_users: dict[tuple[int, ...], TiedNames] = {}
    for name, layer_numbers in users.items():
        if len(layer_numbers) > 1:
            names_by_users[layer_numbers] = (*names_by_users.get(layer_numbers, ()), name)
    return names_by_users
