"""`--help` has complete headings, plain types and defaults; options of other programs are answered with the field."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from megapipe.config.bert import BertPretrainConfig
from megapipe.config.errors import ConfigError
from megapipe.config.load import build_parser, parse
from megapipe.config.other_names import OTHER_NAMES
from megapipe.config.run import PretrainConfig
from megapipe.planner.command.main import main as plan
from megapipe.schedules import GENERATORS

ROOT = Path(__file__).resolve().parents[2]
TABLE = [(name, target) for targets in OTHER_NAMES.values() for name, target in targets.items()]


def options(kind: type[PretrainConfig]) -> dict[str, Any]:
    """Return every option of a run's parser, by name."""
    return {action.dest: action for action in build_parser("", kind)._actions}


@pytest.mark.parametrize("kind", [PretrainConfig, BertPretrainConfig])
def test_help_has_whole_headings_and_plain_types(kind: type[PretrainConfig]) -> None:
    text = build_parser("", kind).format_help()
    for leak in ("<class", "type: ", "Literal[", "Union[", "Optional[", "``", "None", "configuration file."):
        assert leak not in text
    for group in fields(kind):
        if is_dataclass(group.default_factory):
            first = (group.default_factory.__doc__ or "").partition("\n")[0]
            assert first.endswith("."), f"{group.name}: the heading in --help is the docstring's first line"
            assert f"\n{first[:-1]}:\n" in text


@pytest.mark.parametrize("kind", [PretrainConfig, BertPretrainConfig])
def test_every_field_is_explained_and_null_too(kind: type[PretrainConfig]) -> None:
    for name, action in options(kind).items():
        if "." in name and action.metavar != "FILE":
            assert (action.help or "").endswith("."), f"{name}: {action.help!r} is not a sentence"
        if "." in name and action.default is None:
            assert re.search(r"\bnull\b", action.help), f"{name}: what does null mean?"


def test_tools_print_no_markup_and_no_classes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan(["search", "--help"], {})
    assert "<class" not in capsys.readouterr().out
    assert not any("``" in generator.summary for generator in GENERATORS.values())


def test_other_programs_options_name_a_field_that_takes_the_value() -> None:
    known, values = options(PretrainConfig), []
    for name, target in TABLE:
        field, _, value = target.partition(" ")
        assert field in known, f"{name}: {field} is not an option"
        assert name not in {each.rpartition(".")[2] for each in known}, f"{name} is a field here, too"
        values += [f"--{field}={value}"] if value else []
    parse(values)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--tensor-model-parallel-size", "2"],
            ["Megatron-LM's tensor_model_parallel_size is --parallel.tensor here"],
        ),
        (["--model.n_embd=64"], ["nanoGPT's n_embd is --model.hidden_size here"]),
        (["--n_embd=64", "--bf16"], ["--model.hidden_size here", "--training.precision bf16 here"]),
        (["--num-layers", "2"], ["did you mean 'model.num_layers'?"]),
        (["--training.learning_rate", "2"], ["did you mean 'optimizer.learning_rate'?"]),
        (["--config", "examples/models/llama3_8b.yaml"], ["pass a file of this group as --model FILE"]),
        (["--model", "examples/gpt_tiny.yaml"], ["whole groups: pass it as --config FILE"]),
    ],
)
def test_a_wrong_option_gets_the_right_one(
    arguments: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as caught:
        parse(arguments)
    for problem, hint in zip(caught.value.problems, expected, strict=True):
        assert hint in problem
