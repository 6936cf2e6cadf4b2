"""The README's commands run as they are written."""

import io
import re
import shutil
import tokenize
from pathlib import Path

import pytest

from megapipe.schedules.registry import GENERATORS
from tests.support.commands import ROOT, command_lines, run

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
OWN_TEXT = TEXT.partition("### Your own text\n")[2].partition("\n### ")[0]
"""The commands of a newcomer. A test of the installed wheel runs them too."""
COMMANDS = command_lines(TEXT.replace(OWN_TEXT, ""))
TRAINING = [command for command in COMMANDS if command.startswith("megapipe train ")]
QUICK = [command for command in COMMANDS if command not in TRAINING and not command.startswith("make test")]
STATED_LOSS = {"bf16": 5.1, "fp32": 5.5}
BERT_MARGIN = 1.0
"""Nats between the unigram entropy and the held-out loss of hidden tokens."""


def test_the_commands_were_found() -> None:
    assert "make quickstart" in COMMANDS
    assert "make quickstart-bert" in COMMANDS
    assert "make test" in COMMANDS  # this very run
    assert len(TRAINING) == 3


def test_the_number_of_schedules_is_that_of_the_names() -> None:
    listed = TEXT.partition("Choose one by name (")[2].partition(")")[0]
    names = set(re.findall("`([^`]+)`", listed))
    trainable = {name for name, each in GENERATORS.items() if len(each.placed(2, {}).routes) == 1}
    assert names == trainable
    assert len(names) == 17
    assert TEXT.lower().count("seventeen") == 2


def short_quickstarts(folder: str) -> dict[str, str]:
    """The environment in which both quickstarts take a few steps in a folder of their own."""
    variables = {f"{kind}QUICKSTART_STEPS": "6" for kind in ("", "BERT_")}
    return {**variables, "QUICKSTART_FOLDER": folder, "BERT_QUICKSTART_FOLDER": f"{folder}/bert"}


@pytest.mark.slow
def test_every_command_runs() -> None:
    """In the README's order, since later ones read what earlier ones wrote; shorter, and in a folder of its own.

    A reader's own quickstart would go on from what is left in runs/quickstart.
    """
    folder = "runs/readme"
    shutil.rmtree(ROOT / folder, ignore_errors=True)
    for written in COMMANDS:
        command = written.replace("runs/quickstart", folder)
        for name in ("2bw", "bert", "pipeline", "gpt_tiny"):
            command = command.replace(f"runs/{name}", f"{folder}/{name}")
        if written in QUICK:
            run(command, 300, **short_quickstarts(folder))
        elif written in TRAINING:
            if "--training.directory" not in command:
                command += f" --training.directory {folder}/gpt_tiny"
            output = run(f"{command} --training.steps 6", 180)
            assert "step 6/6" in output
    shutil.rmtree(ROOT / folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", TRAINING)
def test_training_commands_run_as_written_and_learn(command: str, tmp_path: Path) -> None:
    """But for the folders that they write to: other tests run the same commands at the same time."""
    margin = 0.5
    if "runs/quickstart" in command:
        # A model of its own, which 100 steps of stale gradients bring less far than 200 steps bring the byte model.
        margin = 0.0
        run("make quickstart", 300, QUICKSTART_STEPS="6", QUICKSTART_FOLDER=str(tmp_path))
        command = command.replace("runs/quickstart", str(tmp_path)).replace("runs/2bw", str(tmp_path / "2bw"))
    else:
        run(COMMANDS[COMMANDS.index(TRAINING[0]) - 1].replace("data/stdlib", f"{tmp_path}/stdlib"), 240)
        command += f" --data.prefix {tmp_path}/stdlib_text_document --training.directory {tmp_path}/run"
    output = run(command, 900)
    unigram = float(re.findall(r"unigram entropy (\d+\.\d+)", output)[0])
    losses = [float(loss) for loss in re.findall(r"\| loss (\d+\.\d+)", output)]
    assert losses[-1] < unigram - margin
    if "runs/quickstart" not in command and str(tmp_path / "2bw") not in command:
        sample = run(f"megapipe generate --checkpoint {tmp_path}/run --prompt 'def ' --max-new-tokens 32", 120)
        assert "def " in sample


def is_tokenized(line: str) -> bool:
    """Whether Python's tokenizer reads the line by itself."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline))
    except (tokenize.TokenError, SyntaxError):
        return False
    return all(token.type != tokenize.ERRORTOKEN for token in tokens)


@pytest.mark.slow
@pytest.mark.longest
def test_the_quickstart_reaches_its_loss_and_writes_python(tmp_path: Path) -> None:
    output = run("make quickstart", 1500, QUICKSTART_FOLDER=str(tmp_path))
    precision = re.findall(r"faster precision on this machine is (\w+)", output)[0]
    held_out = [float(loss) for loss in re.findall(r"validation loss (\d+\.\d+)", output)]
    assert held_out[-1] < STATED_LOSS[precision]
    sample = output.split("--- prompt 1", 1)[1].rsplit("6/6", 1)[0]
    lines = [line for line in sample.splitlines()[1:] if line.strip() and not line.startswith(("---", "\033"))]
    assert len(lines) >= 10
    assert sum(map(is_tokenized, lines)) >= len(lines) / 2
    last_text = re.split(r"left out: .*\n", output)[1].partition("\033")[0]
    assert len(set(re.findall(r"[A-Za-z]{2,}", last_text))) >= 5
    likeliest = f"megapipe generate --checkpoint {tmp_path} --prompt 'def ' --max-new-tokens 48 --temperature 0"
    exported = f"python examples/generate_with_transformers.py {tmp_path / 'exported'} 'def ' 0"
    assert run(likeliest, 120) == run(exported, 120)


@pytest.mark.exhaustive
@pytest.mark.longest
def test_the_bert_quickstart_beats_the_unigram_entropy_clearly(tmp_path: Path) -> None:
    output = run("make quickstart-bert", 1500, BERT_QUICKSTART_FOLDER=str(tmp_path))
    unigram = float(re.findall(r"unigram entropy (\d+\.\d+)", output)[0])
    evaluations = re.findall(
        r"validation loss .*\(mlm (\d+\.\d+), nsp .* mlm accuracy (\d+\.\d)%, nsp accuracy", output
    )
    held_out, accuracy = (float(each) for each in evaluations[-1])
    assert held_out < unigram - BERT_MARGIN
    assert accuracy > 25
    gaps = re.findall(r"^  gap 1: (.*)$", output, re.MULTILINE)
    assert len(gaps) == 3
    assert "self" in gaps[0]


def test_no_absolute_paths_or_machine_names() -> None:
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work)/", TEXT)
