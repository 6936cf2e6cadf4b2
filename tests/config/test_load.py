"""Configuration files and overrides: what is read, and what each mistake says."""

import subprocess
import sys
from pathlib import Path

import pytest

from megapipe.config.errors import ConfigError
from megapipe.config.load import build_parser, parse, parse_given, underscored
from megapipe.config.run import PretrainConfig

ROOT = Path(__file__).resolve().parents[2]


def test_later_settings_win(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model:\n  num_layers: 2\n  hidden_size: 64\noptimizer:\n  learning_rate: 3e-3\n"
    )
    (tmp_path / "model.yaml").write_text("num_layers: 6\nrope_scaling:\n  kind: linear\n  factor: 2.0\n")
    config = parse(
        ["--config", str(tmp_path / "run.yaml"), "--model", str(tmp_path / "model.yaml"), "--parallel.tensor", "2"]
    )
    assert config.model.num_layers == 6
    assert config.model.hidden_size == 64
    assert config.model.rope_scaling.factor == 2.0
    assert config.optimizer.learning_rate == 3e-3
    assert config.parallel.tensor == 2


def test_hyphens_are_underscores_in_flags_only() -> None:
    assert underscored(["--model.num-layers=2", "--data.prefix", "a-b"]) == [
        "--model.num_layers=2",
        "--data.prefix",
        "a-b",
    ]
    assert parse(["--model.num-heads", "4", "--data.prefix", "some-shard"]).data.prefix == "some-shard"


@pytest.mark.parametrize("word", ["none", "null"])
def test_none_and_null_save_only_at_the_end(tmp_path: Path, word: str) -> None:
    (tmp_path / "run.yaml").write_text(f"checkpoint:\n  every: {word}\n")
    for arguments in (["--checkpoint.every", word], ["--config", str(tmp_path / "run.yaml")]):
        checkpoint = parse(arguments).checkpoint
        assert checkpoint.every is None
        assert not checkpoint.saves_between
    with pytest.raises(ConfigError, match="every is never, but must be 'auto', 'none', a whole number or null"):
        parse(["--checkpoint.every", "never"])


