"""Pipelines that shard, recompute, offload or split their layers, against torch in one process."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megapipe.config.memory import OffloadConfig
from megapipe.config.optimizer import OptimizerConfig
from megapipe.layers import ColumnLinear, RowLinear
from megapipe.optim.muon import update_of
from tests.engine.library_models import (
    WIDTH,
    adoptable,
    assert_close,
    assert_same_bits,
    merged,
    plain,
    solo,
    train,
)
from tests.support.meshes import run_threads

ALL = OffloadConfig(activations="blocks", optimizer=True, weights=True)
SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("1f1b", {}), ("zb_h1", {}), ("zb_v", {}), ("interleaved_1f1b", {"chunks": 2}), ("2bw", {}),
]  # fmt: skip


class Parameterless(nn.Module):
    def forward(self, x: Tensor, mask: Tensor, skip: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.tanh(), mask, skip


def mixed(tied: bool = False) -> list[nn.Module]:
    """A model with a layer that has no parameters."""
    layers = adoptable(4, tied=tied)
    return [*layers[:3], Parameterless(), *layers[3:]]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("schedule", "options"), SCHEDULES)
def test_replicas_train_what_one_process_trains(schedule: str, options: dict[str, Any], zero: int) -> None:
    layers = mixed(tied=True)
    outcomes = run_threads({"data": 2, "pipeline": 2}, train, layers, schedule, 4, {**options, "zero": zero})
    assert_close(merged(outcomes), plain(layers, 8, delay=int(schedule == "2bw")))


@pytest.mark.parametrize("recompute", [True, (1, 2, 5)])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "modular"])
def test_recomputation_keeps_the_bits(schedule: str, recompute: bool | tuple[int, ...]) -> None:
    layers = mixed()
    outcomes = run_threads({"pipeline": 2}, train, layers, schedule, 4, {"recompute": recompute})
    assert_same_bits(merged(outcomes), plain(layers, 4))


def test_recomputed_layers_draw_the_same_random_numbers() -> None:
    layers = adoptable(2)
    layers[1:1] = [Dropped()]
    outcomes = []
    for recompute in (False, (1, 2)):
        torch.manual_seed(5)
        outcomes.append(train(solo(), layers, "gpipe", 1, {"recompute": recompute}, steps=1))  # type: ignore[arg-type]
    assert_same_bits(outcomes[1], outcomes[0])


class Dropped(nn.Module):
    def forward(self, x: Tensor, mask: Tensor, skip: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return functional.dropout(x, 0.5), mask, skip


@pytest.mark.parametrize("offload", [OffloadConfig(activations="blocks"), OffloadConfig(optimizer=True), ALL])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_offloading_keeps_the_bits(schedule: str, offload: OffloadConfig) -> None:
    layers = adoptable(4)
    outcomes = run_threads({"pipeline": 2}, train, layers, schedule, 4, {"offload": offload})
    assert_same_bits(merged(outcomes), plain(layers, 4))


@pytest.mark.parametrize("sizes", [{"pipeline": 2}, {"data": 2}])
def test_muon_updates_hidden_matrices_alone(sizes: dict[str, int]) -> None:
    """One step against Muon by hand for hidden matrices; the others move as under AdamW, by at most the rate."""
    config = OptimizerConfig(name="muon", learning_rate=0.1, weight_decay=0.0, clip_norm=None)
    layers, data = adoptable(2), sizes.get("data", 1)
    options = {"zero": int(data > 1)}
    outcome = run_threads(sizes, train, layers, "1f1b", 4 // data, options, 1, config)[0]
    gradients = plain(layers, 4, steps=1).gradients[0]
    share = config.muon.momentum
    for name, before in nn.Sequential(*layers).state_dict().items():
        moved = outcome.weights[name] - before
        if before.dim() == 2 and name[0] in "12":
            direction = momentum = gradients[name] * (1 - share)
            if config.muon.nesterov:
                direction = gradients[name] * (1 - share) + momentum * share
            torch.testing.assert_close(moved, -0.1 * update_of(direction, config.muon), rtol=0.05, atol=2e-3)
        elif before.dim() == 2:
            assert moved.abs().max() <= 0.1001 * config.muon.elementwise_rate


class Parallel(nn.Module):
    """A block whose matrices tensor ranks split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = ColumnLinear(WIDTH, 4 * WIDTH)
        self.down = RowLinear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, skip: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x + self.down(functional.gelu(self.up(self.norm(x)))), mask, skip


def parallel(num_blocks: int = 2) -> list[nn.Module]:
    layers = adoptable(0)
    return [layers[0], *(Parallel() for _ in range(num_blocks)), layers[-1]]


@pytest.mark.filterwarnings("ignore:some parameters")
@pytest.mark.parametrize(
    ("sizes", "schedule", "options"),
    [
        ({"tensor": 2}, "1f1b", {}),
        ({"tensor": 2, "pipeline": 2}, "zb_h1", {}),
        ({"tensor": 2, "data": 2}, "1f1b", {"zero": 3}),
        ({"tensor": 2, "pipeline": 2}, "2bw", {"recompute": True}),
    ],
)
def test_tensor_ranks_train_what_one_process_trains(
    sizes: dict[str, int], schedule: str, options: dict[str, Any]
) -> None:
    layers = parallel()
    before = copy.deepcopy(nn.Sequential(*layers).state_dict())
    outcomes = run_threads(sizes, train, layers, schedule, 4 // sizes.get("data", 1), options)
    expected = plain(layers, 4, delay=int(schedule == "2bw"))
    for outcome in outcomes:
        assert_close(outcome, expected)
    assert all(torch.equal(value, before[name]) for name, value in nn.Sequential(*layers).state_dict().items())


def test_fp8_rounds_the_products_of_parallel_layers() -> None:
    layers = parallel()
    exact = plain(layers, 4)
    for sizes in ({}, {"tensor": 2}):
        outcome = run_threads(sizes, train, layers, "1f1b", 4, {"fp8": "tensorwise"})[0]
        assert outcome.losses == pytest.approx(exact.losses, rel=0.02)
        assert outcome.losses != exact.losses
