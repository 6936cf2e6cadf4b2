"""predict, explain and compare as a user runs them, and steps, days and money of a budget of tokens."""

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config.load import parse
from megapipe.layout.hardware.description import load_hardware, written
from megapipe.planner.command.planning import lost_share, save_interval
from megapipe.planner.cost.model import predict
from tests.planner.command.plan import LAYOUT, MODEL, json_of, output, refusal, without


def test_predict_says_what_the_cost_model_says():
    report = json_of("predict", *LAYOUT, "--training.precision", "bf16")
    flags = without(LAYOUT, "hardware", "devices")
    config = parse([*flags, "--training.precision", "bf16"])
    expected = predict(config, load_hardware("a100-80"), world_size=16).estimate
    assert report["step_time_s"] == expected.step_seconds
    assert report["memory_bytes"] == [memory.total for memory in expected.memory]
    layout = report["layout"]
    assert (layout["data"], layout["tensor"], layout["pipeline"]) == (4, 2, 2)
    assert report["fits"] is True
    assert report["tokens_per_s_per_device"] == pytest.approx(32 * 1024 / report["step_time_s"] / 16)
    assert report["model_tflops_per_device"] > 0
    assert sum(term["seconds"] for term in report["terms"]) == pytest.approx(report["step_time_s"])


def test_only_a_missing_precision_is_chosen(tmp_path):
    assert "note: training.precision was not given, so it is bf16, the first of" in output("predict", *LAYOUT)
    v100 = [each.replace("a100-80", "v100-32") for each in LAYOUT]
    assert "note: training.precision was not given, so it is fp16, the first of" in output("predict", *v100)
    (tmp_path / "run.yaml").write_text("training: {steps: 5}\n")
    text = output("predict", "--config", str(tmp_path / "run.yaml"), *LAYOUT)
    assert "in fp32" in text
    assert "note: training.precision is fp32, the default of training" in text


def test_a_missing_model_is_noted():
    machine = ["--hardware", "a100-80", "--devices", "8"]
    message = "note: no model was given, so this is the default model with 12 layers of hidden size 768"
    for command in ("predict", "explain"):
        assert message in output(command, *machine)
        assert any(message in f"note: {each}" for each in json_of(command, *machine)["remarks"])
    pins = ["--parallel.pipeline=1", "--parallel.tensor=1", "--batch.micro_size=1"]
    assert message in output("search", *machine, *pins, "--batch.global_size=16", "--top=1")
    for named in (["--model", MODEL], ["--model.num_layers=6"]):
        report = json_of("predict", *machine, *named)
        assert not any("default one" in each for each in report["remarks"])
    assert report["model"] == {"num_layers": 6, "hidden_size": 768, "vocabulary_size": 50257}


def test_explain_names_each_source_and_stage():
    text = output("explain", *LAYOUT)
    assert "simulated step:" in text
    assert "estimate that a search uses:" in text
    assert "roofline of the device" in text
    assert "embedding to blocks." in text
    report = json_of("explain", *LAYOUT)
    assert len(report["stages"]) == 2
    assert all(term["source"] for term in report["terms"])
    assert sum(report["memory"][0].values()) == report["memory_bytes"][0]


def test_compare_puts_what_fits_and_is_fastest_first(tmp_path):
    for name, tensor, micro in (("a", 1, 1), ("b", 8, 1), ("c", 1, 64)):
        values = {"parallel": {"tensor": tensor}, "batch": {"global_size": 1024, "micro_size": micro}}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(values))
    files = [str(tmp_path / f"{name}.yaml") for name in "abc"]
    shape = ["--model", MODEL, "--model.num_heads=24", "--model.hidden_size=1536", "--training.precision=bf16"]
    machine = ["--hardware", "v100-16", "--devices", "16", "--training.precision=fp16"]
    report = json_of("compare", *files, *shape, *machine)
    order = [(each["fits"], each["tokens_per_s_per_device"]) for each in report]
    assert [fits for fits, _ in order] == sorted((fits for fits, _ in order), reverse=True)
    assert {fits for fits, _ in order} == {True, False}
    fitting = [speed for fits, speed in order if fits]
    assert fitting == sorted(fitting, reverse=True)
    text = output("compare", *files, *shape, *machine)
    assert all(file in text for file in files)
    assert "no, by " in text


