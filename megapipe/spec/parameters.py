"""ParameterSpec: the one declaration of a parameter, for layers, initialisation, segment tables and checkpoints."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megapipe.config.model import BASE_KIND

LayerKind = Literal["embedding", "block", "head"]
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
        """Elements inside."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Init:
    """How a parameter starts: `normal` with standard deviation `std`, or a constant `zeros` / `ones`."""

    kind: Literal["normal", "zeros", "ones"]
    std: float = 0.0


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of the whole model.

    name: global name, unique in the model, e.g. `blocks.3.attention.qkv.weight`. A tied weight has one name.
    shape: global canonical shape, in which every tensor-parallel shard is one box.
    partition_axis: axis that tensor ranks share; None when every rank holds the whole.
    init: how it starts. decay: weight decay applies. matrix: a matrix for optimizers that treat matrices apart.
    padded: the partition axis may be indivisible (vocabulary): shards are of equal padded size, axis 0 only.
    state_unit: which of its layer's state units has it, where there are several; the layer's own by default.
    balance_rate: above 0 for what the loss does not train: its gradient is how much more than their share experts were
    given, and an update moves it by this much the other way.
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

    @property
    def num_elements(self) -> int:
        """Global number of elements, padding not counted."""
        return math.prod(self.shape)

    def local_shape(self, tensor_size: int, alignment: int = 1) -> tuple[int, ...]:
        """Return the shape of one shard as stored, padding included.

        A padded spec's shards have ceil(n / tensor_size) rows rounded up to `alignment`.
        Raises ValueError when an unpadded partition axis does not divide.
        """
        if self.partition_axis is None:
            return self.shape
        axis, length = self.partition_axis, self.shape[self.partition_axis]
        if self.padded:
            share = -(-length // tensor_size)
            share = -(-share // alignment) * alignment
        elif length % tensor_size:
            raise ValueError(
                f"{self.name}: axis {axis} of shape {self.shape} is not divisible by {tensor_size} tensor ranks; "
                "choose a tensor size that divides it"
            )
        else:
            share = length // tensor_size
        return (*self.shape[:axis], share, *self.shape[axis + 1 :])

    def box(self, tensor_rank: int, tensor_size: int, alignment: int = 1) -> Box:
        """Return the part of the global tensor that a tensor rank owns, without padding; the last ranks' may be empty.

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

    name: global name (`embedding`, `blocks.3`, `head`). kind: what models/ builds from it.
    parameters: attribute path within the layer's module -> ParameterSpec. Two layers whose entries share a
    spec *name* use one tied weight. variant: name in model.layer_kinds of the fields that a block has instead of the
    model's. Layers of the same kind and variant are alike.
    """

    name: str
    kind: LayerKind
    index: int
    parameters: dict[str, ParameterSpec]
    variant: str = BASE_KIND


def tied_names(layers: tuple[LayerSpec, ...]) -> tuple[str, ...]:
    """Return the names of parameters that more than one layer uses, in order of first use."""
    seen: dict[str, int] = {}
    for layer in layers:
        for name in {spec.name for spec in layer.parameters.values()}:
            seen[name] = seen.get(name, 0) + 1
    return tuple(name for name, uses in seen.items() if uses > 1)


def tied_stages(layers: Sequence[LayerSpec], ranges: Sequence[range]) -> tuple[tuple[int, ...], ...]:
    """Return the stages that use each tied weight, in order of first use. ranges[s]: layers of stage s."""
    groups = []
    for name in tied_names(tuple(layers)):
        users = [i for i, layer in enumerate(layers) if any(s.name == name for s in layer.parameters.values())]
        groups.append(tuple(stage for stage, members in enumerate(ranges) if any(i in members for i in users)))
    return tuple(groups)
