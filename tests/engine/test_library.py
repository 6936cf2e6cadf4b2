"""Pipeline over plain torch modules, against torch's own autograd and optimizer in one process."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from megapipe.engine.pipeline import Pipeline
from megapipe.parallel import pipeline_links
from megapipe.parallel.mesh import Mesh
from megapipe.schedules import GENERATORS, Schedule, dumps, order
from megapipe.schedules.actions import KIND, Kind
from megapipe.schedules.schedule import Sections
from tests.engine.library_models import (
    WIDTH,
    Block,
    Head,
    Start,
    adoptable,
    assert_close,
    assert_same_bits,
    batch,
    foreign,
    merged,
    pipeline,
    plain,
    solo,
    train,
)
from tests.support.meshes import run_mesh, run_threads

CLASS_A: list[tuple[str, dict[str, Any]]] = [
    ("gpipe", {}),
    ("1f1b", {}),
    ("1f1b", {"two_bp": True}),
    ("interleaved_1f1b", {"chunks": 2}),
    ("modular", {"chunks": 2, "two_bp": True}),
    ("modular", {"chunks": 2}),
    ("zb_h1", {}),
    ("zb_h2", {}),
    ("zb_v", {}),
    ("zb_auto", {}),
    ("gis", {"chunks": 2}),
    ("gis_h", {"chunks": 2}),
    ("v_auto", {}),
    ("v_half", {}),
    ("v_min", {}),
    ("dualpipe_v", {}),
]


@pytest.mark.parametrize(
    ("schedule", "options", "ranks", "num_microbatches"),
    [
        *(
            pytest.param(*case, ranks, 8, marks=() if ranks == (2, 4)[number % 2] else pytest.mark.exhaustive)
            for number, case in enumerate(CLASS_A)
            for ranks in (1, 2, 4)
        ),
        *((name, {}, *sizes) for name in ("gpipe", "1f1b") for sizes in ((2, 1), (2, 5), (3, 2))),
        ("modular", {"chunks": 8}, 1, 4),
    ],
)
def test_every_flushing_schedule_has_the_bits_of_plain_torch(
    schedule: str, options: dict[str, Any], ranks: int, num_microbatches: int
) -> None:
    layers = adoptable()
    outcomes = run_threads({"pipeline": ranks}, train, layers, schedule, num_microbatches, options)
    assert_same_bits(merged(outcomes), plain(layers, num_microbatches))


@pytest.mark.filterwarnings("ignore:some parameters")
@pytest.mark.parametrize(("schedule", "options"), [("zb_h1", {}), ("zb_v", {}), ("gpipe", {"two_bp": True})])
def test_layers_that_cannot_split_get_equal_gradients(schedule: str, options: dict[str, Any]) -> None:
    layers = foreign()
    outcomes = run_threads({"pipeline": 2}, train, layers, schedule, 4, options)
    assert_same_bits(merged(outcomes), plain(layers, 4))


def test_layers_that_cannot_split_are_warned_about_once() -> None:
    with pytest.warns(UserWarning, match="without a weight half") as warnings:
        train(solo(), foreign(), "zb_h1", 2)
    assert len({str(warning.message) for warning in warnings}) == 1


def test_processes_give_the_same_bits() -> None:
    layers = adoptable(2)
    outcomes = run_mesh({"pipeline": 2}, train, layers, "zb_h1", 4, backend="processes", timeout=120.0)
    assert_same_bits(merged(outcomes), plain(layers, 4))


def weight_halves_last(ranks: int) -> Schedule:
    """1F1B with every backward split, and all weight halves at the end of the step."""
    schedule, body = order("1f1b", ranks, 6), []
    for rows in schedule.sections.body:
        inputs, weights = rows.copy(), rows[rows[:, KIND] == Kind.BACKWARD].copy()
        weights[:, KIND] = Kind.BACKWARD_WEIGHT
        inputs[inputs[:, KIND] == Kind.BACKWARD, KIND] = Kind.BACKWARD_INPUT
        body.append(np.concatenate([inputs, weights]))
    return Schedule(schedule.header, Sections.flushing(tuple(body)))


@pytest.mark.parametrize(
    ("text", "ranks", "options"),
    [
        (dumps(order("zb_v", 2, 6)), 2, {}),
        (GENERATORS["interleaved_1f1b"].text, 2, {"chunks": 3, "group_size": 3}),
        *((dumps(weight_halves_last(ranks)), ranks, {}) for ranks in (1, 2, 4)),
    ],
    ids=["zb_v", "interleaved_1f1b", "late halves on 1", "late halves on 2", "late halves on 4"],
)
def test_a_schedule_file_has_the_bits_of_plain_torch(
    tmp_path: Path, text: str, ranks: int, options: dict[str, int]
) -> None:
    layers, path = adoptable(), tmp_path / "mine.txt"
    path.write_text(text, encoding="utf-8")
    outcomes = run_threads({"pipeline": ranks}, train, layers, str(path), 6, options)
    assert_same_bits(merged(outcomes), plain(layers, 6))


def test_replicas_start_from_the_first_ones_weights() -> None:
    models = adoptable(1), adoptable(1)
    with torch.no_grad():
        for parameter in models[1][0].parameters():
            parameter.add_(1.0)
    first, second = run_threads({"data": 2}, lambda mesh: pipeline(mesh, models[mesh.rank]).state_dict())
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


@pytest.mark.parametrize(("schedule", "options"), [("1f1b", {}), ("zb_v", {}), ("2bw", {})])
def test_a_parameter_of_several_layers_stays_one_weight(schedule: str, options: dict[str, Any]) -> None:
    layers = adoptable(6, tied=True)
    alone = train(solo(), layers, schedule, 4, options)
    outcome = merged(run_threads({"pipeline": 4}, train, layers, schedule, 4, options))
    assert "7.project.weight" not in outcome.gradients[0]
    assert torch.equal(outcome.weights["7.project.weight"], outcome.weights["0.words.weight"])
    assert outcome.losses == alone.losses
    for name, weight in alone.weights.items():
        assert torch.equal(outcome.weights[name], weight), name
    assert_close(outcome, plain(layers, 4, delay=int(schedule == "2bw")))


class Twice(nn.Module):
    """One linear layer under two paths, and one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = self.first
        self.third = nn.Linear(WIDTH, WIDTH)
        self.third.weight = self.first.weight

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.third(self.second(self.first(x).tanh()).tanh()), *others


