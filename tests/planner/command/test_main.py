"""The program: help, commands, exit statuses, and that it thinks without torch."""

import subprocess
import sys

import pytest

from megapipe.planner.command.main import COMMANDS, main
from tests.planner.command.plan import LAYOUT, ROOT, refusal

TOOL = ROOT / "tools" / "plan.py"


def run(*arguments, code=None):
    program = [sys.executable, str(TOOL)] if code is None else [sys.executable, "-c", code]
    return subprocess.run([*program, *arguments], capture_output=True, text=True, cwd=ROOT, check=False)


def test_help_lists_every_command(capsys):
    assert main(["--help"], {}) == 0
    text = capsys.readouterr().out
    assert all(f"  {name}" in text for name in COMMANDS)
    assert main([], {}) == 2
    assert capsys.readouterr().err == text


@pytest.mark.slow
def test_help_lists_flags_of_command_and_configuration(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit) as stopped:
            main([name, "--help"], {})
        assert stopped.value.code == 0
        text = capsys.readouterr().out
        assert f"megapipe plan {name}" in text
        assert "--parallel.tensor" in text


def test_an_unknown_command_is_refused_with_the_nearest():
    assert refusal("serch") == ["unknown command 'serch'; did you mean 'search'? (--help lists them)"]


def test_neither_help_nor_a_prediction_imports_torch():
    """Help of subcommands: tests/cli/test_main.py."""
    code = (
        "import sys; from megapipe.planner.command.main import main\n"
        "assert main(['--help'], {}) == main(sys.argv[1:], {}) == 0\n"
        "assert not {'torch', 'triton'} & set(sys.modules), 'torch was imported'\n"
    )
    finished = run("predict", *LAYOUT, code=code)
    assert finished.returncode == 0, finished.stderr
    assert "tokens/s" in finished.stdout


def test_wrong_input_exits_with_status_2():
    finished = run("predict", *LAYOUT, "--devices", "0")
    assert (finished.returncode, finished.stdout) == (2, "")
    assert finished.stderr == "error: --devices is 0; it must be at least 1 and at most 1,000,000\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["profile", "--output=a.yaml", "--micro_sizes=[2,2000000]"],
            "--micro_sizes[1] is 2,000,000; it must be from 1 to",
        ),
        (["search", *LAYOUT, "--write_config=/proc/a.yaml"], "/proc/a.yaml cannot be written: "),
    ],
)
def test_wrong_values_are_refused_before_any_work(arguments, message):
    (line,) = refusal(*arguments)
    assert message in line


@pytest.mark.slow
def test_a_dry_run_of_a_thousand_ranks():
    file = ROOT / "examples" / "parallel" / "three_d.yaml"
    sizes = ["--batch.global_size=1024", "--batch.micro_size=1", "--parallel.data=null", "--devices=1024"]
    finished = run("dry-run", str(file), *sizes, "--hardware", "a100-80")
    assert finished.returncode == 0, finished.stderr
    assert "configuration: valid on 1,024 ranks" in finished.stdout
    assert "every stage fit together (2 in all)" in finished.stdout
    finished = run("dry-run", str(file), *sizes, "--parallel.tensor=4")
    assert finished.returncode == 2
    assert "model.num_heads 6 is not divisible by parallel.tensor 4" in finished.stderr


@pytest.mark.slow
def test_a_dry_run_reports_what_does_not_fit():
    file = ROOT / "examples" / "parallel" / "data.yaml"
    model = ["--model", str(ROOT / "examples" / "models" / "llama2_13b.yaml"), "--parallel.data=null"]
    finished = run("dry-run", str(file), *model, "--devices=8", "--hardware=a100-80", "--batch.global_size=32")
    assert finished.returncode == 2
    assert "do not fit in 76.0 GB per device; coordinate 0 needs" in finished.stderr
