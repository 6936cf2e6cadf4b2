"""Configuration files and overrides, and kinds of layers: what is read, and what each mistake says."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config import ConfigError
from megapipe.config.load import build_parser, parse, parse_as, parse_given, underscored
from megapipe.config.model import BLOCK_FIELDS, ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.spec.layers import tensor_problems
from tests.support.commands import ROOT, run


def test_later_settings_win(tmp_path: Path) -> None:
    run, model = tmp_path / "run.yaml", tmp_path / "model.yaml"
    run.write_text("model:\n  num_layers: 2\n  hidden_size: 64\noptimizer:\n  learning_rate: 3e-3\n")
    model.write_text("num_layers: 6\nrope_scaling:\n  kind: linear\n  factor: 2.0\n")
    config = parse(["--config", str(run), "--model", str(model), "--parallel.tensor", "2"])
    assert (config.model.num_layers, config.model.hidden_size, config.model.rope_scaling.factor) == (6, 64, 2.0)
    assert (config.optimizer.learning_rate, config.parallel.tensor) == (3e-3, 2)


def test_hyphens_are_underscores_in_flags_only() -> None:
    words = ["--model.num-layers=2", "--data.prefix", "a-b"]
    assert underscored(words) == ["--model.num_layers=2", *words[1:]]
    config = parse(words)
    assert (config.model.num_layers, config.data.prefix) == (2, "a-b")


@pytest.mark.parametrize("word", ["none", "null"])
def test_none_and_null_save_only_at_the_end(tmp_path: Path, word: str) -> None:
    (tmp_path / "run.yaml").write_text(f"checkpoint:\n  every: {word}\n")
    for arguments in (["--checkpoint.every", word], ["--config", str(tmp_path / "run.yaml")]):
        checkpoint = parse(arguments).checkpoint
        assert (checkpoint.every, checkpoint.saves_between) == (None, False)


def test_blends_come_from_files_or_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data:\n  blend: {data/web: 7, data/code: 2.5}\n  fim_tokens: [1, 2, 3]\n")
    data = parse(["--config", str(tmp_path / "run.yaml")]).data
    assert data.blend == {"data/web": 7, "data/code": 2.5}
    assert data.fim_tokens == [1, 2, 3]
    assert data.prefixes == ("data/web", "data/code")
    assert parse(["--data.blend", '{"a": 1, "b": 3e-1}']).data.blend == {"a": 1, "b": 0.3}


FILES = {
    "misspelt": "model:\n  num_lyers: 2\n",
    "group": "modle:\n  num_layers: 2\n",
    "twice": "model:\n  num_layers: 2\n  num_layers: 3\n",
    "words": "model:\n  num_layers: two\n",
    "choice": "model:\n  activation: rely\n",
    "open": "a: [1\n",
    "two": "num_layers: two\n",
    "text": "just text\n",
    "empty": "",
    "deep": f"model: {'[' * 3000}{']' * 3000}\n",
    "alias": "model: &a {num_layers: *a}\n",
}
WRONG_FILES = """
--config misspelt | 'model.num_lyers'; did you mean 'model.num_layers'?
--config group | did you mean 'model
--config twice | line 3: the key 'num_layers' appears twice
--config words | model.num_layers is two, but must be a whole number from 1 to 1048576
--config choice | model.activation is rely, but must be one of gelu, gelu_tanh, swiglu
--model open | is not valid YAML: line 2, column 1: expected
--model two | two.yaml: model.num_layers is two, but must be a whole number from 1 to
--model text | is not a mapping
--config text | is not a mapping
--config empty | is not a mapping
--config deep | nested deeper than 100 levels
--config alias | is not valid YAML: line 1: aliases (*a) are not read
--config bytes | bytes.yaml: it is not UTF-8 text:
--model bytes | bytes.yaml: it is not UTF-8 text:
"""


@pytest.mark.parametrize("line", WRONG_FILES.strip().splitlines())
def test_errors_of_files_name_value_and_rule(line: str, tmp_path: Path) -> None:
    words, expected = line.split(" | ")
    flag, name = words.split()
    content = FILES[name].encode() if name in FILES else b"model: \x80\xff\n"
    (tmp_path / f"{name}.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        parse([flag, str(tmp_path / f"{name}.yaml")])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "Parser key" not in str(caught.value)


def test_of_two_files_the_wrong_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text("model: {num_layers: 2}\n")
    (tmp_path / "twice.yaml").write_text("model: {num_layers: 2}\nmodel: {num_layers: 3}\n")
    message = r"^--config \S*twice.yaml is not valid YAML: line 2: the key 'model' appears twice"
    with pytest.raises(ConfigError, match=message):
        parse(["--config", str(tmp_path / "good.yaml"), "--config", str(tmp_path / "twice.yaml")])


WRONG_FLAGS = """
run.yaml | unexpected argument 'run.yaml': flags start with --, as in --config FILE
--model.num_layer 3 | did you mean 'model.num_layers'?
--config no_such_file.yaml | no_such_file.yaml: the file does not exist
--batch.global_size 1e3 | batch.global_size is 1000.0, but must be a whole number
--optimizer adam | the file does not exist; choose an existing YAML file; to set a single field, write --optimizer.
--config | --config needs a value
--config= | --config is empty; name a YAML file, or leave the flag out
--checkpoint.every never | never, but must be a whole number of at least 1, auto, none, or null
--model no_such_file.yaml | --model no_such_file.yaml: the file does not exist
--model docs | is a folder; choose a YAML file
--training.precision fp8 | is fp8, but must be one of auto, fp32, bf16, fp16
--model.num_kv_heads x | num_kv_heads is x, but must be a whole number from 1 to 1048576, or null
--parallel.layers_per_stage [1,x] | [1, 'x'], but must be a list of whole numbers of at least 1, or null
--optimizer.learning_rate nan | optimizer.learning_rate is nan, but must be a number above 0
--model.num_layers \uff12 | model.num_layers is \uff12, but must be a whole number from 1 to 1048576, in the digits
--optimizer.learning_rate=2\uff12e-4 | learning_rate is 2\uff12e-4, but must be a number above 0, in the digits 0 to 9
--model.num_kv_heads ٣ | num_kv_heads is ٣, but must be a whole number from 1 to 1048576, or null, in the digits 0
--optimizer.betas [0.9,0.9\uff19] | betas is [0.9,0.9\uff19], but must be a list
--optimizer.betas [0.9] | betas is [0.9], but must be a list of 2 numbers of at least 0 and below 1
--tensor-model-parallel-size 2 | Megatron-LM's tensor_model_parallel_size is --parallel.tensor here
--distributed-timeout-minutes=9 | is --parallel.timeout_seconds here (in seconds)
--transformer-impl=local | Megatron-LM's transformer_impl has no field here: there is one
--experimental.pipeline_parallel_degree=2 | pipeline_parallel_degree is --parallel.pipeline here
--fault_tolerance.enable=true | 'fault_tolerance.enable' (--help-all
--model.n_embd=64 | nanoGPT's n_embd is --model.hidden_size here
--training.local_batch_size=4 | torchtitan's training.local_batch_size is --batch.micro_size here
--max_norm=1 | torchtitan's training.max_norm is --optimizer.clip_norm here
--log-interval 2 | Megatron-LM's and nanoGPT's log_interval is --training.log_every here
--n_embd=64 --bf16 | --model.hidden_size here | --training.precision bf16 here
--num-layers 2 | did you mean 'model.num_layers'?
--training.learning_rate 2 | did you mean 'optimizer.learning_rate'?
--config examples/models/llama3_8b.yaml | pass a file of this group as --model FILE
--model examples/gpt_tiny.yaml | whole groups: pass it as --config FILE
"""
"""Arguments, and a part of each problem."""


@pytest.mark.parametrize("line", WRONG_FLAGS.strip().splitlines())
def test_a_wrong_flag_names_value_and_rule(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words, *expected = line.split(" | ")
    with pytest.raises(ConfigError) as caught:
        parse(words.split())
    for problem, part in zip(caught.value.problems, expected, strict=True):
        assert part in problem


def test_printed_configuration_reads_back(tmp_path: Path) -> None:
    words = ["--config", "examples/gpt_tiny.yaml", "--parallel.pipeline", "2"]
    (tmp_path / "printed.yaml").write_text(run(f"python pretrain_gpt.py {' '.join(words)} --print_config", 60))
    words[1] = str(ROOT / words[1])
    assert parse(["--config", str(tmp_path / "printed.yaml")]) == parse(words)


def test_a_schedule_file_rules_out_what_it_says_itself() -> None:
    config = parse(["--schedule.name", "mine.txt", "--schedule.two_bp", "true", "--schedule.update", "eager"])
    problems = [problem for problem in config.problems() if problem.startswith("schedule.")]
    assert [problem.split(" is ")[0] for problem in problems] == ["schedule.two_bp", "schedule.update"]
    assert "leave schedule.two_bp out" in problems[0]
    assert parse(["--schedule.name", "mine.txt", "--schedule.receive_ahead", "2"]).schedule.problems() == []


def test_written_fields_are_distinguished_from_defaults(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("batch: {micro_size: 1}\nmodel: {rope_scaling: {kind: linear, factor: 2.0}}\n")
    parser = build_parser("")
    parser.add_argument("--devices", type=int)
    words = ["--config", str(tmp_path / "run.yaml"), "--parallel.data", "null", "--zero.stage=0", "--devices", "4"]
    given = parse_given(parser, PretrainConfig, words)
    assert given.fields == {"batch.micro_size", "model.rope_scaling.kind", "model.rope_scaling.factor", "zero.stage"}
    assert given.flags["devices"] == 4
    assert given.config == parse(words[:-2])


def test_program_flags_are_not_in_the_printed_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser("")
    parser.add_argument("--devices", type=int)
    with pytest.raises(SystemExit):
        parse_given(parser, PretrainConfig, ["--devices", "4", "--parallel.tensor", "2", "--print_config"])
    printed = capsys.readouterr().out
    assert "devices" not in printed
    assert "  tensor: 2\n" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--spikes.threshold=9", "there is no checkpoint to go back to"),
        ("--data.order=megatron --spikes.deviations=10", "no sample can be skipped"),
        ("--data.order=megatron --reliability.skip_samples=[[0,8]]", "no sample can be skipped"),
        ("--training.precision=fp16 --reliability.skip_non_finite=false", "adjusts its loss scale by skipping"),
    ],
)
def test_options_for_faults_name_what_they_need(words: str, message: str) -> None:
    assert any(message in problem for problem in parse(words.split()).problems())
    assert not any(message in problem for problem in parse([words.split()[-1], "--checkpoint.every=10"]).problems())


LOCAL = {"local": {"sliding_window": 4, "rope_theta": 3e4}}
ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.sampled_from(["none", "rotary", "x", ""]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["kind", "factor", "x"]), inner),
    max_leaves=4,
)


def model_with(kinds: Any, pattern: tuple[str, ...], **fields: Any) -> ModelConfig:
    return ModelConfig(layer_kinds=kinds, layer_pattern=pattern, **fields)


def test_a_pattern_repeats_over_the_blocks() -> None:
    words = ["--model.layer_kinds", yaml.safe_dump(LOCAL), "--model.layer_pattern", "[local, local, base]"]
    model = parse(words).model
    assert model.problems() == []
    blocks = [model.of_kind(model.kind_of_layer(index)) for index in range(model.num_layers)]
    assert [each.sliding_window for each in blocks] == [4, 4, None] * 4
    assert {each.rope_theta for each in blocks[::3]} == {3e4}
    assert blocks[2] == ModelConfig()


def test_a_model_without_pattern_is_its_own_kind() -> None:
    model = ModelConfig()
    assert model.of_kind(model.kind_of_layer(3)) is model
    assert list(model.kinds_of_layers.values()) == [model]


@pytest.mark.parametrize(
    ("kinds", "pattern", "message"),
    [
        (LOCAL, "local globl", "model.layer_pattern has 'globl', which is not a kind of layer; use one of base, l"),
        (LOCAL, "", "model.layer_kinds has 'local', which model.layer_pattern does not use"),
        (LOCAL, 13 * "local ", "model.layer_pattern has 13 entries, but model.num_layers is 12"),
        ({"base": {}}, "base", "model.layer_kinds has 'base', the name of the model's own fields"),
        ({"a": {"hidden_size": 8}}, "a", "model.layer_kinds a sets 'hidden_size', which cannot differ between"),
        ({"a": {"sliding_window": 0}}, "a", "model.layer_kinds a: sliding_window is 0, but must be a whole number"),
        ({"a": {"qk_norm": 1}}, "a", "model.layer_kinds a: qk_norm is 1, but must be true or false"),
        ({"a": {"activation": "x"}}, "a", "model.layer_kinds a: activation is 'x', but must be one of gelu"),
        ({"a": {"positions": "none"}}, "a", "model.layer_kinds a: positions is 'none' and model.positions is 'learn"),
        ({"a": {"rope_scaling": {"x": 1}}}, "a", "model.layer_kinds a: rope_scaling is {'x': 1}, but must be a map"),
        ({"a": {"rope_scaling": {"factor": -1}}}, "a", "rope_scaling.factor is -1, but must be a number above 0"),
        ({"a": {"num_heads": 5}}, "a", "is not divisible by model.num_heads 5; change one of them, or set model.head"),
    ],
)
def test_kinds_that_make_no_sense_are_refused(kinds: Any, pattern: str, message: str) -> None:
    (problem,) = model_with(kinds, tuple(pattern.split())).problems()
    assert message in problem
    assert "\n" not in problem


@given(field=st.sampled_from(sorted(BLOCK_FIELDS)), value=ANY)
def test_any_value_of_a_file_works_or_fails_clearly(field: str, value: Any) -> None:
    model = model_with({"a": {field: value}}, ("a", "base"), positions="rotary")
    problems = model.problems()
    assert all("\n" not in each for each in problems)
    if not problems:
        assert [each.problems() for each in model.kinds_of_layers.values()] == [[], []]


def test_rules_between_groups_look_at_every_kind() -> None:
    experts = ["--model.layer_kinds", "{moe: {num_experts: 4}}", "--model.layer_pattern", "[base, moe]"]
    config = parse([*experts, "--training.compile", "true", "--model.num_heads", "3"])
    assert any("training.compile cannot be combined with model.num_experts 4" in each for each in config.problems())
    assert any("model.num_experts 4 is not divisible" in each for each in tensor_problems(config.model, 3))


def test_the_limit_of_a_file_is_in_characters(tmp_path: Path) -> None:
    file = tmp_path / "long.yaml"
    file.write_text("# " + "\u00e9" * 600_000 + "\ntraining:\n  steps: 7\n", encoding="utf-8")
    assert parse_as(PretrainConfig, ["--config", str(file)]).training.steps == 7
    file.write_text("#" * 2_000_000 + "\n")
    with pytest.raises(ConfigError, match="characters"):
        parse_as(PretrainConfig, ["--config", str(file)])
