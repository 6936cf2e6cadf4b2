"""Exchanges between ranks outside of layers: between stages, and once per step."""

from collections.abc import Iterable, Sequence

from megapipe.spec.ops import Exchange, Operation

DOUBLE_BYTES = 8
"""Bytes of a float64: counts, norms and losses of a step."""
MESSAGES_IN_FLIGHT = 4
"""Messages of one stage boundary and direction that a rank may have sent before a receive has ended: over NCCL their
tensors are kept until then."""


def scalar_exchanges(num_parameters: int, loss_terms: int = 1, updates: int = 1) -> list[Exchange]:
    """Return the exchanges of all ranks in one step that are not of tensors: numbers in float64.

    First a count of tokens for each term of the loss and update, with flags for stop, save and a failed save; then
    every parameter's squared norm (0 where it is not the rank's) and the terms of the loss.
    """
    return [
        Exchange("all_reduce", loss_terms * updates + 3, DOUBLE_BYTES),
        Exchange("all_reduce", num_parameters + loss_terms, DOUBLE_BYTES),
    ]


def merged(exchanges: Iterable[Exchange]) -> dict[Operation, tuple[int, int, int]]:
    """Return by operation the calls, elements and bytes of all exchanges."""
    found: dict[Operation, tuple[int, int, int]] = {}
    for each in exchanges:
        calls, elements, total = found.get(each.operation, (0, 0, 0))
        found[each.operation] = (calls + each.calls, elements + each.calls * each.elements, total + each.bytes)
    return found


def repeated(exchanges: Sequence[Exchange], times: int) -> list[Exchange]:
    """Return each exchange with `times` as many calls."""
    return [each._replace(calls=each.calls * times) for each in exchanges]
