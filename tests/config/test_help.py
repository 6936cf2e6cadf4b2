"""`--help` in two tiers: common options, and all with complete headings, plain types and defaults; options of other
programs are answered with the field."""

import functools
import re
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from megapipe.cli.train import EXAMPLES, parser_of
from megapipe.cli.train import main as train
from megapipe.config.bert import BertPretrainConfig
from megapipe.config.help_format import COMMON
from megapipe.config.load import build_parser, kind_of, parse_as
from megapipe.config.other_names import OTHER_NAMES, WITHOUT_FIELD, hint, split_target
from megapipe.config.run import PretrainConfig
from megapipe.planner.command.main import main as plan
from megapipe.schedules import GENERATORS

MEGATRON_SCRIPTS = """
adam_beta1 adam_beta2 attention_backend attention_dropout bf16 clip_grad context_parallel_size data_path
disable_bias_linear distributed_timeout_minutes eval_interval eval_iters expert_model_parallel_size ffn_hidden_size
fp16 fp8_format global_batch_size grad_reduce_in_bf16 group_query_attention hidden_dropout hidden_size init_method_std
kv_channels load log_interval lr lr_decay_iters lr_decay_samples lr_decay_style lr_warmup_fraction lr_warmup_iters
lr_warmup_samples max_position_embeddings micro_batch_size min_lr moe_router_topk no_position_embedding normalization
num_attention_heads num_experts num_layers num_query_groups pipeline_model_parallel_size position_embedding_type
profile_step_end profile_step_start rampup_batch_size rotary_base save save_interval seq_length sequence_parallel
split swiglu tensor_model_parallel_size tensorboard_dir train_iters train_samples untie_embeddings_and_output_weights
use_distributed_optimizer vocab_size wandb_project weight_decay
"""
"""The options of Megatron-LM's example scripts (examples/gpt3, llama, mixtral, bert) that are fields here. The others
choose tokenizers, which `megapipe preprocess` does, or features that are always on, or that megapipe does not have."""
NANOGPT = """
backend batch_size beta1 beta2 bias block_size compile dataset decay_lr device dropout dtype eval_interval eval_iters
grad_clip gradient_accumulation_steps init_from learning_rate log_interval lr_decay_iters max_iters min_lr n_embd
n_head n_layer out_dir wandb_log wandb_project warmup_iters weight_decay
"""
"""The variables of nanoGPT's train.py, except eval_only, always_save_checkpoint and wandb_run_name."""
TABLE = [(name, target) for targets in OTHER_NAMES.values() for name, target in targets.items()]


@functools.cache
def options(kind: type[PretrainConfig]) -> dict[str, Any]:
    """Return every option of a run's parser, by name."""
    return {action.dest: action for action in build_parser("", kind)._actions}


@pytest.mark.parametrize("kind", [PretrainConfig, BertPretrainConfig])
def test_help_has_whole_headings_and_plain_types(kind: type[PretrainConfig]) -> None:
    text = build_parser("", kind).format_all()
    for leak in ("<class", "type: ", "Literal[", "Union[", "Optional[", "``", "None", "configuration file."):
        assert leak not in text
    for group in fields(kind):
        if is_dataclass(group.default_factory):
            first = (group.default_factory.__doc__ or "").partition("\n")[0]
            assert first.endswith("."), f"{group.name}: the heading in --help is the docstring's first line"
            assert f" {first[:-1]}: " in " ".join(text.split())


@pytest.mark.parametrize("kind", [PretrainConfig, BertPretrainConfig])
def test_every_field_is_explained_and_null_too(kind: type[PretrainConfig]) -> None:
    for name, action in options(kind).items():
        if "." in name and action.metavar != "FILE":
            assert (action.help or "").endswith("."), f"{name}: {action.help!r} is not a sentence"
        if "." in name and action.default is None:
            assert re.search(r"\bnull\b", action.help), f"{name}: what does null mean?"


def test_tools_print_no_markup_and_no_classes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan(["search", "--help"], {})
    assert "<class" not in capsys.readouterr().out
    assert not any("``" in generator.summary for generator in GENERATORS.values())


