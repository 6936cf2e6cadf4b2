"""A user's modules on context ranks, which hold parts of every sample, against torch in one process."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megapipe.config.optimizer import OptimizerConfig
from megapipe.engine.pipeline import Pipeline
from megapipe.layers.context_parallel import DotProductAttention
from megapipe.parallel.mesh import Mesh
from tests.engine.library_models import WIDTH, WORDS, loss
from tests.support.meshes import run_threads

ROWS, LENGTH, HEADS, KV_HEADS = 2, 8, 4, 2
RATE = 0.1


class Words(nn.Module):
    """Tokens and their places to activations: with context ranks a layer cannot count places by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        return self.words(tokens) + self.places(places)


class Block(nn.Module):
    """Grouped attention whose values are narrower than its keys."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key = nn.Linear(WIDTH, HEADS * 4), nn.Linear(WIDTH, KV_HEADS * 4)
        self.value, self.out = nn.Linear(WIDTH, KV_HEADS * 2), nn.Linear(HEADS * 2, WIDTH)
        self.attention = DotProductAttention(causal=causal)

    def forward(self, x: Tensor) -> Tensor:
        heads = [make(self.norm(x)) for make in (self.query, self.key, self.value)]
        counts = (HEADS, KV_HEADS, KV_HEADS)
        query, key, value = (
            part.unflatten(2, (count, -1)).transpose(1, 2) for part, count in zip(heads, counts, strict=True)
        )
        return x + self.out(self.attention(query, key, value).transpose(1, 2).flatten(2))


def model(causal: bool) -> list[nn.Module]:
    torch.manual_seed(5)
    return [Words(), Block(causal), Block(causal), nn.Linear(WIDTH, WORDS)]


def batch(rows: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    tokens = torch.randint(0, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    return (tokens, torch.arange(LENGTH).expand(rows, -1)), tokens.roll(-1, 1)


def train(mesh: Mesh, layers: list[nn.Module], microbatches: int, options: dict[str, Any]) -> tuple[list[float], Any]:
    config = OptimizerConfig(name="sgd", learning_rate=RATE, momentum=0.0, weight_decay=0.0, clip_norm=None)
    inputs, targets = batch(ROWS * microbatches * mesh.size("data"))
    sample = tuple(each[:ROWS] for each in inputs)
    pipeline = Pipeline(
        layers, mesh, loss=loss, sample=sample, microbatches=microbatches, optimizer=config, timeout=20.0, **options
    )
    rows = slice(mesh.coordinate("data"), None, mesh.size("data"))
    own = tuple(each[rows] for each in inputs), targets[rows]
    losses = [result.loss for _ in range(3) for result in pipeline.step(*own)]
    return losses, pipeline.state_dict()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"context": 2}, {"recompute": True}),
        ({"context": 2, "pipeline": 2}, {"schedule": "zb_h1"}),
        ({"context": 2, "data": 2}, {"zero": 3}),
        ({"context": 4}, {"count": lambda targets: targets.numel() / LENGTH}),
    ],
)
@pytest.mark.filterwarnings("ignore:some parameters")
def test_context_ranks_train_what_torch_trains(sizes: dict[str, int], options: dict[str, Any], causal: bool) -> None:
    layers, microbatches = model(causal), 4 // sizes.get("data", 1)
    outcomes = run_threads(sizes, train, layers, microbatches, options)
    whole = copy.deepcopy(nn.Sequential(*layers[1:]))
    first = copy.deepcopy(layers[0])
    (tokens, places), targets = batch(ROWS * 4)
    plain = torch.optim.SGD([*first.parameters(), *whole.parameters()], lr=RATE)
    expected = []
    for _ in range(3):
        plain.zero_grad()
        mean = loss(whole(first(tokens, places)), targets) / len(tokens)
        mean.backward()
        plain.step()
        expected.append(mean.item())
    named = {f"0.{name}": value for name, value in first.state_dict().items()}
    named |= {f"{int(name[0]) + 1}{name[1:]}": value for name, value in whole.state_dict().items()}
    for losses, weights in outcomes:
        assert losses == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(weights, named, rtol=1e-5, atol=2e-6)
