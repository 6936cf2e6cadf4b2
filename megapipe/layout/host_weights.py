"""Bytes of a rank whose weights and optimizer state lie in host memory, and what its device holds of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megapipe.layout.zero import flat_elements
from megapipe.spec.memory import ELEMENT_BYTES, FULL_BYTES, Precision
from megapipe.spec.parameters import ParameterSpec


@dataclass(frozen=True)
class HostWeightBytes:
    """Gaps and padding included.

    gradients: on the device throughout. tied: weights of tied parameters, which stay there too. computing: most bytes
    of other weights on the device during forwards and backwards; updating: of weights, master and moments during
    updates. host: of weights, master and moments in host memory. update_traffic: copied in during a step's updates,
    and as many out.
    """

    gradients: int
    tied: int
    computing: int
    updating: int
    host: int
    update_traffic: int

    @property
    def device(self) -> int:
        """Most bytes of state on the device."""
        return self.gradients + self.tied + max(self.computing, self.updating)


def host_weight_bytes(
    units: Iterable[Sequence[ParameterSpec]],
    precision: Precision,
    *,
    weight_buffers: int = 2,
    tied: Iterable[tuple[ParameterSpec, int]] = (),
    tensor_size: int = 1,
    alignment: int = 1,
    moments: int = 2,
    master_weights: bool = True,
) -> HostWeightBytes:
    """State of one rank under offload.weights, in a schedule that flushes.

    units: parameters of each unit (layer) on the rank, in the order of their updates, tied weights left out. tied:
    these, with the number of their uses on the rank. weight_buffers: units whose weights are on the device at once;
    the largest are counted. Two neighbouring units' state is there during updates. tensor_size, alignment, moments:
    as in `megapipe.spec.memory.state_bytes`.
    """
    weight = ELEMENT_BYTES[precision]
    kept = moments * FULL_BYTES + (0 if precision == "fp32" or not master_weights else FULL_BYTES)

    def elements_of(specs: Iterable[ParameterSpec]) -> int:
        return flat_elements(specs, tensor_size=tensor_size, alignment=alignment)

    sizes = [elements_of(specs) for specs in units]
    tables = [(elements_of([spec]), uses) for spec, uses in tied]
    moved = [size * (weight + kept) for size in sizes] + [size * kept for size, _ in tables]
    return HostWeightBytes(
        gradients=(sum(sizes) + sum(size * uses for size, uses in tables)) * FULL_BYTES,
        tied=sum(size for size, _ in tables) * weight,
        computing=sum(sorted(sizes, reverse=True)[:weight_buffers]) * weight,
        updating=max(sum(pair) for pair in zip(moved, [*moved[1:], 0], strict=True)),
        host=sum(moved),
        update_traffic=sum(moved),
    )
