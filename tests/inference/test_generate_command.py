"""`megapipe generate` as users run it: whole, under torchrun, and with every kind of wrong input."""

import itertools
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megapipe.checkpoint import RunState, save
from megapipe.cli import trained_models
from megapipe.cli.trained_models import evaluate
from megapipe.cli.trained_models import generate as main
from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.data.preprocess.command import main as preprocess_main
from megapipe.parallel.groups import CommunicationError
from megapipe.parallel.launch import initialize
from megapipe.training.loop.replica import Replica
from megapipe.training.resilience.signals import ExitCode
from tests.data.commands import Printed, preprocess, run_command
from tests.support.launch import ROOT, environment

MODEL = ModelConfig(vocabulary_size=257, num_layers=2, hidden_size=32, num_heads=4, max_positions=32, init_std=0.3)
ALWAYS = ("--device", "cpu", "--max-new-tokens", "12")

Generate = Callable[..., Printed]


def save_step(folder: Path, config: PretrainConfig) -> Replica:
    """Save one checkpoint, of step 7, in a run's folder; return what was saved."""
    config.parallel = replace(config.parallel, data=1)
    mesh = initialize({}, "cpu")
    replica = Replica(config, mesh)
    run = RunState(7, 56, {"seed": config.training.seed}, "fp32", (), asdict(config))
    save(folder / "checkpoints", replica.states(), {}, run, mesh)
    return replica


def save_run(folder: Path, prefix: str, model: ModelConfig = MODEL) -> Path:
    config = PretrainConfig(model=model)
    config.data = replace(config.data, prefix=prefix, sequence_length=model.max_positions)
    save_step(folder, config)
    return folder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained on a shard of bytes, which is in the same folder."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("some text")
    preprocess("--input", folder / "text.txt", "--append-eod", "--output-prefix", folder / "corpus")
    return save_run(folder, str(folder / "corpus_text_document"))


@pytest.fixture
def generate(run_folder: Path) -> Generate:
    def run(*words: object, checkpoint: Path = run_folder, status: int = 0) -> Printed:
        return run_command(main, "--checkpoint", checkpoint, *ALWAYS, *words, status=status)

    return run


@pytest.mark.parametrize("prompt", ["import ", ""])
def test_one_prompt_prints_its_text_alone(generate: Generate, run_folder: Path, prompt: str) -> None:
    """An empty prompt starts a document."""
    output, messages = generate("--prompt", prompt)
    assert output.startswith(prompt)
    assert len(output) > len(f"{prompt}\n")
    assert f"{run_folder}/checkpoints/step-00000007 (step 7), tokenizer bytes" in messages


def test_a_slow_generation_shows_its_progress(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "generating" not in generate("--prompt", "import ").err
    monkeypatch.setattr("megapipe.config.command_line.time.monotonic", itertools.count(step=11).__next__)
    output, messages = generate("--prompt", "import ", "--num-samples", 2)
    counts = [int(count) for count in re.findall(r"^generating: (\d+) of 24 tokens, .*/s$", messages, re.MULTILINE)]
    assert counts[0] == 2
    assert counts == sorted(counts)
    assert "generating" not in output


def test_several_texts_have_headings(generate: Generate, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("two\nlines\n", "utf-8-sig")  # with a byte order mark, as on Windows
    output, _ = generate("--prompt", "a", "--prompt-file", tmp_path / "prompt.txt", "--num-samples", 2)
    pieces = output.split("--- prompt ")[1:]
    headings, texts = zip(*(piece.split(" ---\n", 1) for piece in pieces), strict=True)
    assert headings == ("1, sample 1", "1, sample 2", "2, sample 1", "2, sample 2")
    assert texts[2].startswith("two\nlines")
    assert texts[0] != texts[1]


def test_a_step_folder_gives_what_its_run_gives(generate: Generate, run_folder: Path) -> None:
    folders = (run_folder, run_folder / "checkpoints", run_folder / "checkpoints/step-00000007")
    assert len({generate("--prompt", "x", checkpoint=folder).out for folder in folders}) == 1


def test_settings_reach_the_text(generate: Generate) -> None:
    settings = ("", "--seed 1", "--temperature 0", "--top_k 3", "--top-p 0.3", "--max-new-tokens 3", "--min-p 0.5")
    texts = {generate("--prompt", "x", *words.split()).out for words in (*settings, "--repetition-penalty 1.5")}
    assert len(texts) == 8


def test_stop_strings_end_a_text_before_them(generate: Generate) -> None:
    words = ["--prompt", "import ", "--temperature", 0]
    whole = generate(*words).out.removesuffix("\n")
    stop = whole[len("import ") + 4]
    expected = whole[: whole.index(stop, len("import "))] + "\n"
    assert generate(*words, "--stop", "never", "--stop", stop).out == expected


@pytest.mark.slow
@pytest.mark.parametrize("layout", [[], ["--tensor", "2"]], ids=["pipeline", "tensor"])
def test_torchrun_gives_the_text_of_one_process(generate: Generate, run_folder: Path, layout: list[str]) -> None:
    prompts = ["--prompt", "import ", "--prompt", "def", "--seed", "5"]
    program = [str(ROOT / "tools/generate.py"), "--checkpoint", str(run_folder), *ALWAYS, *prompts, *layout]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *program]
    finished = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == generate(*prompts).out


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["nothing to generate", "--prompt"]),
        (["--prompt", "x" * 32], ["prompt 1 has 32 tokens", "32 positions", "at most 31"]),
        (["--prompt", "\udcff"], ["prompt 1 is not UTF-8"]),
        (["--prompt-file", "no-such-file"], ["no-such-file", "No such file", "choose a UTF-8 text file"]),
        (["--prompt", "x", "--tokenizer", "no-such-tokenizer"], ["no tokenizer 'no-such-tokenizer'"]),
        (["--prompt", "x", "--temperature", "-1", "--top-p", "2"], ["temperature is -1.0", "top-p is 2.0"]),
        (["--prompt", "x", "--min-p", "2"], ["min-p is 2.0", "at most 1"]),
        (["--prompt", "x", "--stop", "a", "--stop", ""], ["stop string 2 is ''", "at least one character"]),
    ],
)
def test_a_wrong_input_names_value_and_rule(generate: Generate, words: list[str], parts: list[str]) -> None:
    output, messages = generate(*words, status=2)
    assert output == ""
    for part in parts:
        assert part in messages


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (main, ["--prompt", "x", "--pipeline", "2"]),
        (evaluate, ["--tensor", "2"]),
        (evaluate, ["--tensor", "2", "--tasks", "t"]),
    ],
)
def test_a_layout_of_other_ranks_is_refused_before_the_checkpoint_is_read(
    command: Callable[[Sequence[str]], int], words: list[str], tmp_path: Path
) -> None:
    messages = run_command(command, "--checkpoint", tmp_path, *words, status=2).err
    assert "2 ranks, but the launcher started 1: start torchrun with --nproc_per_node 2" in messages