@given(st.floats(0.01, 1e3), st.floats(1e3, 1e7), st.floats(0.1, 10))
def test_no_other_save_interval_loses_less(save: float, between: float, factor: float) -> None:
    best = save_interval(save, between)
    assert lost_share(best, save, between) <= lost_share(factor * best, save, between) * (1 + 1e-12)


def test_how_often_to_save_follows_young_and_daly():
    flags = ["--mean-time-between-failures", "3", "--save-seconds", "40"]
    report = json_of("predict", *LAYOUT, *flags)
    assert save_interval(40, 3 * 3600) == pytest.approx(930, abs=1)  # the published example
    assert report["checkpoint"]["interval_s"] == pytest.approx(save_interval(40, 3 * 3600))
    assert report["checkpoint"]["interval_steps"] == round(report["checkpoint"]["interval_s"] / report["step_time_s"])
    assert "save every 15.5 minutes" in output("predict", *LAYOUT, *flags)
    assert "--save_seconds is missing" in refusal("predict", *LAYOUT, flags[0], flags[1])[0]
    for hours, seconds in (("3", "-1"), ("1e300", "40"), ("1e-300", "1e-300")):
        wrong = [flags[0], hours, flags[2], seconds]
        assert "it must be from 1e-9 to 1e12" in refusal("predict", *LAYOUT, *wrong)[0]


def test_devices_follow_from_a_layout_that_says_all_sizes():
    flags = without(LAYOUT, "devices")
    assert json_of("predict", *flags, "--parallel.data", "4") == json_of("predict", *LAYOUT)


def test_a_wrong_file_of_several_is_named(tmp_path):
    (tmp_path / "good.yaml").write_text("batch: {global_size: 32}\n")
    (tmp_path / "bad.yaml").write_text("batch: {global_size: 30}\n")
    files = [str(tmp_path / "good.yaml"), str(tmp_path / "bad.yaml")]
    flags = without(LAYOUT, "global_size")
    lines = refusal("compare", *files, *flags)
    assert len(lines) == 1
    assert lines[0].startswith(f"{files[1]}: batch.global_size 30 is not divisible")


def test_compare_refuses_what_is_no_configuration(tmp_path):
    machine = tmp_path / "machine.yaml"
    machine.write_text(written(load_hardware("h100")))
    flags = ["--hardware=h100", "--devices=4"]
    assert refusal("compare", str(machine), "gpt_tiny", *flags) == [
        f"{machine} is a hardware file; write --hardware {machine} and a configuration"
    ]
    assert refusal("compare", *flags) == ["FILE is missing; name one configuration for each layout to compare"]


def test_compare_keeps_the_kind_of_each_file():
    flags = ["--hardware=h100", "--devices=2"]
    alone = json_of("compare", "gpt_tiny", *flags)[0]
    mixed = json_of("compare", "gpt_tiny", "bert_quickstart", *flags)
    assert alone in mixed
    assert output("compare", "gpt_tiny", "bert_quickstart", *flags).startswith("note: the models differ, ")
    assert "note: " not in output("compare", "gpt_tiny", "gpt_tiny", *flags)


def test_a_bert_is_planned_too():
    shape = ["--model", MODEL.replace("gpt2_1.5b", "bert_large"), "--hardware=v100-16", "--devices=4"]
    for flag in ([], ["--bert"]):
        text = output("predict", *flag, *shape, "--batch.global_size=16", "--data.sequence_length=512")
        assert text.startswith("BERT of 336M parameters on 4 x ")
    assert "bert_base" in output("compare", "recipes/bert_base", "--hardware=a100-40", "--devices=8")


