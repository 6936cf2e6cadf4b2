"""The README's commands run as they are written, and its links lead to existing files and headings."""

import io
import re
import shutil
import tokenize
from pathlib import Path

import pytest

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


def short_quickstarts(folder: str) -> dict[str, str]:
    """The environment in which both quickstarts take a few steps in a folder of their own."""
    found = {f"{kind}QUICKSTART_STEPS": "6" for kind in ("", "BERT_")}
    return {**found, "QUICKSTART_FOLDER": folder, "BERT_QUICKSTART_FOLDER": f"{folder}/bert"}


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
def test_the_quickstart_ends_below_the_stated_loss_and_writes_python(tmp_path: Path) -> None:
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
def test_the_bert_quickstart_leaves_the_unigram_entropy_far_behind(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)\)", TEXT))))
def test_links_lead_to_files(target: str) -> None:
    assert (ROOT / target).exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)]+#[^)]+)\)", TEXT))))
def test_links_into_a_page_lead_to_a_heading(target: str) -> None:
    file, _, anchor = target.partition("#")
    headings = re.findall(r"^#+ (.*)$", (ROOT / file if file else ROOT / "README.md").read_text(), re.MULTILINE)
    assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_stated_figures_are_those_of_the_pages_that_they_come_from() -> None:
    """Of the cost model's errors, the table of layouts, the stall of a save and the speed beside peers."""
    pages = {name: (ROOT / name).read_text() for name in ("docs/cost_model.md", "docs/checkpoints.md")}
    unfitted = re.findall(r"\| ([+-]\d+\.\d)% \|[^|]*\| not fitted \|", pages["docs/cost_model.md"])
    assert len(unfitted) == 5
    assert f"not fitted to are within {max(abs(float(each)) for each in unfitted)}%" in TEXT
    layouts = (ROOT / "docs/parallelism.md").read_text().partition("<!-- layouts: begin -->")[2]
    assert f"{len(re.findall(r'^[|] [0-9]', layouts, re.MULTILINE))} layouts, run by a test" in TEXT
    stall = re.findall(r"megapipe, asynchronous \| [\d.]+ s \| ([\d.]+) ", pages["docs/checkpoints.md"])
    assert f"for {stall[0]} times as long as a copy" in TEXT
    figures = (ROOT / "benchmarks/results/cpu.md").read_text()
    ratio = re.findall(r"megapipe over the best peer, median of the rounds' ratios: \*\*([\d.]+)\*\*", figures)
    assert f"{float(ratio[0]):.2f} times the speed of the faster of plain torch and transformers" in TEXT
    engine = figures.partition("## Pipeline engine")[2].partition("\n## ")[0]
    losses = []
    for table in engine.split("\n\n"):
        rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
        if rows and "of torch" in rows[0]:
            losses += [float(row[rows[0].index("of torch")]) for row in rows[2:]]
    assert len(losses) > 40
    assert f"{min(losses)} to {max(losses)} of the time that torch.distributed.pipelining loses" in TEXT


def test_no_absolute_paths_or_machine_names() -> None:
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work)/", TEXT)
