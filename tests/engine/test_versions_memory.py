"""How many weight versions and gradients are alive at once, counted in bytes against a schedule that flushes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megapipe.config.run import OptimizerConfig
from megapipe.parallel.mesh import Mesh
from tests.engine.asynchronous_toy import Case, Replica, with_options
from tests.support.live_bytes import LiveBytes
from tests.support.meshes import run_threads

PIPELINE, MICROBATCHES, WIDTH = 4, 5, 128
SGD = OptimizerConfig(name="sgd", weight_decay=0.0, clip_norm=1.0)
FLUSHING = Case("1f1b", (1,) * PIPELINE, MICROBATCHES, SGD, width=WIDTH)

ELEMENTS = WIDTH * WIDTH + WIDTH
"""Of a stage: a weight and a bias. A tensor of a micro-batch, three rows, is a fortieth of that."""

SLACK = 8 * ELEMENTS // 4
"""Less than any copy of the weights, more than all activations and messages in flight."""


def most_bytes(mesh: Mesh, case: Case) -> int:
    """The most that this rank had at once, from its building through three steps, a drain among them."""
    with LiveBytes() as live:
        replica = Replica(mesh, case)
        replica.train(range(3), drain_after=[0])
    return live.peak


def bytes_more_than_flushing(case: Case) -> list[int]:
    """By rank, over the same model under 1F1B, which keeps one version and one gradient."""
    flushing = replace(FLUSHING, optimizer=case.optimizer, dtype=case.dtype)
    more, less = (run_threads({"pipeline": PIPELINE}, most_bytes, each) for each in (case, flushing))
    return [own - base for own, base in zip(more, less, strict=True)]


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
    case = replace(FLUSHING, name="2bw", optimizer=optimizer, dtype=dtype)
    slack = SLACK * weight_bytes // 8
    for more in bytes_more_than_flushing(with_options(case, update="eager")):
        assert more == pytest.approx(weight_bytes * ELEMENTS, abs=slack)
    for more in bytes_more_than_flushing(with_options(case, update="lazy")):
        assert more == pytest.approx((weight_bytes + gradient_bytes) * ELEMENTS, abs=slack)


@pytest.mark.parametrize("options", [{}, {"vertical_sync": True}], ids=["plain", "vertical sync"])
def test_pipedream_keeps_as_many_versions_as_micro_batches_in_flight(options: dict[str, Any]) -> None:
    case = replace(FLUSHING, name="pipedream", optimizer=replace(SGD, clip_norm=None))
    for rank, more in enumerate(bytes_more_than_flushing(with_options(case, **options))):
        versions = PIPELINE if options else PIPELINE - rank
        assert more == pytest.approx((versions - 1) * 8 * ELEMENTS, abs=SLACK)
