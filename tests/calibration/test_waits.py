"""Waits of ranks for each other in layers that they share: measured times beyond their own work."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapipe.calibration.layers import Cell, cells, measure_shared, shared_cells, waits
from megapipe.calibration.machine import on_ranks
from megapipe.config.run import PretrainConfig
from megapipe.engine.trace import HostClock
from megapipe.layout.hardware.description import MeasuredLayer
from megapipe.parallel.mesh import Mesh
from tests.calibration.test_layers import CONFIG

SECONDS = st.floats(0.0, 10.0)


def by_a_clock_of_sums(mesh: Mesh, config: PretrainConfig, wanted: Sequence[Cell], steps: int) -> list[MeasuredLayer]:
    """`measure_shared` by a clock that only sums of tensor ranks advance, each by a second."""
    now, start = 0, torch.ops._c10d_functional.all_reduce

    def timed(*given: Any) -> Any:
        nonlocal now
        now += 10**9
        return start(*given)

    torch.ops._c10d_functional.all_reduce = timed
    HostClock.mark = lambda _: now  # type: ignore[method-assign]
    return measure_shared(mesh, config, wanted, steps)


@pytest.mark.slow
def test_layers_take_the_time_of_their_sums() -> None:
    """A block of two tensor ranks sums twice in its forward, and twice in the input half of its backward; one of two
    context ranks sums nothing."""
    rows, others = on_ranks(2, "cpu", by_a_clock_of_sums, CONFIG, [Cell(2, 1, 1), Cell(1, 2, 1)], 3)
    assert rows == others
    assert [(row.kind, row.tensor, row.context) for row in rows] == [
        (kind, *shared) for shared in ((2, 1), (1, 2)) for kind in ("embedding", "block", "head")
    ]
    for row, sums in ((rows[1], 2), (rows[4], 0)):
        assert (row.forward, row.backward, row.backward_input, row.backward_weight) == (sums, sums, sums, 0)


@given(
    alone=st.lists(SECONDS, min_size=5, max_size=5), beyond=st.lists(st.floats(-10.0, 10.0), min_size=5, max_size=5)
)
def test_what_is_beyond_the_same_work_alone_is_waiting(alone: list[float], beyond: list[float]) -> None:
    """None where ranks together took less."""
    together = [1.5 * max(0.0, own + more) for own, more in zip(alone, beyond, strict=True)]
    one, both = (MeasuredLayer("block", 2, 1, 4, *seconds) for seconds in (alone, together))
    (layer,) = waits([MeasuredLayer("head", 2, 1, 4, *[9.0] * 5), one], [both], 1.5)
    assert (layer.kind, layer.tensor, layer.context, layer.micro_size) == ("block", 2, 1, 4)
    seconds = (layer.forward, layer.backward, layer.backward_input, layer.backward_weight)
    assert min(seconds) >= 0.0
    assert seconds == pytest.approx([max(0.0, more) for more in beyond[:4]], abs=1e-9)


def test_layers_are_shared_by_the_number_of_ranks() -> None:
    shared = shared_cells(cells([1, 2, 4], [1, 2], [1]), 4)
    assert shared == {2: [Cell(1, 2, 1), Cell(2, 1, 1)], 4: [Cell(2, 2, 1), Cell(4, 1, 1)]}
    assert shared_cells(cells([1, 2], [1], [1]), 1) == {}
