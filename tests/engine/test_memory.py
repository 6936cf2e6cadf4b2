"""During a step a rank keeps the activations of micro-batches in flight alone, none of finished ones."""

import pytest

from megapipe.engine.step import StepInput
from megapipe.parallel.mesh import Mesh
from tests.engine.toy import ROWS, SPEC, contexts, toy
from tests.support.live_bytes import LiveBytes
from tests.support.meshes import run_threads

PIPELINE, LAYERS = 4, 8
MESSAGE = SPEC.shape[0] * SPEC.shape[1] * 4
"""Bytes that cross a stage boundary."""

IN_FLIGHT = 4 * MESSAGE
"""Sent activations that a rank may keep until the next rank has copied them."""


def peak_bytes(mesh: Mesh, name: str, num_microbatches: int) -> int:
    """Peak of this rank's second step, over what was alive before it. The first one makes the optimizer's state."""
    replica = toy(mesh, name, num_microbatches, [LAYERS] * PIPELINE)
    batch = contexts(0, num_microbatches)
    replica.engine.run(StepInput(0, batch, [float(ROWS)] * num_microbatches, learning_rate=0.01))
    with LiveBytes() as live:
        replica.engine.run(StepInput(1, batch, [float(ROWS)] * num_microbatches, learning_rate=0.01))
    return live.peak


def first_rank_peak(name: str, num_microbatches: int) -> int:
    return run_threads({"pipeline": PIPELINE}, peak_bytes, name, num_microbatches)[0]


def test_1f1b_keeps_one_micro_batch_per_rank() -> None:
    in_pipeline = first_rank_peak("gpipe", PIPELINE)
    assert in_pipeline > PIPELINE * LAYERS * MESSAGE
    for num_microbatches in (8, 32):
        assert first_rank_peak("1f1b", num_microbatches) <= in_pipeline + IN_FLIGHT


def test_gpipe_keeps_every_micro_batch() -> None:
    few, many = first_rank_peak("gpipe", 8), first_rank_peak("gpipe", 16)
    assert many - few == pytest.approx(8 * LAYERS * MESSAGE, abs=IN_FLIGHT)


def leftover_bytes(mesh: Mesh, name: str) -> int:
    replica = toy(mesh, name, 8, [LAYERS] * PIPELINE)
    batch = contexts(0, 8)
    replica.engine.run(StepInput(0, batch, [float(ROWS)] * 8, learning_rate=0.01))
    with LiveBytes() as live:
        replica.engine.run(StepInput(1, batch, [float(ROWS)] * 8, learning_rate=0.01))
        mesh.world.barrier()  # a peer may still read what this rank gave to a sum
    return live.current


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_nothing_but_the_last_coefficient_outlives_a_step(name: str) -> None:
    # Recorded gradients are the toy's own: one clone a layer.
    recorded = LAYERS * 8 * 8 * 4
    for left in run_threads({"pipeline": PIPELINE}, leftover_bytes, name):
        assert left - recorded <= 16
