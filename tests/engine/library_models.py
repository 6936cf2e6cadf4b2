"""Small models of plain torch modules, and what plain torch makes of them in one process without any pipeline."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.parallel import MeshShape
from megapipe.engine.pipeline import Pipeline
from megapipe.engine.step import StepResult
from megapipe.parallel.launch import connected_mesh
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules.registry import Options

WORDS, WIDTH, LENGTH, ROWS = 11, 16, 5, 2
SAMPLE = torch.empty(ROWS, LENGTH, dtype=torch.int64, device="meta")
SGD = OptimizerConfig(name="sgd", learning_rate=0.1, momentum=0.9, weight_decay=0.01, clip_norm=None)


def solo() -> Mesh:
    """The mesh of one process alone."""
    return connected_mesh(MeshShape({}), torch.device("cpu"))


class Start(nn.Module):
    """Tokens to (activations, a mask that only passes through, a skip connection to the head)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.words(tokens)
        return x, (tokens > 0).unsqueeze(-1), x.mean(1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.into = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor, mask: Tensor, skip: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.into(self.norm(x) * mask).relu_()
        return x + self.out(hidden) * self.scale, mask, skip


class Mixer(nn.Module):
    """Layers that cannot be adopted: attention, convolution, a parameter of its own; it drops the skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 1)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor, skip: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0] * self.gain
        return x + self.mix(x.transpose(1, 2)).transpose(1, 2).contiguous(), mask, torch.zeros_like(skip)


class Head(nn.Module):
    def __init__(self, tied: nn.Embedding | None = None) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WORDS, bias=False)
        if tied is not None:
            self.project.weight = tied.weight

    def forward(self, x: Tensor, mask: Tensor, skip: Tensor) -> Tensor:
        return self.project(x + skip.unsqueeze(1))


def adoptable(num_blocks: int = 6, *, tied: bool = False) -> list[nn.Module]:
    """A model whose every parameter has a weight half."""
    torch.manual_seed(3)
    start = Start()
    return [start, *(Block() for _ in range(num_blocks)), Head(start.words if tied else None)]


def foreign() -> list[nn.Module]:
    """A model with parameters that have none."""
    torch.manual_seed(4)
    return [Start(), Block(), Mixer(), Block(), Mixer(), Block(), Head()]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def batch(step: int, num_microbatches: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, WORDS, (num_microbatches * ROWS, LENGTH), generator=generator)
    return tokens, tokens.roll(1, 1)


def pipeline(mesh: Mesh | None = None, layers: Sequence[Any] = (), **changes: Any) -> Pipeline:
    """A Pipeline with other arguments than these: three layers on one rank, two micro-batches."""
    arguments: dict[str, Any] = {"loss": loss, "sample": SAMPLE, "microbatches": 2, **changes}
    return Pipeline(layers or adoptable(1), mesh or solo(), **arguments)


@dataclass(frozen=True)
class Outcome:
    """Losses by step, and by name the gradients of every update and the weights at the end."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


def train(
    mesh: Mesh,
    layers: Sequence[nn.Module],
    schedule: str,
    num_microbatches: int,
    options: Options | None = None,
    steps: int = 3,
    config: OptimizerConfig = SGD,
) -> Outcome:
    """A few steps of a Pipeline; num_microbatches counts those of one replica."""
    arguments = {"microbatches": num_microbatches, "schedule": schedule, "optimizer": config, **(options or {})}
    made = pipeline(mesh, layers, count=lambda targets: targets.numel(), timeout=20.0, **arguments)
    gradients = record_gradients(made)
    replica, replicas, results = mesh.coordinate("data"), mesh.size("data"), list[StepResult]()
    for step in range(steps):
        inputs, targets = (each.chunk(replicas)[replica] for each in batch(step, num_microbatches * replicas))
        results += made.step(inputs if made.is_first else None, targets if made.is_last else None)
    results += made.drain()
    return Outcome([result.loss for result in results], gradients, made.state_dict())


def record_gradients(pipeline: Pipeline) -> list[dict[str, Tensor]]:
    """A list that gets the reduced gradients of every update of this rank, by parameter."""
    record: list[dict[str, Tensor]] = []
    versions: list[int] = []
    update = pipeline.optimizer.update

    def recording(states: Sequence[UnitState], version: int, rate: float, coefficient: Tensor) -> None:
        newest = states[0].newest + 1 - len(states[0].weights)
        if versions[-1:] != [version]:  # offloaded states are updated one by one
            versions.append(version)
            record.append({})
        record[-1] |= {
            segment.spec.name: state.owned_view(state.gradients_of(newest)[0], segment).clone()
            for state in states
            if not state.sharding.gradients  # those are freed when they are reduced
            for segment in state.table
        }
        update(states, version, rate, coefficient)

    pipeline.optimizer.update = recording  # type: ignore[method-assign]
    return record


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome of all ranks of a pipeline; weights and losses must be the same on all."""
    first = outcomes[0]
    for other in outcomes:
        assert other.losses == first.losses
        assert other.weights.keys() == first.weights.keys()
        assert all(torch.equal(other.weights[name], weight) for name, weight in first.weights.items())
    updates = range(len(first.gradients))
    gradients = [{name: g for each in outcomes for name, g in each.gradients[i].items()} for i in updates]
    return Outcome(first.losses, gradients, first.weights)


class PlainModel(nn.Sequential):
    """The layers one after the other, each of which takes all that the previous one returns."""

    def forward(self, tokens: Tensor) -> Tensor:
        passed: tuple[Tensor, ...] = (tokens,)
        for layer in self:
            outputs = layer(*passed)
            passed = outputs if isinstance(outputs, tuple) else (outputs,)
        return passed[0]


def torch_optimizer(config: OptimizerConfig, decayed: list[Any], others: list[Any]) -> torch.optim.Optimizer:
    """torch's own optimizer of that configuration."""
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, foreach=False)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.epsilon, foreach=False)


