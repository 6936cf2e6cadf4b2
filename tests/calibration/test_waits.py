"""Waits of ranks for each other in layers that they share: measured times beyond their own work."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapipe.calibration.layers import Cell, cells, measure_shared, shared_cells, waits
from megapipe.calibration.machine import on_ranks
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import MeasuredLayer
from megapipe.parallel.mesh import Mesh
from tests.calibration.test_layers import CONFIG

LATE = 0.05
SECONDS = st.floats(0.0, 10.0)


def with_a_late_rank(mesh: Mesh, config: PretrainConfig, wanted: Sequence[Cell], steps: int) -> list[MeasuredLayer]:
    """`measure_shared` while rank 1 comes late to every sum."""
    in_time = torch.ops._c10d_functional.all_reduce

    def late(*given: Any) -> Any:
        time.sleep(LATE)
        return in_time(*given)

    if mesh.rank == 1:
        torch.ops._c10d_functional.all_reduce = late
    return measure_shared(mesh, config, wanted, steps)


@pytest.mark.slow
def test_all_wait_for_a_rank_that_comes_late() -> None:
    """A block of two tensor ranks sums twice in its forward, and twice in its backward."""
    rows, others = on_ranks(2, "cpu", with_a_late_rank, CONFIG, [Cell(2, 1, 1), Cell(1, 2, 1)], 3)
    assert rows == others
    assert [(row.kind, row.tensor, row.context) for row in rows] == [
        (kind, *shared) for shared in ((2, 1), (1, 2)) for kind in ("embedding", "block", "head")
    ]
    block = rows[1]
    # Half a turn of the late rank is left for the other one's own start.
    assert min(block.forward, block.backward, block.backward_input) > 1.5 * LATE
    assert block.backward_weight < LATE  # the weight's half sums nothing


@given(alone=st.lists(SECONDS, min_size=5, max_size=5), beyond=st.lists(SECONDS, min_size=5, max_size=5))
def test_what_is_beyond_the_same_work_alone_is_waiting(alone: list[float], beyond: list[float]) -> None:
    one = MeasuredLayer("block", 2, 1, 4, *alone)
    both = MeasuredLayer("block", 2, 1, 4, *(1.5 * (own + more) for own, more in zip(alone, beyond, strict=True)))
    (layer,) = waits([MeasuredLayer("head", 2, 1, 4, *[9.0] * 5), one], [both], 1.5)
    assert (layer.kind, layer.tensor, layer.context, layer.micro_size) == ("block", 2, 1, 4)
    seconds = (layer.forward, layer.backward, layer.backward_input, layer.backward_weight)
    assert seconds == pytest.approx(beyond[:4], abs=1e-9)


def test_waits_are_never_negative() -> None:
    alone = MeasuredLayer("block", 2, 1, 1, *[1.0] * 5)
    (layer,) = waits([alone], [alone], 1.1)
    assert (layer.forward, layer.backward, layer.backward_input, layer.backward_weight) == (0.0, 0.0, 0.0, 0.0)


def test_layers_are_shared_by_the_number_of_ranks() -> None:
    shared = shared_cells(cells([1, 2, 4], [1, 2], [1]), 4)
    assert shared == {2: [Cell(1, 2, 1), Cell(2, 1, 1)], 4: [Cell(2, 2, 1), Cell(4, 1, 1)]}
    assert shared_cells(cells([1, 2], [1], [1]), 1) == {}
