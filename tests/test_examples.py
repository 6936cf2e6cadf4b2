"""Every example can be used as it is: models have the parameters they claim, launch lines pass the checks of a run."""

import functools
import itertools
import os
import re
import runpy
import shlex
import shutil
import subprocess
from operator import attrgetter
from pathlib import Path

import pytest
import torch

from megapipe.config.bert import BertPretrainConfig
from megapipe.config.load import kind_of, parse, parse_as
from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.planner.command.planning import layout_text
from megapipe.planner.recompute import peak_bytes
from megapipe.spec.family import exporting_family
from megapipe.spec.layers import model_layers
from megapipe.training.validation import validate

ROOT = Path(__file__).resolve().parents[1]
MODELS = sorted((ROOT / "examples/models").glob("*.yaml"))
LAUNCHES = sorted((ROOT / "examples/launch").iterdir())
RUNS = sorted((ROOT / "examples").glob("*.yaml"))
PARALLEL = sorted((ROOT / "examples/parallel").glob("*.yaml"))
RECIPES = sorted((ROOT / "examples/recipes").glob("*.yaml"))

UNITS = {"M": 10**6, "B": 10**9}
GPU_BYTES = 80 * 10**9

# Stand-ins that record a launcher's arguments instead of starting anything.
STAND_INS = {
    "megapipe": 'printf "%s\\n" "$@" > "$RECORD"',
    "srun": 'while [[ "$1" == -* ]]; do shift; done; exec "$@"',
    "scontrol": "printf 'node0\\nnode1\\n'",
}


@functools.cache
def model_of(path: Path) -> ModelConfig:
    return parse_as(kind_of(["--model", str(path)]), ["--model", str(path)]).model


def parameter_count(model: ModelConfig) -> int:
    layers = model_layers(model)
    return sum({s.name: s.num_elements for layer in layers for s in layer.parameters.values()}.values())


def test_the_kind_of_every_example_follows_from_its_fields() -> None:
    for flag, paths in (("--model", MODELS), ("--config", [*RUNS, *PARALLEL, *RECIPES])):
        for path in paths:
            assert (kind_of([flag, str(path)]) is BertPretrainConfig) == ("bert" in path.name), path


@pytest.mark.parametrize("path", MODELS, ids=attrgetter("name"))
def test_a_model_has_the_parameters_that_it_claims(path: Path) -> None:
    claim = re.search(r"^# Parameters: ([\d,]+)(?: \(published: ([\d.,]+)([MB]?)\))?$", path.read_text(), re.MULTILINE)
    assert claim, "the file states no count"
    model = model_of(path)
    assert model.problems() == []
    count = parameter_count(model)
    assert count == int(claim[1].replace(",", ""))
    if claim[2] is None:
        return
    published = float(claim[2].replace(",", ""))
    if not claim[3]:
        assert count == published
        return
    # A size such as 13B is rounded to its last digit, and models are named more loosely than that: 350M has 356M.
    unit = UNITS[claim[3]]
    last_digit = 10.0 ** -len(claim[2].partition(".")[2])
    assert abs(count / unit - published) <= max(last_digit / 2, 0.02 * published)