def test_reserved_memory_stays_free():
    needed = max(json_of("predict", *LAYOUT)["memory_bytes"])
    for spare, fits in ((0.1e9, True), (-0.1e9, False)):
        reserve = (80e9 - needed - spare) / 1e9
        report = json_of("predict", *LAYOUT, "--memory_reserve", str(reserve))
        assert report["fits"] is fits
        assert report["memory_limit_bytes"] == pytest.approx(needed + spare)
    message = "it must be at least 0 and below the 80 GB of device"
    for reserve in ("80", "-1"):
        (line,) = refusal("predict", *LAYOUT, "--memory_reserve", reserve)
        assert message in line


TOKENS = 7.5e9
MACHINE = """
name: two kinds
groups:
- name: old
  num_nodes: 1
  device: {name: slow, peak_flops: {bf16: 125e12}, memory_bytes: 80e9, memory_bandwidth: 900e9}
  devices_per_node: 8
  inside: {latency: 1e-6, bandwidth: 150e9}
  outside: {latency: 1e-5, bandwidth: 3e9}
- name: new
  num_nodes: 1
  device: {name: fast, peak_flops: {bf16: 312e12}, memory_bytes: 80e9, memory_bandwidth: 2e12}
  devices_per_node: 8
  inside: {latency: 1e-6, bandwidth: 300e9}
  outside: {latency: 1e-5, bandwidth: 200e9, adapters: 8}
"""


def test_steps_days_and_money_follow_from_the_step():
    report = json_of("predict", *LAYOUT, f"--tokens={TOKENS}", "--price-per-hour=33")
    steps = math.ceil(TOKENS / (32 * 1024))  # batch.global_size and data.sequence_length's default
    days = steps * report["step_time_s"] / 86400
    training = report["training"]
    assert training["steps"] == steps
    assert training["days"] == pytest.approx(days)
    assert training["cost"] == pytest.approx(days * 24 * 2 * 33)  # 16 devices are two nodes
    printed = output("predict", *LAYOUT, f"--tokens={TOKENS}", "--price-per-hour=33")
    assert f"7.5B tokens: {steps:,} steps (--training.steps {steps})" in printed
    assert f"price {training['cost']:,.0f}" in printed


def test_without_prices_there_is_no_cost():
    assert json_of("predict", *LAYOUT, f"--tokens={TOKENS}")["training"]["cost"] is None
    assert "prices" not in output("predict", *LAYOUT, f"--tokens={TOKENS}")
    assert json_of("predict", *LAYOUT)["training"] is None


def test_searches_report_budgets_and_rank_by_the_given_price():
    pins = ["--parallel.pipeline=2", "--parallel.tensor=2", "--batch.micro_size=1", "--schedule.name=1f1b"]
    flags = [*LAYOUT, *pins, f"--tokens={TOKENS}", "--price-per-hour=33", "--top=1"]
    report = json_of("search", *flags)
    training = report["training"]
    assert training["days"] == pytest.approx(training["steps"] * report["step_time_s"] / 86400)
    million = report["search"]["best"]["price_per_million_tokens"]
    assert training["cost"] == pytest.approx(million * TOKENS / 1e6, rel=1e-3)
    cheapest = json_of("search", *flags, "--objective=cost")
    assert cheapest["search"]["best"]["price_per_million_tokens"] <= million


def test_prices_of_two_node_kinds_belong_in_the_file(tmp_path):
    (tmp_path / "machine.yaml").write_text(MACHINE)
    flags = [*without(LAYOUT, "hardware"), "--hardware", str(tmp_path / "machine.yaml")]
    (line,) = refusal("predict", *flags, "--price-per-hour=33")
    assert "write price_per_hour into each group of the hardware file" in line
