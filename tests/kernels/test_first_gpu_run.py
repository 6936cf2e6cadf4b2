"""docs/first_gpu_run.md: its training commands are runs that can start, its checks and options exist."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.ranks_check import checks
from megapipe.config.load import parse_as
from megapipe.config.run import PretrainConfig
from megapipe.training.validate import validate

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "first_gpu_run.md").read_text("utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip()
]
TRAINING = [command for command in COMMANDS if "pretrain_gpt.py" in command]


@pytest.mark.parametrize("command", TRAINING, ids=lambda command: command.split("--training.directory ")[1])
def test_training_commands_are_valid_runs(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    ranks = int(words[words.index("--nproc_per_node") + 1]) if words[0] == "torchrun" else 1
    config = parse_as(PretrainConfig, words[words.index("pretrain_gpt.py") + 1 :])
    validate(config, ranks)


def test_the_named_checks_and_options_exist() -> None:
    assert len(TRAINING) == 4
    names = [check.name for check in checks(8)]
    asked = re.findall(r"ranks_check\.py --checks (\w+)", TEXT)
    assert asked
    assert set(asked) <= set(names)
    for option in re.findall(r"gpu_check\.py (--[a-z-]+)", TEXT):
        assert f'"{option}"' in Path(gpu_check.__file__).read_text("utf-8")
    for file in re.findall(r"(?:examples|benchmarks|tools)/[\w./]+\.(?:py|yaml)", TEXT):
        assert (ROOT / file).exists(), file