class Listed(nn.Module):
    """Computes with parameters from a list that torch does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.weights = [self.project.weight, self.project.bias]

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.nn.functional.linear(x, *self.weights), *others


@pytest.mark.parametrize(("schedule", "delay"), [("1f1b", 0), ("zb_h1", 0), ("2bw", 1)])
@pytest.mark.parametrize("layer", [Twice, Listed])
@pytest.mark.filterwarnings("ignore:some parameters")
def test_what_a_layer_shares_within_itself_stays_shared(layer: type[nn.Module], schedule: str, delay: int) -> None:
    torch.manual_seed(0)
    layers = [Start(), layer(), Head()]
    outcome = train(solo(), layers, schedule, 2)
    assert_same_bits(outcome, plain(layers, 2, delay=delay))
    if layer is Twice:
        assert {"1.first.weight", "1.second.weight", "1.third.weight"} <= outcome.weights.keys()
        assert torch.equal(outcome.weights["1.third.weight"], outcome.weights["1.first.weight"])


def test_one_module_as_two_layers_shares_its_weights() -> None:
    torch.manual_seed(0)
    block = Block()
    layers = [Start(), block, block, Head()]
    outcome = merged(run_threads({"pipeline": 2}, train, layers, "1f1b", 2))
    assert_close(outcome, plain(layers, 2))
    assert torch.equal(outcome.weights["1.into.weight"], outcome.weights["2.into.weight"])


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_layers_without_parameters_can_be_anywhere(schedule: str) -> None:
    def steps(mesh: Mesh) -> list[float]:
        pipeline = Pipeline(
            FLAT, mesh, loss=lambda y, t: (y - t).square().sum(), sample=x[:2], microbatches=2, schedule=schedule
        )
        return [result.loss for _ in range(2) for result in pipeline.step(x, y)]

    torch.manual_seed(0)
    FLAT = [nn.Flatten(), nn.Unflatten(1, (2, 3)), nn.Linear(3, 1), nn.Tanh(), nn.Flatten(), nn.Softplus()]
    x, y = torch.randn(4, 2, 3), torch.randn(4, 2)
    assert run_threads({"pipeline": 3}, steps) == [steps(solo())] * 3


def test_layer_makers_run_locally_and_draw_the_same_weights() -> None:
    def makers(made: list[int]) -> list[Any]:
        def maker(index: int, kind: type[nn.Module]) -> Any:
            def make() -> nn.Module:
                module = kind()
                if not next(module.parameters()).is_meta:
                    made.append(index)
                return module

            return make

        return [maker(index, kind) for index, kind in enumerate((Start, Block, Block, Head))]

    def build(mesh: Mesh) -> tuple[list[int], dict[str, torch.Tensor]]:
        made: list[int] = []
        return made, pipeline(mesh, makers(made), seed=5).state_dict()

    first, second = run_threads({"pipeline": 2}, build)
    assert (first[0], second[0]) == ([0, 1], [2, 3])
    made, weights = build(solo())
    assert made == [0, 1, 2, 3]
    assert weights["1.into.weight"].any()
    assert not torch.equal(weights["1.into.weight"], weights["2.into.weight"])
    assert all(torch.equal(first[1][name], weight) for name, weight in weights.items())


def test_trained_weights_load_into_the_given_modules() -> None:
    layers = adoptable(1)
    before = {name: value.clone() for name, value in nn.Sequential(*layers).state_dict().items()}
    outcome = train(solo(), layers, "zb_h1", 2)
    model = nn.Sequential(*layers)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.load_state_dict(outcome.weights)
    assert not torch.equal(layers[1].out.weight, before["1.out.weight"])
    assert type(layers[1].out) is nn.Linear


def test_bfloat16_layers_have_float32_masters_and_one_ranks_bits() -> None:
    layers = [layer.to(torch.bfloat16) for layer in adoptable(2)]
    alone = train(solo(), layers, "zb_h1", 4)
    outcome = merged(run_threads({"pipeline": 2}, train, layers, "zb_h1", 4))
    assert outcome.losses == alone.losses
    assert outcome.weights["1.out.weight"].dtype == torch.bfloat16
    assert outcome.gradients[0]["1.out.weight"].dtype == torch.float32
    assert all(torch.equal(outcome.weights[name], weight) for name, weight in alone.weights.items())


def test_layers_by_hand_and_clipping_and_learning_rates() -> None:
    def build(mesh: Mesh, layers_per_stage: list[int]) -> tuple[list[int], list[float]]:
        made = pipeline(mesh, layers, layers_per_stage=layers_per_stage)
        before = made.state_dict()
        results = made.step(*batch(0, 2), learning_rate=0.0)
        unchanged = all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
        assert unchanged, "a rate of zero moves weights"
        return [len(stage.units) for stage in made.stages.values()], [result.gradient_norm for result in results]

    layers = adoptable(2)
    first, second = run_threads({"pipeline": 2}, build, [3, 1])
    assert (first[0], second[0]) == ([3], [1])
    assert first[1] == second[1] == build(solo(), [4])[1]


PATIENCE = timedelta(seconds=20)


def train_over_connecting_links(mesh: Mesh, layers: list[nn.Module]) -> Any:
    """Train over gloo links whose first use blocks like NCCL's; the first use must be during start-up."""
    store, used = dist.distributed_c10d._get_default_store(), []
    send, receive = dist.isend, dist.irecv

    def connecting(call: Callable[..., Any], sends: bool) -> Callable[..., Any]:
        def first_use_waits(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup) -> dist.Work | None:
            source, destination = (mesh.rank, peer) if sends else (peer, mesh.rank)
            link = f"{source}->{destination}"
            if link not in used:
                used.append(link)
                store.set(f"{link} used by {mesh.rank}", "")
                store.wait([f"{link} used by {peer}"], PATIENCE)
            return call(tensor, peer, group)

        return first_use_waits

    dist.isend, dist.irecv = connecting(send, True), connecting(receive, False)
    pipeline_links.memory_is_shared = lambda group: False  # as on several hosts
    return train(mesh, layers, "interleaved_1f1b", 4, {"chunks": 2}), used


def test_first_steps_do_not_hang_if_first_uses_block() -> None:
    layers = adoptable()
    outcomes, used = zip(*run_mesh({"pipeline": 2}, train_over_connecting_links, layers), strict=True)
    assert_same_bits(merged(list(outcomes)), plain(layers, 4))
    assert len(used[0]) == len(used[1]) == 2
