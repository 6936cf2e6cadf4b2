"""Generation: the same texts as transformers' generate, and the same ones on every layout."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.models.gpt_hugging_face import from_hugging_face
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.training.generate import CHUNK, Limits, Text, generate
from megapipe.training.passes import LoadedModel
from megapipe.training.sampling import SamplingSettings
from tests.models.hugging_face import CASES, Case
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE
from tests.support.meshes import run_mesh

GREEDY = SamplingSettings(temperature=0.0)
PROMPTS = [[5, 1, 4], [7], [3, 9, 2, 6, 8, 1, 2], [11, 12]]


def filled_with(tensors: Mapping[str, Tensor]) -> Callable[[Sequence[UnitState]], None]:
    """Fills unit states with whole canonical tensors."""

    def restore(states: Sequence[UnitState]) -> None:
        for state in states:
            for segment in state.table:
                box = tuple(slice(*ends) for ends in zip(segment.box.starts, segment.box.stops, strict=True))
                UnitState.owned_view(state.master, segment).copy_(tensors[segment.spec.name][box])
            state.publish()

    return restore


def as_drawn(states: Sequence[UnitState]) -> None:
    """Keeps the weights that the seed gives."""


def make_config(model: ModelConfig, sizes: Mapping[str, int] | None = None) -> PretrainConfig:
    config = PretrainConfig(model=model)
    config.parallel = replace(config.parallel, timeout_seconds=30.0, **(sizes or {}))
    config.data = replace(config.data, sequence_length=model.max_positions)
    return config


def grow(
    mesh: Mesh, config: PretrainConfig, prompts: list[list[int]], settings: SamplingSettings, limits: Limits, samples: int
) -> list[Text]:
    return generate(LoadedModel(config, mesh, as_drawn), prompts, samples, settings, limits)


def their_greedy(case: Case, prompt: list[int], new: int) -> list[int]:
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(new):
            logits = case.theirs(tokens).logits[:, -1]
            best = logits.topk(2).values[0]
            assert best[0] - best[1] > 1e-3, "a near tie would make the comparison one of rounding"
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", CASES)
def test_greedy_equals_transformers(name: str) -> None:
    """transformers computes every token anew from the whole text."""
    case = CASES[name]()
    weights = from_hugging_face(case.theirs.state_dict(), case.model, case.family)
    limits = Limits(max_new_tokens=20, vocabulary_size=97)

    def run(mesh: Mesh) -> list[Text]:
        return generate(LoadedModel(make_config(case.model), mesh, filled_with(weights)), PROMPTS, 1, GREEDY, limits)

    texts = run_mesh({}, run, backend="threads")[0]
    assert [text.generated for text in texts] == [their_greedy(case, prompt, 20) for prompt in PROMPTS]
