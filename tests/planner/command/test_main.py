"""The program: help, commands, refused input, exit statuses, and that it thinks without torch."""

import subprocess
import sys

import pytest

from megapipe.planner.command.main import COMMANDS, main
from tests.planner.command.plan import LAYOUT, MODELS, ROOT, SEARCH, TRILLION, refusal, without

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


FLAGS = {
    "predict": LAYOUT,
    "search": SEARCH,
    "train-time": TRILLION,
    "fit": [],
    "profile": [],
    "links": [],
    "serch": [],
}
UNWRITABLE = "/proc/nowhere/all.yaml"


@pytest.mark.parametrize(
    ("command", "flags", "words"),
    [
        ("serch", [], "unknown command 'serch'; did you mean 'search'? (--help lists them)"),
        ("predict", ["--hardware=a100-8"], "unknown hardware 'a100-8'; did you mean 'a100-80'"),
        (
            "predict",
            ["--hardware=none.yaml"],
            "cannot read none.yaml: No such file or directory; choose a YAML file with hardware",
        ),
        ("predict", ["--devices=15"], "world size 15 is not a multiple"),
        ("predict", ["--parallel.tensor=7"], "model.num_heads 24 is not divisible by parallel.tensor 7"),
        ("predict", ["--parallel.tensr=7"], "configuration key 'parallel.tensr'; did you mean 'parallel.tensor'?"),
        ("predict", ["--devces", "7"], "unknown configuration key 'devces'; did you mean 'devices'?"),
        ("predict", ["--batch.global_size=33"], "batch.global_size 33 is not divisible"),
        ("predict", ["--model=nowhere.yaml"], "nowhere.yaml"),
        ("predict", ["--tokens=0"], "--tokens is 0; it must be from 1 to 1e18"),
        ("predict", ["--tokens=-5e9"], "--tokens is -5,000,000,000; it must be from 1 to 1e18"),
        ("predict", ["--price-per-hour=-1"], "--price_per_hour is -1; it must be at least 0"),
        ("search", ["--tokens=0"], "--tokens is 0; it must be from 1 to 1e18"),
        ("search", ["--price-per-hour=-1"], "--price_per_hour is -1; it must be at least 0"),
        ("search", ["--devices=0"], "--devices is 0; it must be at least 1"),
        ("search", ["--devices=-4"], "--devices is -4"),
        ("search", ["--devices=1000000000"], "is 1,000,000,000; it must be at least 1 and at most 1,000,000"),
        ("search", ["--objective=size", "--models=absent.yaml"], "--models absent.yaml: the file does not exist"),
        ("search", ["--models", TRILLION[1]], "--models needs --objective size, but the objective is speed"),
        ("search", ["--objective=best"], "objective"),
        ("search", ["--schedules=zb_h9"], "zb_h9"),
        ("search", ["--hardware=a100"], "did you mean 'a100-40' or 'a100-80' or 'a100-80-25gbe'?"),
        ("search", ["--hardware=h200s"], "unknown hardware 'h200s'; did you mean 'h200'?"),
        ("search", ["--top=0"], "--top is 0; it must be at least 1"),
        ("search", ["--parallel.tensor=3"], "model.num_heads 32 is not divisible by parallel.tensor 3"),
        ("search", ["--parallel.pipeline=5"], "world size 16 is not a multiple of parallel.pipeline 5"),
        ("search", ["--data.sequence_length=4096"], "sequence_length 4096 exceeds model.max_positions 2048"),
        ("search", [f"--write-config={UNWRITABLE}"], f"{UNWRITABLE} cannot be written"),
        ("search", [f"--html={UNWRITABLE}"], f"{UNWRITABLE} cannot be written"),
        ("search", [f"--pictures={__file__}"], "Not a directory; choose another folder"),
        ("predict", [f"--pictures={__file__}"], "Not a directory; choose another folder"),
        ("train-time", [], "--tokens is missing"),
        ("train-time", ["--tokens=-1"], "--tokens is -1; it must be from 1 to 1e18"),
        ("train-time", ["--tokens=1e300"], "--tokens is 1e+300; it must be from 1 to 1e18"),
        ("train-time", ["--tokens=inf"], "--tokens is inf, but must be a number from 1 to 1e18"),
        ("train-time", ["--tokens=1e9"], "no speed is given: pass --devices with --hardware"),
        ("train-time", ["--tokens=1e9", "--achieved_tflops=100"], "--devices is missing"),
        ("train-time", ["--tokens=1e9", "--achieved_tflops=100", "--devices=0"], "--devices is 0"),
        ("train-time", ["--tokens=1e9", "--hardware=h100", "--least_efficiency=1"], "--least_efficiency is 1"),
        ("train-time", ["--tokens=1e9", "--hardware=h1000", "--devices=8"], "unknown hardware 'h1000'"),
        ("fit", [], "pass either --published"),
        ("fit", ["--published=sc21", "--rows=rows.yaml"], "pass either --published"),
        ("fit", ["--published=sc22"], "sc22"),
        ("fit", ["--published=sc21", "--hardware=h100"], "--hardware h100 can only be used with --rows"),
        ("fit", ["--rows=nowhere.yaml"], "--hardware is missing; set it to a file or to one of a100-40"),
        ("fit", ["--rows=nowhere.yaml", "--hardware=h100"], "nowhere.yaml"),
        ("fit", ["--published=sc21", f"--output={UNWRITABLE}"], f"{UNWRITABLE} cannot be written"),
        ("profile", [], "--output is missing; --help explains what to set"),
        ("links", [], "--output is missing; --help explains what to set"),
        ("profile", ["--output=a.yaml", "--micro_sizes=[2,2000000]"], "is 2,000,000; it must be from 1 to"),
    ],
)
def test_wrong_input_is_refused_before_any_work(command, flags, words):
    assert any(words in line for line in refusal(command, *FLAGS[command], *flags))


@pytest.mark.parametrize(
    ("command", "flag", "message"),
    [
        ("predict", "--hardware", "--hardware is missing; set it to a file or to one of a100-40"),
        ("predict", "--devices", "--devices is missing; set it, or set parallel.data and the other sizes"),
        ("search", "--devices", "--devices is missing; set it to the number of devices to use"),
        ("search", "--batch.global_size", "--batch.global_size is missing; set it to the samples per step"),
    ],
)
def test_what_is_missing_is_named(command, flag, message):
    (line,) = refusal(command, *without(FLAGS[command], flag))
    assert line.startswith(message)


def test_a_search_names_everything_that_is_missing_at_once():
    lines = refusal("search", "--model", str(MODELS / "gpt2_124m.yaml"))
    assert [line.partition(" is missing")[0] for line in lines] == ["--hardware", "--devices", "--batch.global_size"]


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
    model = ["--model", str(MODELS / "llama2_13b.yaml"), "--parallel.data=null"]
    finished = run("dry-run", str(file), *model, "--devices=8", "--hardware=a100-80", "--batch.global_size=32")
    assert finished.returncode == 2
    assert "do not fit in 76.0 GB per device; coordinate 0 needs" in finished.stderr
