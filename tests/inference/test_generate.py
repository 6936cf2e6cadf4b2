"""Generation and scores: those of transformers, the same on every layout, and where texts end: a document's end, the
last position, and stop strings, compared with transformers' criterion and a search in the whole text."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

from megapipe.cli.trained_models import evaluate
from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.data.tokenizers import Tokenizer, open_tokenizer
from megapipe.data.tokenizers.model_files import ByteTokenizer
from megapipe.inference import evaluation, generation
from megapipe.inference.evaluation import score
from megapipe.inference.generation import Limits, NewText, StopStrings, Text, generate
from megapipe.inference.settings import SamplingSettings
from megapipe.inference.trained_model import LoadedModel
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from tests.data.commands import run_command
from tests.inference.test_generate_command import save_run
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


LONG = [[*range(3, 40)], [7, 5], [*range(40, 19, -1)], [*range(9, 34, 2)]]
"""Prompts longer than the window, together with prompts that end in earlier chunks."""
CHUNKS = [
    ("mistral", 1, PROMPTS),
    ("mistral", 4, LONG),
    *(pytest.param("gpt2", chunk, PROMPTS, marks=pytest.mark.exhaustive) for chunk in (1, 3)),
    *(pytest.param(name, 4, LONG, marks=pytest.mark.exhaustive) for name in ("gemma2", "gpt_oss")),
]


@pytest.mark.parametrize(("name", "chunk", "prompts"), CHUNKS)
def test_prompts_may_pass_in_chunks_of_any_size(
    name: str, chunk: int, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(name)
    monkeypatch.setattr(generation, "CHUNK", chunk)
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
    assert min(len(text.generated) for text in expected) < 8, "a stop string should end a text"
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


TEXTS = ["The cat sat on the mat.", "A dog ate 12 apples, naïvely.", "Two birds flew  over Köln — 東京!"]
LETTERS = "abeht .ïö東京"


@pytest.fixture(scope="module", params=["byte level", "words"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, object]:
    """A tokenizer of pieces of characters, or of whole characters, here and in transformers."""
    made = tokenizers.Tokenizer(models.BPE())
    alphabet: list[str] = []
    if request.param == "byte level":
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return open_tokenizer(str(path)), transformers.PreTrainedTokenizerFast(tokenizer_object=made)


STOPS = st.lists(
    st.sampled_from(["at", " the", "t.", ".", "ï", "東京", "京!", " — ", "  "]) | st.text(LETTERS, min_size=1),
    min_size=1,
    max_size=3,
)


@settings(max_examples=40)
@given(data=st.data(), strings=STOPS)
def test_texts_end_where_transformers_would_end_them(
    both: tuple[Tokenizer, object], data: st.DataObject, strings: list[str]
) -> None:
    tokenizer, theirs = both
    text = data.draw(st.sampled_from(TEXTS) | st.text(LETTERS, min_size=1, max_size=20))
    noise = data.draw(st.lists(st.integers(0, tokenizer.vocabulary_size - 1), max_size=6))
    prompt = tokenizer.encode("12")
    tokens = [*prompt, *tokenizer.encode(text), *noise]
    criterion = transformers.StopStringCriteria(theirs, strings)
    new = NewText(StopStrings(tuple(strings), tokenizer), prompt)
    known = len(tokenizer.decode(prompt))
    for end in range(len(prompt) + 1, len(tokens) + 1):
        whole = tokenizer.decode(tokens[:end])
        starts = [at for string in strings if (at := whole.find(string, known)) >= 0]
        cut = new.num_cut(tokens[:end])
        assert cut == (len(whole) - min(starts) if starts else 0)
        assert bool(criterion(torch.tensor([tokens[:end]]), None)) == (cut > 0)
        if cut:
            return


PAIRS = [([7], [9, 2, 2, 6, 8, 1]), ([1] * 30, [3, 9]), ([2, 3], list(range(1, 12))), ([4] * 9, [4])]


def their_scores(case: Case, pairs: list[tuple[list[int], list[int]]], longest: int) -> list[tuple[float, bool]]:
    scores = []
    for context, continuation in pairs:
        text = torch.tensor([*context, *continuation][-longest - 1 :])
        wanted = text[-len(continuation) :]
        with torch.no_grad():
            logits = case.theirs(text[None, :-1]).logits[0, -len(continuation) :]
        best = logits.log_softmax(-1).gather(-1, wanted[:, None]).sum()
        scores.append((float(best), bool((logits.argmax(-1) == wanted).all())))
    return scores


@pytest.mark.parametrize(("sizes", "chunk"), [({}, 256), ({"pipeline": 2, "tensor": 2}, 5)], ids=str)
def test_scores_equal_those_of_transformers(
    sizes: dict[str, int], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "CHUNK", chunk)
    case = case_of("mistral")
    model, weights = opened(case.theirs)
    model.max_positions = 24  # cuts one context
    likeliest = int(case.theirs(torch.tensor([[5, 1, 4]])).logits[0, -1].argmax())
    pairs = [([5, 1, 4], [likeliest]), *PAIRS]
    expected = their_scores(case, pairs, 24)

    def run(mesh: Mesh) -> list[tuple[float, bool]]:
        loaded = LoadedModel(make_config(model, mesh), mesh, filled_with(weights))
        return score(loaded, pairs, batch_size=3)

    for scores in run_mesh(sizes, run, backend="threads"):
        assert [number for number, _ in scores] == pytest.approx([number for number, _ in expected], abs=1e-4)
        assert [greedy for _, greedy in scores] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in expected} == {True, False}


def test_tasks_without_lm_eval_name_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("lm_eval.")]:
        monkeypatch.delitem(sys.modules, name)  # of other tests, where it is installed
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    words = ["--checkpoint", save_run(tmp_path, ""), "--tokenizer", "bytes", "--device", "cpu", "--tasks", "t"]
    message = "--tasks needs lm-eval, but lm_eval is not installed: pip install '.[evaluation]' in megapipe's folder"
    assert message in run_command(evaluate, *words, status=2).err
