"""The table of subcommands: help without torch, one table for `megapipe`, `python -m megapipe` and the programs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megapipe import __version__
from megapipe.cli.main import SUBCOMMANDS, main, overview
from megapipe.config import ConfigError
from megapipe.config.help_format import packaged_files
from megapipe.config.load import parse
from tests.support.commands import ROOT

ALONE = {"train": ["pretrain_gpt.py", "pretrain_bert.py"], "convert": ["tools/convert_checkpoint.py"]}
"""Programs that are not called like their subcommand."""


def test_help_imports_no_subcommand() -> None:
    program = (
        "import sys\nfrom megapipe.cli.main import main\nmain(['--help'])\n"
        "loaded = {'torch', 'numpy', 'jsonargparse', 'yaml', 'argparse'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{overview()}\n"


def test_help_of_every_subcommand_needs_no_torch() -> None:
    program = (
        "import contextlib, sys\nfrom megapipe.cli.main import SUBCOMMANDS, main\n"
        "slow = {'torch', 'tokenizers', 'sentencepiece', 'pyarrow', 'numpy'}\n"
        "for words in [['data', '--help'], ['train', '--help'], *([name, '--help'] for name in SUBCOMMANDS),\n"
        " ['data', 'stalls', '--help'], ['train']]:\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main(words)\n"
        "    assert not slow & set(sys.modules), words\n"
        "    slow -= {'numpy'} if words[0] == 'train' else set()\n"
        "import megapipe.data.samples\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "usage: megapipe train [-n RANKS] --config FILE [--plan auto|FILE|PRESET]" in done.stdout
    assert "--ingestion-tokens-per-second" in done.stdout
    assert "three commands to try" in done.stderr


def test_a_single_process_refuses_a_wrong_configuration_without_torch() -> None:
    program = (
        "import sys\nfrom megapipe.cli.main import main\n"
        "assert main(['train', '--config', 'gpt_tiny', '--data.sequence_length', '999']) == 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: data.sequence_length 999 exceeds model.max_positions 256")


@pytest.mark.parametrize(("words", "line"), [([], "loading torch\n"), (["-n", "2"], "starting 2 ranks\n")])
def test_train_prints_a_line_before_it_imports_torch(words: list[str], line: str) -> None:
    program = (
        "import os, sys\nfrom megapipe.cli.main import main\n"
        "class Torch:\n"
        "    def find_spec(self, name, *more):\n"
        "        if name == 'torch':\n"
        "            os._exit(7)\n"
        f"sys.meta_path.insert(0, Torch())\nmain(['train', *{words}, '--config', 'gpt_tiny', '--training.steps=1'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (7, line, "")


def test_a_missing_command_fails_and_version_prints_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr() == ("", f"{overview()}\n")
    for name, (_, summary) in SUBCOMMANDS.items():
        assert f"  {name} " in overview()
        assert summary in " ".join(overview().split())
    assert main(["--version"]) == 0
    assert capsys.readouterr() == (f"megapipe {__version__}\n", "")


def test_programs_are_wrappers_of_the_table() -> None:
    for program in [*ROOT.glob("pretrain_*.py"), *ROOT.glob("tools/*.py")]:
        name = str(program.relative_to(ROOT))
        command = next((command for command, programs in ALONE.items() if name in programs), program.stem)
        called = re.findall(r"start\((.*)\)", program.read_text())
        assert called, name
        words = re.findall(r'"([^"]+)"', called[0])
        kind = ["--kind", program.stem.removeprefix("pretrain_")] if command == "train" else []
        assert words == [command.replace("_", "-"), *kind]
        assert words[0] in SUBCOMMANDS


def test_ctrl_c_during_an_import_ends_with_one_word() -> None:
    program = (
        "import os, signal\nfrom megapipe.cli import main\n"
        "main.import_module = lambda name: os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\nmain.main(['plan'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_packaged_files_have_names_and_user_files_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    llama = packaged_files("model")["llama3_8b"]
    assert parse(["--model", "llama3_8b"]) == parse([f"--model={llama}"]) == parse(["--model=llama3_8b"])
    assert parse(["--config", "pipeline"]).schedule.name == "zb_v"
    (tmp_path / "quickstart").mkdir()
    assert parse(["--config", "quickstart"]).model.num_layers == 4
    (tmp_path / "llama3_8b").write_text("num_layers: 7\n")
    assert parse(["--model", "llama3_8b"]).model.num_layers == 7
    with pytest.raises(ConfigError, match=r"did you mean gpt_tiny\?"):
        parse(["--config", "gpt_tini"])


def test_names_of_packaged_files_differ() -> None:
    folder = ROOT / "examples"
    assert len(packaged_files("config")) == len([*folder.glob("*.yaml"), *folder.glob("[pr]*/*.yaml")])
    assert not set(packaged_files("config")) & set(packaged_files("model"))
