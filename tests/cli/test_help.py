"""`megapipe help` explains every option in plain words, and knows the commands."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from functools import cache

import pytest

from megapipe.cli import help as help_command
from megapipe.cli.help import VARIABLES, explained
from megapipe.cli.main import main, overview
from megapipe.cli.train import parser_of
from megapipe.config.bert import BertPretrainConfig
from tests.support.commands import ROOT

LEAKS = re.compile(r"<class|Literal|Union|Optional|NoneType|\bNone\b|\bTrue\b|\bint\b|\bstr\b|functools|==SUPPRESS==")
WIDTH = 80


built = cache(parser_of)


def facts(word: str) -> dict[str, str]:
    """Return the rows that explain an option, by topic."""
    rows: dict[str, str] = {}
    topic = ""
    for line in explained(word)[2:]:
        if line.startswith("  ") and not rows:
            continue
        topic = line[:13].strip() or topic
        rows[topic] = f"{rows.get(topic, '')} {line[13:]}".strip()
    return rows


@pytest.fixture(autouse=True)
def one_parser_per_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building a parser takes most of the time of an explanation."""
    monkeypatch.setattr(help_command, "parser_of", built)


def test_help_of_fields_lists_values_default_setters_pages() -> None:
    rows = facts("parallel.tensor")
    assert explained("tensor") == explained("--parallel.tensor")
    assert rows["value"] == "a whole number of at least 1"
    assert rows["default"] == "1"
    assert "--config three_d (2)" in rows["set by"]
    assert rows["also called"].startswith("tensor_model_parallel_size (Megatron-LM)")
    assert "docs/parallelism.md" in rows["pages"]
    assert "parallel.sequence" in rows["related"]
    assert facts("checkpoint.every")["value"] == "a whole number of at least 1, auto, none, or null"
    assert facts("checkpoint.every")["related"].startswith("checkpoint.every_minutes, checkpoint.max_overhead")
    assert facts("model.vocabulary_size")["default"] == "50257; 30522 for BERT runs"
    assert facts("data.pairs")["only for"] == "BERT runs"
    assert "llama3_8b" in facts("--model")["packaged"]
    for name in ("recompute.hardware", "--plan"):
        assert re.fullmatch("a100-40, .*; docs/hardware.md lists them, and describes files", facts(name)["presets"])


@pytest.mark.slow
def test_every_option_is_explained_in_plain_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    for action in built(BertPretrainConfig)._actions:
        lines = explained(action.option_strings[0])
        assert lines[0].startswith(action.option_strings[0])
        assert not LEAKS.search("\n".join(lines[1:])), lines
        assert all(len(line) <= WIDTH for line in lines[1:]), lines
        if "." in action.dest and action.metavar != "FILE":
            assert {"value", "default"} <= set(facts(action.dest)), lines


def test_named_variables_are_read_by_the_code() -> None:
    sources = "".join(path.read_text() for path in [*ROOT.glob("megapipe/**/*.py"), *ROOT.glob("kernels/*.py")])
    named = {name for text in VARIABLES.values() for name in re.findall(r"[A-Z]+_[A-Z_]+", text)}
    assert len(named) > 5
    assert {name for name in named if f'"{name}"' not in sources} <= {"CUDA_VISIBLE_DEVICES"}  # read by torch


def test_commands_are_explained_by_their_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    assert capsys.readouterr().out == f"{overview()}\n"
    for words in (["help", "plan"], ["help", "plan", "search"], ["help", "fill_mask"], ["help", "help"]):
        with contextlib.suppress(SystemExit):  # with status 0, as the output shows
            assert main(words) == 0
        assert capsys.readouterr().out.startswith(f"usage: megapipe {' '.join(words[1:]).replace('_', '-')} ")


def test_help_ends_quietly_without_a_reader() -> None:
    for words in (["train", "--help"], ["help", "model.num_layers"]):
        read, write = os.pipe()
        os.close(read)
        command = [sys.executable, "-m", "megapipe", *words]
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        os.close(write)
        assert done.returncode in (0, 128 + signal.SIGPIPE)  # 0 where argparse hides the error
        assert done.stderr == ""
