"""Generation: transformers' own texts, the same ones on every layout, and their ends."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.data.tokenizers.model_files import ByteTokenizer
from megapipe.inference import generation
from megapipe.inference.generation import Limits, SamplingSettings, StopStrings, Text, generate
from megapipe.inference.trained_model import LoadedModel
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from tests.models.hugging_face import CONFIGS, Case, case_of, most_exhaustive, opened
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE
from tests.support.meshes import run_mesh

GREEDY = SamplingSettings(temperature=0.0)
PROMPTS = [[5, 1, 4], [7], [3, 9, 2, 6, 8, 1, 2], [11, 12]]
NEW = 20

# Weights of a size that makes logits of order 1, so that texts are neither constant nor near ties.
SHAPES = {
    "gpt2-tied": replace(GPT2_SHAPE, max_positions=48, init_std=0.3),
    "llama-untied": replace(
        LLAMA_SHAPE,
        max_positions=48,
        init_std=0.3,
        sliding_window=9,
        layer_kinds={"all": {"sliding_window": None, "positions": "none"}},
        layer_pattern=("base", "all"),
    ),
    "latents": replace(
        LLAMA_SHAPE, max_positions=48, init_std=0.3, num_kv_heads=None, kv_latent_size=12, rotary_head_size=4
    ),
}
LAYOUTS = [
    ("gpt2-tied", {"pipeline": 2, "tensor": 2}),
    *(
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in (
            ("gpt2-tied", {"pipeline": 2}),
            ("gpt2-tied", {"tensor": 2}),
            ("llama-untied", {"pipeline": 4}),
            ("llama-untied", {"tensor": 2}),
            ("latents", {"pipeline": 2, "tensor": 2}),
        )
    ),
]


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


def make_config(model: ModelConfig, mesh: Mesh) -> PretrainConfig:
    config = PretrainConfig(model=model)
    sizes = {name: mesh.size(name) for name in ("data", "pipeline", "tensor")}
    config.parallel = replace(config.parallel, timeout_seconds=30.0, **sizes)
    config.data = replace(config.data, sequence_length=model.max_positions)
    return config


def limits_of(model: ModelConfig, **changes: Any) -> Limits:
    return replace(Limits(max_new_tokens=NEW, vocabulary_size=model.vocabulary_size), **changes)


def grown(
    mesh: Mesh,
    model: ModelConfig,
    settings: SamplingSettings,
    limits: Limits,
    samples: int = 1,
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> list[Text]:
    return generate(LoadedModel(make_config(model, mesh), mesh, as_drawn), prompts, samples, settings, limits)


def alone(model: ModelConfig, settings: SamplingSettings, limits: Limits, **others: object) -> list[Text]:
    """The texts of one process."""
    return run_mesh({}, lambda mesh: grown(mesh, model, settings, limits, **others), backend="threads")[0]


def of_case(case: Case, settings: SamplingSettings = GREEDY, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Text]:
    """Greedy texts with the weights of a transformers model."""
    model, weights = opened(case.theirs)

    def run(mesh: Mesh) -> list[Text]:
        loaded = LoadedModel(make_config(model, mesh), mesh, filled_with(weights))
        return generate(loaded, prompts, 1, settings, limits_of(model))

    return run_mesh({}, run, backend="threads")[0]


def their_greedy(case: Case, prompt: list[int], penalty: float = 1.0) -> list[int]:
    case.theirs.generation_config.eos_token_id = None
    output = case.theirs.generate(
        torch.tensor([prompt]),
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        repetition_penalty=penalty,
        return_dict_in_generate=True,
        output_scores=True,
    )
    for logits in output.scores:
        best = logits.topk(2).values[0]
        assert best[0] - best[1] > 1e-3, "a near tie would make the comparison one of rounding"
    return output.sequences[0, len(prompt) :].tolist()


NOT_COMPARED = {
    "llama_with_biases": "two candidates nearly tie",
    "gemma2": "two candidates nearly tie; longer prompts are compared below",
    "phi3": "two candidates nearly tie",
    "phi3_long": "transformers takes the frequencies of short sequences until a text is longer than these",
}


@pytest.mark.parametrize("name", most_exhaustive(name for name in CONFIGS if name not in NOT_COMPARED))
def test_greedy_texts_equal_those_of_transformers(name: str) -> None:
    case = case_of(name)
    assert [text.generated for text in of_case(case)] == [their_greedy(case, prompt) for prompt in PROMPTS]


def test_penalized_greedy_texts_equal_those_of_transformers() -> None:
    case = case_of("mistral")
    actual = [text.generated for text in of_case(case, replace(GREEDY, repetition_penalty=1.3))]
    assert actual == [their_greedy(case, prompt, 1.3) for prompt in PROMPTS]
    assert actual != [text.generated for text in of_case(case)]


@pytest.mark.parametrize(
    ("name", "chunk"), [("mistral", 1), *(pytest.param("gpt2", each, marks=pytest.mark.exhaustive) for each in (1, 3))]
)
def test_prompts_may_pass_in_chunks_of_any_size(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(name)
    monkeypatch.setattr(generation, "CHUNK", chunk)
    assert [text.generated for text in of_case(case)] == [their_greedy(case, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("name", most_exhaustive(("mistral", "gemma2", "gpt_oss")))
def test_prompts_may_be_longer_than_the_window(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, together with prompts that end in earlier ones."""
    case, prompts = case_of(name), [[*range(3, 40)], [7, 5], [*range(40, 19, -1)], [*range(9, 34, 2)]]
    monkeypatch.setattr(generation, "CHUNK", 4)
    expected = [their_greedy(case, prompt) for prompt in prompts]
    assert [text.generated for text in of_case(case, prompts=prompts)] == expected