def test_a_blend_is_written_in_a_file_or_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data:\n  blend: {data/web: 7, data/code: 2.5}\n  fim_tokens: [1, 2, 3]\n")
    data = parse(["--config", str(tmp_path / "run.yaml")]).data
    assert data.blend == {"data/web": 7, "data/code": 2.5}
    assert data.fim_tokens == [1, 2, 3]
    assert data.prefixes == ("data/web", "data/code")
    assert parse(["--data.blend", '{"a": 1, "b": 3e-1}']).data.blend == {"a": 1, "b": 0.3}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model:\n  num_lyers: 2\n", "'model.num_lyers'; did you mean 'model.num_layers'?"),
        ("modle:\n  num_layers: 2\n", "did you mean 'model"),
        ("model:\n  num_layers: 2\n  num_layers: 3\n", "line 3: the key 'num_layers' appears twice"),
        ("model:\n  num_layers: two\n", "model.num_layers is two, but must be a whole number"),
        ("model:\n  activation: relu\n", "'gelu', 'gelu_tanh', 'swiglu'"),
    ],
)
def test_a_wrong_file_names_value_and_rule(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse(["--config", str(path)])
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("flag", "text", "expected"),
    [
        ("model", "a: [1\n", "is not valid YAML: line 2, column 1: expected"),
        ("model", "num_layers: two\n", "group.yaml: model.num_layers is two, but must be a whole number"),
        ("model", "just text\n", "is not a mapping"),
        ("config", "just text\n", "is not a mapping"),
        ("config", "", "is not a mapping"),
        ("config", f"model: {'[' * 3000}{']' * 3000}\n", "nested deeper than 100 levels"),
        ("config", "model: &a {num_layers: *a}\n", "is not valid YAML: line 1: aliases (*a) are not read"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_in_one_line(tmp_path: Path, flag: str, text: str, expected: str) -> None:
    path = tmp_path / "group.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse([f"--{flag}", str(path)])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "Parser key" not in str(caught.value)


def test_of_two_files_the_wrong_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text("model: {num_layers: 2}\n")
    (tmp_path / "twice.yaml").write_text("model: {num_layers: 2}\nmodel: {num_layers: 3}\n")
    files = ["--config", str(tmp_path / "good.yaml"), "--config", str(tmp_path / "twice.yaml")]
    with pytest.raises(
        ConfigError, match=r"^--config \S*twice.yaml is not valid YAML: line 2: the key 'model' appears twice"
    ):
        parse(files)


@pytest.mark.parametrize("flag", ["config", "model"])
def test_a_file_of_other_bytes_is_told(tmp_path: Path, flag: str) -> None:
    (tmp_path / "run.yaml").write_bytes(b"model: \x80\xff\n")
    with pytest.raises(ConfigError, match=r"is not UTF-8 text: .*byte 0x80 in position 7"):
        parse([f"--{flag}", str(tmp_path / "run.yaml")])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run.yaml"], "unexpected argument 'run.yaml': flags start with --, as in --config FILE"),
        (["--model.num_layer", "3"], "did you mean 'model.num_layers'?"),
        (["--config", "no_such_file.yaml"], "no_such_file.yaml: the file does not exist"),
        (["--batch.global_size", "1e3"], "batch.global_size is 1000.0, but must be a whole number"),
        (
            ["--optimizer", "adam"],
            "the file does not exist; choose an existing YAML file; to set a single field, write --optimizer.",
        ),
        (["--config"], "--config needs a value"),
        (["--model", "no_such_file.yaml"], "--model no_such_file.yaml: the file does not exist"),
        (["--model", str(ROOT)], "is a folder; choose a YAML file"),
        (["--training.precision", "fp8"], "is fp8, but must be one of 'auto', 'fp32', 'bf16', 'fp16'"),
        (["--model.num_kv_heads", "x"], "model.num_kv_heads is x, but must be a whole number or null"),
        (["--parallel.layers_per_stage", "[1,x]"], "must be a list of whole numbers, such as [1, 2] or null"),
        (["--optimizer.learning_rate", "nan"], "optimizer.learning_rate is nan, but must be a finite number"),
        (["--optimizer.betas", "[0.9]"], "optimizer.betas is [0.9], but must be a list of 2"),
    ],
)
def test_a_wrong_flag_names_value_and_rule(arguments: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(arguments)
    assert expected in str(caught.value)


def test_printed_configuration_reads_back(tmp_path: Path) -> None:
    program = [sys.executable, "pretrain_gpt.py", "--config", "examples/gpt_tiny.yaml", "--parallel.pipeline", "2"]
    printed = subprocess.run([*program, "--print_config"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    path = tmp_path / "printed.yaml"
    path.write_text(printed)
    expected = parse(["--config", str(ROOT / "examples/gpt_tiny.yaml"), "--parallel.pipeline", "2"])
    assert parse(["--config", str(path)]) == expected


def test_help_needs_no_torch() -> None:
    code = (
        "import sys, runpy; sys.argv = ['pretrain_gpt.py', '--help']\n"
        "try: runpy.run_path('pretrain_gpt.py', run_name='__main__')\n"
        "except SystemExit: assert 'torch' not in sys.modules, 'torch was imported'"
    )
    finished = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "--parallel.pipeline" in finished.stdout
    assert finished.stdout.startswith("usage: megapipe train [-n RANKS] --config FILE [--plan auto|FILE|PRESET]")


def test_no_arguments_prints_what_to_try() -> None:
    finished = subprocess.run(
        [sys.executable, "pretrain_gpt.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 2
    assert "three commands to try" in finished.stderr


def test_a_schedule_file_rules_out_what_it_says_itself() -> None:
    config = parse(["--schedule.file", "mine.txt", "--schedule.chunks", "2", "--schedule.update", "eager"])
    found = [problem for problem in config.problems() if problem.startswith("schedule.")]
    assert [problem.split(" is ")[0] for problem in found] == ["schedule.chunks", "schedule.update"]
    assert "leave one of the two out" in found[0]
    assert parse(["--schedule.file", "mine.txt", "--schedule.receive_ahead", "2"]).schedule.problems() == []


def test_a_traced_step_counts_from_one() -> None:
    config = parse(["--profile.trace", "traces", "--profile.first_step", "0"])
    assert any(problem.startswith("profile.first_step is 0") for problem in config.problems())


def test_fields_that_were_written_are_told_from_defaults(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("batch: {micro_size: 1}\nmodel: {rope_scaling: {kind: linear, factor: 2.0}}\n")
    parser = build_parser("")
    parser.add_argument("--devices", type=int)
    words = ["--config", str(tmp_path / "run.yaml"), "--parallel.data", "null", "--zero.stage=0", "--devices", "4"]
    given = parse_given(parser, PretrainConfig, words)
    assert given.fields == {"batch.micro_size", "model.rope_scaling.kind", "model.rope_scaling.factor", "zero.stage"}
    assert given.flags["devices"] == 4
    assert given.config == parse(words[:-2])


def test_a_program_s_own_flags_are_no_part_of_the_printed_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser("")
    parser.add_argument("--devices", type=int)
    with pytest.raises(SystemExit):
        parse_given(parser, PretrainConfig, ["--devices", "4", "--parallel.tensor", "2", "--print_config"])
    printed = capsys.readouterr().out
    assert "devices" not in printed
    assert "  tensor: 2\n" in printed
