"""Recipes can start and fit their GPUs; the commands of their page are accepted."""

import re
from typing import Any

import pytest

from megapipe.cli.main import plan
from megapipe.cli.trained_models import evaluate_parser, fill_mask_parser, generate_parser
from megapipe.config.command_line import with_hyphens
from megapipe.config.load import kind_of, parse_as
from megapipe.data.preprocess.command import build_parser as preprocess_parser
from megapipe.planner.command.main import parse_request
from tests.docs.figures.recipes import PAGE, commands

pytestmark = pytest.mark.slow
NAMES = sorted(path.stem for path in PAGE.parent.glob("*.yaml"))
TRAINING = commands("megapipe train")
PUBLISHED = {"gpt2_124m": "2.85", "gpt2_124m_2bw": "2.85", "llama_1b": "2.745", "bert_base": "1.384"}


def section(name: str) -> str:
    return PAGE.read_text(encoding="utf-8").partition(f"\n## {name}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("words", commands("megapipe plan predict"), ids=lambda words: " ".join(words))
def test_a_recipe_passes_a_dry_run_on_its_gpus(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    place = words.index("--config")
    others = [word for number, word in enumerate(words) if number not in (place, place + 1)]
    assert plan(["dry-run", words[place + 1], *others]) == 0, capsys.readouterr().err
    assert "8 ranks checked in one process" in capsys.readouterr().out


def test_recipes_have_target_source_data_and_commands() -> None:
    assert set(NAMES) == set(PUBLISHED)
    for name in NAMES:
        text = section(name)
        assert f"**{PUBLISHED[name]}**" in text
        assert re.search(r"arXiv \d{4}\.\d{5}|nanoGPT's README", text)
        assert any(f"recipes/{name}" in words for words in TRAINING), name
        assert any(f"recipes/{name}" in words for words in commands("megapipe plan predict")), name
        assert "Not yet trained here" in (PAGE.parent / f"{name}.yaml").read_text()


def test_predictions_are_of_the_training_commands() -> None:
    """The same files and fields, except those that have no effect on time and memory."""
    assert len(TRAINING) == len(commands("megapipe plan predict"))
    for trained, predicted in zip(TRAINING, commands("megapipe plan predict"), strict=True):
        assert trained[:2] == ["-n", str(parse_request("predict", predicted).devices())]
        config = parse_as(kind_of(trained[2:]), trained[2:])
        config.checkpoint.accept_other_data = False
        assert config == parse_request("predict", predicted).config


def test_data_commands_make_the_shards_that_the_recipes_read() -> None:
    made = set()
    for words in commands("megapipe preprocess"):
        given: Any = preprocess_parser().parse_args(with_hyphens(words))
        ending = "text_sentence" if given.split_sentences else "text_document"
        made.add(f"{given.output_prefix}_{ending}")
        hub = [source for source in given.input if source.startswith("dataset:")]
        assert not hub or re.fullmatch("[0-9a-f]{40}", given.dataset_revision)
    for words in TRAINING:
        assert parse_as(kind_of(words[2:]), words[2:]).data.prefix in made
    for words in commands("hf download"):
        assert re.fullmatch("[0-9a-f]{40}", words[words.index("--revision") + 1])


def test_the_other_commands_are_accepted() -> None:
    runs = {parse_as(kind_of(words[2:]), words[2:]).training.directory for words in TRAINING}
    parsers = {"generate": generate_parser, "evaluate": evaluate_parser, "fill-mask": fill_mask_parser}
    for name, parser in parsers.items():
        (words,) = commands(f"megapipe {name}")
        assert str(parser().parse_args(with_hyphens(words)).checkpoint) in runs
    assert set(commands("megapipe runs compare")[0]) <= runs