@pytest.mark.parametrize(
    ("ranks", "flag", "part"),
    [
        (
            "3",
            "--tensor",
            "num_heads 4 is not divisible by parallel.tensor 3; tensor sizes that divide this model: 1, 2, 4",
        ),
        ("9", "--pipeline", "9 pipeline ranks exceed the 4 layers"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused(
    generate: Generate, monkeypatch: pytest.MonkeyPatch, ranks: str, flag: str, part: str
) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": ranks, "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert part in generate("--prompt", "x", flag, ranks, status=2).err


def test_a_folder_without_checkpoints_is_reported(generate: Generate, tmp_path: Path) -> None:
    for folder, message in (
        (tmp_path, f"no complete checkpoint in {tmp_path}"),
        (tmp_path / "absent", f"{tmp_path}/absent is not a folder"),
    ):
        assert message in generate("--prompt", "x", checkpoint=folder, status=2).err


def test_a_tokenizer_must_be_known_and_fit(generate: Generate, tmp_path: Path) -> None:
    folder = save_run(tmp_path, "no-such-shard", replace(MODEL, vocabulary_size=100))
    messages = generate("--prompt", "x", checkpoint=folder, status=2).err
    assert "no-such-shard" in messages
    assert "--tokenizer" in messages
    messages = generate("--prompt", "x", "--tokenizer", "bytes", checkpoint=folder, status=2).err
    assert "prompt 1 has token 120 but the model's vocabulary is 100" in messages


@pytest.mark.exhaustive
def test_a_tokenizer_that_is_gone_is_named(generate: Generate, tmp_path: Path) -> None:
    words = ["--input", ROOT / "megapipe/config", "--include", "*.py"]
    here, there = tmp_path / "t.json", tmp_path / "moved.json"
    train = ["train-tokenizer", *words, "--type", "byte-level-bpe", "--vocabulary-size", 257, "--output", here]
    run_command(preprocess_main, *train)
    prefix = str(tmp_path / "corpus")
    preprocess(*words, "--tokenizer", here, "--output-prefix", prefix)
    here.rename(there)
    folder = save_run(tmp_path, f"{prefix}_text_document")
    generate("--prompt", "x", checkpoint=folder)  # from the copy next to the shard
    shutil.rmtree(f"{prefix}_text_document.tokenizer")
    messages = generate("--prompt", "x", checkpoint=folder, status=2).err
    assert str(here) in messages
    assert "--tokenizer" in messages
    generate("--prompt", "x", "--tokenizer", there, checkpoint=folder)


def test_a_lost_peer_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose(arguments: object) -> None:
        raise CommunicationError("rank 1 does not answer")

    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(trained_models, "_generate", lose)
    assert trained_models.generate(["--checkpoint", str(tmp_path), "--prompt", "a"]) == ExitCode.PEER_LOST
    assert capsys.readouterr().err == "rank 1 does not answer\n"