@pytest.mark.parametrize("kind", [PretrainConfig, BertPretrainConfig])
def test_short_help_has_thirty_options_and_long_help_all(kind: type[PretrainConfig]) -> None:
    parser = parser_of(kind)
    short, everything = (set(re.findall(r"^  (?:-\w.*)?(--[\w.-]+)", text, re.MULTILINE)) for text in helps(kind))
    assert everything == {action.option_strings[-1].removesuffix("+") for action in parser._actions}
    common = {f"--{name.replace('_all', '-all')}" for names in COMMON.values() for name in names}
    assert common <= short < everything
    assert len(short - {"--help", "--help-all"}) == 30
    assert helps(kind)[0].partition("layout:")[2].partition("\n\n")[2].startswith(EXAMPLES.partition("\n")[0])


def helps(kind: type[PretrainConfig]) -> tuple[str, str]:
    """Return both tiers of help."""
    parser = parser_of(kind)
    return parser.format_help(), parser.format_all()


def test_help_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    for text in helps(PretrainConfig):
        for line in text.splitlines():
            assert len(line) <= 72 or line.startswith(("  megapipe ", "  --")), line


def test_examples_in_help_can_be_parsed() -> None:
    lines = [line.split()[2:] for line in EXAMPLES.splitlines() if line.startswith("  megapipe train")]
    assert len(lines) == 3
    for words in lines:
        fields = words[2:] if words[0] == "-n" else words
        parse_as(kind_of(fields), fields)


def test_options_of_other_programs_name_a_field() -> None:
    known = list(options(PretrainConfig))
    for name in [*MEGATRON_SCRIPTS.split(), *NANOGPT.split()]:
        answer = re.search(r"did you mean '([\w.]+)'|is --([\w.]+)(?: \w+)? here(?: \(.+\))?$", hint(name, known))
        assert answer, name
        field = answer[1] or answer[2]
        assert field in known
        assert answer[2] or field.rpartition(".")[2] == name


def test_options_of_other_programs_name_fields_that_take_them() -> None:
    known, values = options(BertPretrainConfig), []
    for name, target in TABLE:
        field, value, remark = split_target(target)
        assert field in known, f"{name}: {field} is not an option"
        fields_here = known if "." in name else {each.rpartition(".")[2] for each in known}
        assert name not in fields_here, f"{name} is a field here, too"
        values += [f"--{field}={value}"] if value else []
        for option in re.findall(r"(?:^|[ :])((?:[a-z_]+\.)+[a-z_]+)", remark):
            assert option in known, f"{name}: {option} is not an option"
    parse_as(BertPretrainConfig, values)


def test_values_in_remarks_are_values_of_the_field() -> None:
    known = options(BertPretrainConfig)
    pairs = [
        (known[field], word.strip())
        for field, _, remark in (split_target(target) for _, target in TABLE)
        for sentence in remark.split(". ")
        for word in re.findall(r"^[\w, -]+: (\w+)$", sentence)
    ]
    assert len(pairs) > 15
    for action, value in pairs:
        assert value == "null" or any(
            value in re.split(r"[^\w]+", str(each)) for each in (action.choices or (), action._typehint)
        ), (action.dest, value)


def test_every_other_name_is_answered_at_the_command_line() -> None:
    known = list(options(BertPretrainConfig))
    for name, target in TABLE:
        field, _, remark = split_target(target)
        answer = hint(name, known)
        assert f"did you mean '{field}'" in answer or (f"--{field}" in answer and remark in answer), (name, answer)
    for program, reasons in WITHOUT_FIELD.items():
        for name, reason in reasons.items():
            answer = hint(name, known)
            assert answer == f"; {program}'s {name} has no field here: {reason}", (name, answer)
            for option in re.findall(r"\b((?:[a-z0-9_]+\.)+[a-z0-9_]+)", reason):
                assert option in known, f"{name}: {option} is not an option"


@pytest.mark.parametrize("file", ["--config quickstart", "--model llama3_8b"])
def test_bert_flags_do_not_change_a_gpts_kind(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train([*file.split(), "--model.transform_activation", "gelu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --model.transform_activation gelu is for BERT runs only, but the model of {file}")
    assert "--kind bert" in line
    assert kind_of(["--config", "bert_quickstart", "--data.pairs", "order"]) is BertPretrainConfig
