"""Stop strings against transformers' criterion, and against a search in the whole text after every token."""

from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from megapipe.data.tokenizers import Tokenizer, open_tokenizer
from megapipe.data.tokenizers.model_files import ByteTokenizer
from megapipe.inference.generation import NewText, StopStrings, generate
from megapipe.inference.trained_model import LoadedModel
from megapipe.parallel.mesh import Mesh
from tests.inference.test_generate import GREEDY, NEW, PROMPTS, SHAPES, alone, as_drawn, limits_of, make_config
from tests.support.meshes import run_mesh

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
    path: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
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


@pytest.mark.parametrize("sizes", [{}, {"pipeline": 2, "tensor": 2}], ids=str)
def test_a_text_ends_before_a_stop_string(sizes: dict[str, int]) -> None:
    model, tokenizer = SHAPES["gpt2-tied"], ByteTokenizer()
    whole = [text.decoded(tokenizer) for text in alone(model, GREEDY, limits_of(model))]
    stop = whole[0][6:8]  # of two tokens

    def stopped(mesh: Mesh) -> list[str]:
        limits = limits_of(model, stop=StopStrings((stop, "never"), tokenizer))
        texts = generate(LoadedModel(make_config(model, mesh), mesh, as_drawn), PROMPTS, 1, GREEDY, limits)
        assert len(texts[0].generated) < NEW
        return [text.decoded(tokenizer) for text in texts]

    expected = [
        text[: len(prompt)] + text[len(prompt) :].split(stop)[0] for text, prompt in zip(whole, PROMPTS, strict=True)
    ]
    assert expected[0] != whole[0]
    assert all(texts == expected for texts in run_mesh(sizes, stopped, backend="threads"))
