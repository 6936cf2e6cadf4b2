"""What the start of a run says of Muon over state that replicas share out."""

from collections.abc import Sequence

from megapipe.parallel.unit_state import UnitState


def muon_shards(states: Sequence[UnitState]) -> str | None:
    """Padding in the buffers of this rank, and what its updates gather; None where nothing is shared out."""
    shared = [state for state in states if state.sharding.whole_matrices]
    if not shared:
        return None
    count = shared[0].sharding.count
    matrices = [segment for state in shared for segment in state.table if segment.spec.matrix]
    held = sum(segment.stop - segment.start for state in shared for segment in state.table)
    buffers = sum(state.table.num_elements for state in shared)
    cut = sum(len(state.table.cut) for state in shared)
    gathered = sum(state.table.num_elements * state.accumulate_dtype.itemsize for state in shared if state.table.cut)
    told = f"muon over {count} shards: {buffers / held - 1:.1%} of padding in addition to the parameters"
    if not cut:
        return f"{told}; every matrix is whole on one rank"
    return f"{told}; {cut} of {len(matrices)} matrices are cut, whose update gathers {gathered:,} bytes"
