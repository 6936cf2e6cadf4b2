"""Steps, days and money of a budget of tokens, by hand, and what a wrong budget or price says."""

import math

import pytest

from tests.planner.command.plan import LAYOUT, json_of, output, refusal

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


@pytest.mark.parametrize("command", ["search", "predict"])
@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--tokens=0", "--tokens is 0; it must be from 1 to 1e18"),
        ("--tokens=-5e9", "--tokens is -5,000,000,000; it must be from 1 to 1e18"),
        ("--price-per-hour=-1", "--price_per_hour is -1; it must be at least 0"),
    ],
)
def test_a_wrong_budget_is_refused(command, flag, words):
    (line,) = refusal(command, *LAYOUT, flag)
    assert words in line


def test_prices_of_two_node_kinds_belong_in_the_file(tmp_path):
    (tmp_path / "machine.yaml").write_text(MACHINE)
    flags = [each for each in LAYOUT if "hardware" not in each] + ["--hardware", str(tmp_path / "machine.yaml")]
    (line,) = refusal("predict", *flags, "--price-per-hour=33")
    assert "write price_per_hour into each group of the hardware file" in line
