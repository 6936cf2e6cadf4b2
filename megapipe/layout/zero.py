"""Bytes of state on one rank where data-parallel replicas share it out (ZeRO), gaps and padding included."""

from collections.abc import Iterable, Sequence

from megapipe.layout.whole_matrices import place
from megapipe.spec.memory import ELEMENT_BYTES, FULL_BYTES, Precision, StateBytes, stored_elements
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


def shared_state_bytes(
    units: Iterable[Sequence[ParameterSpec]],
    precision: Precision,
    *,
    stage: int,
    num_shards: int,
    muon_shard: int | None = None,
    weight_buffers: int = 2,
    gradient_buffers: int = 2,
    tied: Iterable[tuple[ParameterSpec, int]] = (),
    tensor_size: int = 1,
    alignment: int = 1,
    moments: int = 2,
    num_versions: int = 1,
    num_updates: int = 1,
) -> StateBytes:
    """State on one rank at its peak (Rajbhandari et al. 2020, 1910.02054, figure 1).

    muon_shard: under Muon, which of the shards the rank has; a matrix has one moment there, the rest `moments`, and
    most of that lies in shard 0.

    units: parameters of each unit (layer) on the rank, tied weights left out. tied: these, with the number of their
    uses on the rank; their weights and gradients are whole at every stage. stage: of ZeRO, 0 to 3. num_shards:
    replicas that share one copy. weight_buffers (stage 3), gradient_buffers (stage 2 and 3): units that are whole at
    once; the largest are counted. tensor_size, alignment, moments, num_versions: as in `state_bytes`. num_updates:
    whose gradients are alive at once. Both are above 1 in schedules that never flush.
    """
    shards = num_shards if stage else 1
    units, tied = list(units), list(tied)

    def elements_of(specs: Iterable[ParameterSpec]) -> int:
        return flat_elements(
            specs,
            tensor_size=tensor_size,
            alignment=alignment,
            num_shards=shards,
            whole_matrices=muon_shard is not None,
        )

    sizes = sorted((elements_of(specs) for specs in units), reverse=True)
    tables = [(elements_of([spec]), uses) for spec, uses in tied]
    own = sum(sizes)
    whole_tables = sum(size for size, _ in tables)
    kept = (own + whole_tables) // shards
    in_moments = kept * moments
    if muon_shard is not None:
        each = [
            place(specs, shards, tensor_size=tensor_size, alignment=alignment)
            for specs in (*units, *([spec] for spec, _ in tied))
        ]
        in_moments = kept + sum(found.elementwise_in(muon_shard if stage else 0) for found in each) * (moments - 1)
    weights = own * num_versions
    if stage >= 3:
        weights = weights // shards + _largest(sizes, num_versions, weight_buffers)
    gradients = own * num_updates
    if stage >= 2:
        gradients = gradients // shards + _largest(sizes, num_updates, gradient_buffers)
    return StateBytes(
        weights=(weights + whole_tables * num_versions) * ELEMENT_BYTES[precision],
        master=0 if precision == "fp32" else kept * FULL_BYTES,
        gradients=(gradients + sum(size * uses for size, uses in tables) * num_updates) * FULL_BYTES,
        moments=in_moments * FULL_BYTES,
    )


def _largest(sizes: list[int], kept: int, count: int) -> int:
    """The sum of so many of the sizes, from the largest on, each of which is there `kept` times."""
    return sum([size for size in sizes for _ in range(kept)][:count])
