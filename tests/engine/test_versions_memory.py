"""How many weight versions and gradients are alive at once, counted in bytes against a schedule that flushes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megapipe.config.optimizer import OptimizerConfig
from megapipe.parallel.mesh import Mesh
from tests.engine.asynchronous_toy import Case, Replica, with_options
from tests.support.live_bytes import LiveBytes
from tests.support.meshes import run_threads

PIPELINE, MICROBATCHES, WIDTH = 4, 5, 256
SGD = OptimizerConfig(name="sgd", weight_decay=0.0, clip_norm=1.0)
FLUSHING = Case("1f1b", (1,) * PIPELINE, MICROBATCHES, SGD, width=WIDTH)

ELEMENTS = WIDTH * WIDTH + WIDTH
"""Elements of a stage: a weight and a bias. A tensor of a micro-batch, three rows, is an 85th of that."""

SLACK = 8 * ELEMENTS // 4
"""Less than any copy of the weights, more than all activations and messages in flight."""


def most_bytes(mesh: Mesh, case: Case) -> int:
    """The most that this rank had at once, from its building through three steps, a drain among them."""
    with LiveBytes() as live:
        replica = Replica(mesh, case)
        replica.train(range(3), drain_after=[0])
    return live.peak


def bytes_by_rank(case: Case) -> list[int]:
    return run_threads({"pipeline": PIPELINE}, most_bytes, case)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("dtype", "weight_bytes", "gradient_bytes"),
    [
        pytest.param(torch.float64, 8, 8, id="fp64"),
        pytest.param(torch.float32, 4, 4, id="fp32"),
        pytest.param(torch.bfloat16, 2, 4, id="bf16: a master for all versions"),
    ],
)
@pytest.mark.parametrize("optimizer", [SGD, OptimizerConfig()], ids=["sgd", "adamw"])
def test_two_buffered_weights_are_two(
    optimizer: OptimizerConfig, dtype: torch.dtype, weight_bytes: int, gradient_bytes: int
) -> None:
    """Moments are no more than under 1F1B; a lazy update has one more gradient buffer."""
    flushing = replace(FLUSHING, optimizer=optimizer, dtype=dtype)
    case, slack = replace(flushing, name="2bw"), SLACK * weight_bytes // 8
    one = bytes_by_rank(flushing)
    eager, lazy = (bytes_by_rank(with_options(case, update=update)) for update in ("eager", "lazy"))
    for rank in range(PIPELINE):
        assert eager[rank] - one[rank] == pytest.approx(weight_bytes * ELEMENTS, abs=slack)
        assert lazy[rank] - one[rank] == pytest.approx((weight_bytes + gradient_bytes) * ELEMENTS, abs=slack)


@pytest.mark.parametrize("options", [{}, {"vertical_sync": True}], ids=["plain", "vertical sync"])
def test_pipedream_keeps_one_version_per_micro_batch_in_flight(options: dict[str, Any]) -> None:
    optimizer = replace(SGD, clip_norm=None)
    one = bytes_by_rank(replace(FLUSHING, optimizer=optimizer))
    several = bytes_by_rank(with_options(replace(FLUSHING, name="pipedream", optimizer=optimizer), **options))
    for rank in range(PIPELINE):
        versions = PIPELINE if options else PIPELINE - rank
        assert several[rank] - one[rank] == pytest.approx((versions - 1) * 8 * ELEMENTS, abs=SLACK)