def accumulate(model: PlainModel, step: int, num_microbatches: int) -> float:
    """Gradients of the mean loss over the batch, micro-batch by micro-batch, in `.grad`; returns the loss."""
    tokens, targets = batch(step, num_microbatches)
    model.zero_grad()
    total = 0.0
    for part, wanted in zip(tokens.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True):
        summed = loss(model(part), wanted)
        summed.backward(torch.tensor(1.0 / targets.numel(), dtype=torch.float64).to(summed.dtype))
        total += float(summed.detach().double())
    return total / targets.numel()


def plain(layers: Sequence[nn.Module], num_microbatches: int, *, delay: int = 0, steps: int = 3) -> Outcome:
    """The same run by torch alone. delay: gradients come from the weights that many updates ago, as in 2BW."""
    model = PlainModel(*copy.deepcopy(list(layers)))
    matrices, vectors = ([p for p in model.parameters() if (p.dim() >= 2) == whole] for whole in (True, False))
    optimizer = torch_optimizer(SGD, matrices, vectors)
    older = [copy.deepcopy(model.state_dict())] * (delay + 1)
    losses, gradients = [], []
    for step in range(steps):
        newest = copy.deepcopy(model.state_dict())
        older = [*older[1:], newest] if delay else [newest]
        model.load_state_dict(older[0] if step else newest)
        losses.append(accumulate(model, step, num_microbatches))
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        model.load_state_dict(newest)
        optimizer.step()
    return Outcome(losses, gradients, {name: p.detach() for name, p in model.named_parameters()})


def assert_same_bits(actual: Outcome, expected: Outcome) -> None:
    assert actual.losses == pytest.approx(expected.losses, rel=1e-12)
    assert len(actual.gradients) == len(expected.gradients)
    for ours, theirs in zip(actual.gradients, expected.gradients, strict=True):
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            assert torch.equal(ours[name], gradient), name
    for name, weight in expected.weights.items():
        assert torch.equal(actual.weights[name], weight), name


def assert_close(actual: Outcome, expected: Outcome) -> None:
    assert actual.losses == pytest.approx(expected.losses, rel=1e-5)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(actual.weights[name], weight, rtol=1e-4, atol=1e-6, msg=name)