def grown_both_ways(mesh: Mesh, model: ModelConfig) -> list[Text]:
    """Greedy texts, and several samples of each prompt, more of them than fit one batch."""
    sampled = SamplingSettings(temperature=1.2, top_p=0.95, min_p=0.02, repetition_penalty=1.1, seed=3)
    limits = limits_of(model, max_new_tokens=8, batch_size=7, stop=StopStrings(("\t", "!"), ByteTokenizer()))
    return grown(mesh, model, GREEDY, limits) + grown(mesh, model, sampled, limits, samples=3)


@pytest.mark.parametrize(("name", "sizes"), LAYOUTS, ids=str)
def test_every_layout_gives_the_same_texts(name: str, sizes: dict[str, int]) -> None:
    model = SHAPES[name]
    expected = run_mesh({}, grown_both_ways, model, backend="threads")[0]
    assert len({tuple(text.generated) for text in expected}) == len(expected), "texts should differ"
    for texts in run_mesh(sizes, grown_both_ways, model, backend="threads"):
        assert texts == expected


def test_texts_do_not_depend_on_batch_or_neighbours() -> None:
    model, settings = SHAPES["gpt2-tied"], SamplingSettings(seed=8)
    limits = limits_of(model, max_new_tokens=8)
    expected = alone(model, settings, limits, samples=3)
    assert [(text.prompt, text.sample) for text in expected] == [(p, s) for p in range(4) for s in range(3)]
    for batch_size in (1, 5):
        assert alone(model, settings, replace(limits, batch_size=batch_size), samples=3) == expected
    fewer = alone(model, settings, limits, samples=2, prompts=PROMPTS[:2])
    assert fewer == [text for text in expected if text.prompt < 2 and text.sample < 2]


def test_a_text_ends_before_its_end_of_document() -> None:
    model = SHAPES["gpt2-tied"]
    whole = alone(model, GREEDY, limits_of(model))
    end = whole[0].generated[4]
    stopped = alone(model, GREEDY, limits_of(model, end_of_document=end))
    for text, longer in zip(stopped, whole, strict=True):
        known = longer.generated
        assert text.generated == (known[: known.index(end)] if end in known else known)
    assert any(len(text.generated) < NEW for text in stopped)


def test_a_text_ends_at_the_last_position() -> None:
    model = SHAPES["gpt2-tied"]
    prompts = [list(range(1, 46)), [1] * 47, [2]]
    texts = alone(model, GREEDY, limits_of(model), prompts=prompts)
    assert [len(text.tokens) for text in texts] == [48, 48, 1 + NEW]


def test_tokens_beyond_the_tokenizers_vocabulary_are_never_picked() -> None:
    model = SHAPES["gpt2-tied"]
    everything = alone(model, GREEDY, limits_of(model))
    assert max(token for text in everything for token in text.generated) >= 20
    limited = alone(model, GREEDY, limits_of(model, vocabulary_size=20))
    assert max(token for text in limited for token in text.generated) < 20


@pytest.mark.parametrize("length", [0, 48])
def test_a_prompt_that_cannot_be_continued_is_refused(length: int) -> None:
    model = SHAPES["gpt2-tied"]
    with pytest.raises(ValueError, match=f"prompt 0 has {length} tokens.* at most 47"):
        alone(model, GREEDY, limits_of(model), prompts=[[1] * length])


def test_loaded_models_keep_no_gradients() -> None:
    model = SHAPES["gpt2-tied"]

    def gradients(mesh: Mesh) -> list[object]:
        loaded = LoadedModel(make_config(model, mesh), mesh, as_drawn)
        parameters = [p for _, twins in loaded.assembly.layers() for twin in twins for p in twin.parameters()]
        return [(p.grad, p.requires_grad) for p in parameters]

    sizes = run_mesh({}, gradients, backend="threads")[0]
    assert sizes
    assert set(sizes) == {(None, False)}
