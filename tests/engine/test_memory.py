"""Bytes of a rank: nothing outlives a step, and versions of weights under 2BW and PipeDream."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megapipe.config.optimizer import OptimizerConfig
from megapipe.parallel.mesh import Mesh
from tests.engine.recursion_runs import OPTIMIZERS, SGD, Case, Replica
from tests.support.live_bytes import LiveBytes
from tests.support.meshes import run_threads

PIPELINE = 4


def bytes_left(mesh: Mesh, name: str) -> int:
    """Bytes alive after this rank's second step, over what was alive before it. The first one makes the optimizer's
    state."""
    replica = Replica(mesh, Case(name, (8,) * PIPELINE, 8, OPTIMIZERS["adamw"], dtype=torch.float32))
    replica.train(range(1))
    inputs, targets = replica.batch(1)
    with LiveBytes() as live:
        replica.pipeline.step(inputs, targets)
        mesh.world.barrier()  # a peer may still read what this rank gave to a sum
    return live.current


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_nothing_but_the_last_coefficient_outlives_a_step(name: str) -> None:
    assert max(run_threads({"pipeline": PIPELINE}, bytes_left, name)) <= 16


VERSIONED = Case("1f1b", (1,) * PIPELINE, 5, replace(SGD, clip_norm=1.0), drain_after=[0], width=256)
ELEMENTS = 256 * 256 + 256
"""Elements of a stage: a weight and a bias. A tensor of a micro-batch, three rows, is an 85th of that."""
SLACK = 8 * ELEMENTS // 4
"""Less than any copy of the weights, more than all activations and messages in flight."""


def most_bytes(mesh: Mesh, case: Case) -> int:
    """The most that this rank had at once, from its building through three steps, a drain among them."""
    with LiveBytes() as live:
        Replica(mesh, case).train(range(3))
    return live.peak


def bytes_by_rank(case: Case, **options: Any) -> list[int]:
    return run_threads({"pipeline": PIPELINE}, most_bytes, replace(case, options=options))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("dtype", "weight_bytes", "gradient_bytes"),
    [
        pytest.param(torch.float64, 8, 8, id="fp64"),
        pytest.param(torch.float32, 4, 4, id="fp32"),
        pytest.param(torch.bfloat16, 2, 4, id="bf16: a master for all versions"),
    ],
)
@pytest.mark.parametrize("optimizer", [VERSIONED.optimizer, OptimizerConfig()], ids=["sgd", "adamw"])
def test_two_buffered_weights_are_two(
    optimizer: OptimizerConfig, dtype: torch.dtype, weight_bytes: int, gradient_bytes: int
) -> None:
    """Moments are no more than under 1F1B; a lazy update has one more gradient buffer."""
    flushing = replace(VERSIONED, optimizer=optimizer, dtype=dtype)
    case, slack = replace(flushing, name="2bw"), SLACK * weight_bytes // 8
    one = bytes_by_rank(flushing)
    eager, lazy = (bytes_by_rank(case, update=update) for update in ("eager", "lazy"))
    for rank in range(PIPELINE):
        assert eager[rank] - one[rank] == pytest.approx(weight_bytes * ELEMENTS, abs=slack)
        assert lazy[rank] - one[rank] == pytest.approx((weight_bytes + gradient_bytes) * ELEMENTS, abs=slack)


@pytest.mark.parametrize("options", [{}, {"vertical_sync": True}], ids=["plain", "vertical sync"])
def test_pipedream_keeps_one_version_per_micro_batch_in_flight(options: dict[str, Any]) -> None:
    flushing = replace(VERSIONED, optimizer=SGD)
    one, several = bytes_by_rank(flushing), bytes_by_rank(replace(flushing, name="pipedream"), **options)
    for rank in range(PIPELINE):
        versions = PIPELINE if options else PIPELINE - rank
        assert several[rank] - one[rank] == pytest.approx((versions - 1) * 8 * ELEMENTS, abs=SLACK)
