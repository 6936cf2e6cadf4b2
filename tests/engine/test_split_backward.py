"""Schedules with split backwards: weight halves that run late give the bits of whole backwards."""

import numpy as np
import pytest
import torch

from megapipe.config.mesh_shape import MeshShape
from megapipe.parallel.launch import connected_mesh
from megapipe.schedules import Kind, Schedule
from megapipe.schedules.actions import KIND
from megapipe.schedules.schedule import Sections
from tests.engine.toy import merged, train
from tests.support.meshes import Backend, run_mesh

SPLITS = {1: [4], 2: [1, 3], 4: [1, 1, 1, 1]}


def weight_halves_last(schedule: Schedule) -> Schedule:
    """Every backward split, and all weight halves at the end of the step."""
    body = []
    for rows in schedule.sections.body:
        weight = rows[rows[:, KIND] == Kind.BACKWARD].copy()
        weight[:, KIND] = Kind.BACKWARD_WEIGHT
        inputs = rows.copy()
        inputs[inputs[:, KIND] == Kind.BACKWARD, KIND] = Kind.BACKWARD_INPUT
        body.append(np.concatenate([inputs, weight]))
    return Schedule(schedule.header, Sections.flushing(tuple(body)))


@pytest.mark.parametrize("backend", ["threads", "processes"])
@pytest.mark.parametrize("pipeline", [1, 2, 4])
def test_late_weight_halves_equal_whole_backwards_bit_for_bit(backend: Backend, pipeline: int) -> None:
    expected = train(connected_mesh(MeshShape({}), torch.device("cpu")), "1f1b", 6, SPLITS[1])
    ranks = run_mesh({"pipeline": pipeline}, train, "1f1b", 6, SPLITS[pipeline], weight_halves_last, backend=backend)
    found = merged(ranks)
    assert found.losses == expected.losses
    assert found.norms == expected.norms
    for layer, weight in expected.weights.items():
        assert torch.equal(found.weights[layer], weight)


def test_split_replicas_reduce_each_unit_behind_its_weight_half() -> None:
    expected = train(connected_mesh(MeshShape({}), torch.device("cpu")), "1f1b", 8, SPLITS[1])
    ranks = run_mesh({"data": 2, "pipeline": 2}, train, "1f1b", 4, SPLITS[2], weight_halves_last)
    found = merged(ranks[:2])
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    for layer, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[layer], weight, rtol=1e-5, atol=1e-6)
