"""Elements of flat buffers that replicas shard (ZeRO), gaps and padding included."""

from collections.abc import Iterable

from megapipe.layout.whole_matrices import place
from megapipe.spec.memory import stored_elements
from megapipe.spec.parameters import SEGMENT_ALIGNMENT, ParameterSpec


def flat_elements(
    specs: Iterable[ParameterSpec],
    *,
    tensor_size: int = 1,
    alignment: int = 1,
    num_shards: int = 1,
    whole_matrices: bool = False,
) -> int:
    """Elements of a unit's flat buffers: every parameter's tensor shard, aligned, and padding that makes it divide.

    whole_matrices: Muon's shards, which cut no matrix that fits in one (`layout.whole_matrices`).
    """
    if whole_matrices:
        return place(specs, num_shards, tensor_size=tensor_size, alignment=alignment).num_elements
    elements = stored_elements(
        specs, tensor_size=tensor_size, alignment=alignment, segment_alignment=SEGMENT_ALIGNMENT
    )
    whole = SEGMENT_ALIGNMENT * num_shards
    return -(-elements // whole) * whole