@pytest.mark.slow
@pytest.mark.one_in(5)
@pytest.mark.parametrize("path", MODELS, ids=attrgetter("name"))
def test_a_model_has_the_parameters_of_transformers(path: Path) -> None:
    """Compare with the model that transformers builds from our config.json, on the meta device."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `hf`)")
    model = model_of(path)
    family, differences = exporting_family(model)
    assert not differences
    config = transformers.AutoConfig.for_model(**family.config(model))
    encoder = "PreTraining" if getattr(model, "sentence_head", False) else "MaskedLM"
    kind = getattr(transformers, f"AutoModelFor{'CausalLM' if model.kind == 'gpt' else encoder}")
    with torch.device("meta"):
        theirs = kind.from_config(config)
    theirs.tie_weights()
    # Biases of a router follow the load of experts: parameters here, buffers there.
    biases = [each for name, each in theirs.named_buffers() if name.endswith("e_score_correction_bias")]
    assert sum(each.numel() for each in (*theirs.parameters(), *biases)) == parameter_count(model)


def launched(script: Path, folder: Path) -> tuple[int, int, PretrainConfig]:
    """Run the script with stand-ins for the launchers, as its comment says.

    Return the nodes, the processes per node and the configuration that it would start.
    """
    for name, body in STAND_INS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    nodes = re.search(r"^#SBATCH --nodes=(\d+)$", script.read_text(), re.MULTILINE)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "RECORD": str(folder / "record"),
        "HEAD_NODE": "node0",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": nodes[1] if nodes else "1",
    }
    subprocess.run(["bash", str(script), "--training.seed", "7"], env=environment, cwd=folder, check=True, timeout=60)
    words = (folder / "record").read_text().splitlines()
    assert words[:3] == ["train", "-n", "8"]
    launcher = dict(itertools.pairwise(words[: words.index("--model")]))
    config = parse(words[words.index("--model") :])
    return int(launcher.get("--nodes", nodes[1] if nodes else "1")), int(launcher["-n"]), config


@pytest.mark.parametrize("script", LAUNCHES, ids=attrgetter("name"))
def test_a_launch_script_starts_what_its_comment_says(script: Path, tmp_path: Path) -> None:
    """The exact peak of the fullest rank leaves a twentieth of the GPU."""
    nodes, processes, config = launched(script, tmp_path)
    validate(config, nodes * processes)
    assert config.training.seed == 7, "what the user adds to the command line does not arrive"
    comment = re.sub(r"\s+# ?", " ", script.read_text())
    assert f"on {'one node' if nodes == 1 else f'{nodes} nodes'} of {processes} A100 of 80 GB" in comment
    assert f"{layout_text(config)}. Predicted:" in comment
    assert peak_bytes(config, "cuda") < 0.95 * GPU_BYTES


@pytest.mark.parametrize("script", LAUNCHES, ids=attrgetter("name"))
def test_launch_scripts_pass_shellcheck(script: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", str(script)], check=True, timeout=60)


@pytest.mark.parametrize("path", RUNS, ids=attrgetter("name"))
@pytest.mark.parametrize("pipeline", [1, 2])
def test_runs_can_start_on_one_or_two_ranks(path: Path, pipeline: int) -> None:
    words = ["--config", str(path), "--parallel.pipeline", str(pipeline)]
    config = parse_as(kind_of(words), words)
    validate(config, pipeline)


@pytest.mark.parametrize("path", PARALLEL, ids=attrgetter("name"))
def test_a_parallel_example_starts_as_its_comment_says(path: Path) -> None:
    comment = re.sub(r"\\\n# *", " ", path.read_text())
    line = re.search(r"^#\s+megapipe train -n (\d+) (.*)$", comment, re.MULTILINE)
    assert line, "the file states no launch line"
    words = shlex.split(line[2])
    assert path.stem in words
    validate(parse_as(kind_of(words), words), int(line[1]))


@pytest.mark.slow
def test_generate_with_transformers_samples_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The most likely continuation of a small model repeats itself; a sample of the same seed is always the same."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `hf`)")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(200)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(tmp_path)
    transformers.set_seed(0)
    shape = {"vocab_size": 200, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "eos_token_id": None}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).save_pretrained(tmp_path)

    def printed(*arguments: str) -> str:
        program = str(ROOT / "examples/generate_with_transformers.py")
        monkeypatch.setattr("sys.argv", [program, str(tmp_path), "w1 w2", *arguments])
        runpy.run_path(program, run_name="__main__")
        return capsys.readouterr().out

    sample, greedy = printed(), printed("0")
    assert printed() == sample
    assert printed("0.7") == sample
    assert len(set(sample.split())) > 3 * len(set(greedy.split()))
