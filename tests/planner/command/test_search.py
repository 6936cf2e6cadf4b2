"""search as a user runs it: answers, pinned fields, what it writes, and what it refuses."""

import json
import re
import shlex

import pytest

from megapipe.config.load import parse
from megapipe.layout.validation import run_problems
from tests.planner.command.plan import LARGE, MODELS, SEARCH, json_of, output, refusal

LENGTH = ["--data.sequence_length=2048"]
PINS = ["--parallel.tensor=2", "--zero.stage=1", "--schedule.name=1f1b", "--parallel.pipeline=4"]
"""Fields that leave little to search."""
SMALL = ["--model", str(MODELS / "gpt2_124m.yaml"), "--hardware=h100", "--devices=2", "--batch.global_size=16"]
SMALL += ["--data.sequence_length=1024", "--parallel.data=2", "--zero.stage=1"]
"""A search that takes no time."""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of all files that the search of `answer` writes."""
    return tmp_path_factory.mktemp("search")


@pytest.fixture(scope="module")
def answer(written):
    """The JSON of a search; one for the module, because a search takes seconds."""
    files = [f"--html={written / 'report.html'}", f"--pictures={written / 'pictures'}"]
    files.append(f"--write-config={written / 'plan.yaml'}")
    return json_of("search", *SEARCH, *LENGTH, *files)


def test_answers_fit_and_are_fastest_of_ranking_and_front(answer):
    layout = answer["layout"]
    assert layout["data"] * layout["tensor"] * layout["pipeline"] * layout["context"] == 16
    assert answer["fits"] is True
    assert len(answer["memory_bytes"]) == layout["pipeline"]
    assert max(answer["memory_bytes"]) <= answer["memory_limit_bytes"] == 76e9
    assert answer["tokens_per_s_per_device"] == pytest.approx(64 * 2048 / answer["step_time_s"] / 16)
    assert answer["model_tflops_per_device"] > 0
    assert answer["search"]["examined"] <= answer["search"]["layouts"]
    assert answer["search"]["alternatives"]
    assert answer["launch"].startswith("megapipe train -n 8 --nodes 2 --rendezvous ")
    ranked = [each["step_time_s"] for each in answer["search"]["ranked"] if each["simulated"]]
    assert ranked == sorted(ranked)
    assert answer["step_time_s"] == ranked[0]
    front = [(each["step_time_s"], max(each["memory_bytes"])) for each in answer["search"]["pareto"]]
    assert front == sorted(front)
    assert [memory for _, memory in front] == sorted((memory for _, memory in front), reverse=True)


def test_the_table_says_the_same(answer, tmp_path):
    file = tmp_path / "plan.yaml"
    text = output("search", *SEARCH, *LENGTH, "--write-config", str(file))
    assert f"wrote {file}; to train with it, run on every node" in text
    assert f"--config {file} --data.prefix DATA" in text
    first = next(line for line in text.splitlines() if line.startswith("1 "))
    assert f"{answer['tokens_per_s_per_device']:,.0f}" in first
    assert f"{answer['model_tflops_per_device']:.1f}" in first
    assert "out of memory by " in text
    launch = answer["launch"].partition(" --config")[0]
    assert f"  {launch}" in text


def test_one_node_starts_its_command_once():
    text = output("search", *SMALL)
    assert "to train with it, add --write_config plan.yaml, then run\n  megapipe train -n 2 --config" in text


def test_a_planner_without_a_plan_does_not_hide_the_layouts():
    three = [*SMALL, "--devices=3", "--parallel.data=3", "--batch.global_size=18", "--per_layer"]
    text, advice = output("search", *three), json_of("search", *three)["advice"]
    assert "best layout:" in text
    assert f"\n\n{advice['per_layer']['error']}\n" in text
    assert advice["per_layer"]["error"] == "per-layer plan: devices must be a power of 2, got 3; use 2 or 4"


def test_other_planners_use_the_devices_of_the_answer():
    """At a price of 0, all numbers of devices cost the same, and the smallest is taken."""
    free = ["--parallel.data=null", "--zero.stage=0", "--schedules=1f1b", "--objective=cost", "--price_per_hour=0"]
    answer = json_of("search", *SMALL, *free, "--two_buffered")
    assert answer["layout"]["data"] == answer["advice"]["two_buffered"]["devices"] == 1


def test_a_shell_reads_the_printed_command(tmp_path):
    file = tmp_path / "my plan (1).yaml"
    text = output("search", *SMALL, "--write-config", str(file))
    command = next(line for line in text.splitlines() if line.startswith("  megapipe train"))
    assert str(file) in shlex.split(command)


def test_fields_of_a_file_and_of_flags_stay(tmp_path):
    """Sequence parallelism too, where the number of tensor ranks is open."""
    (tmp_path / "run.yaml").write_text("parallel: {pipeline: 4, data: null}\nrecompute: {method: full}\n")
    flags = ["--zero.stage=1", "--schedule.name=1f1b", "--parallel.sequence=true"]
    layout = json_of("search", "--config", str(tmp_path / "run.yaml"), *SEARCH, *LENGTH, *flags)["layout"]
    fields = ("pipeline", "recompute", "zero", "schedule", "sequence")
    assert [layout[name] for name in fields] == [4, "full", 1, "1f1b", True]
    assert layout["tensor"] > 1
    assert layout["data"] * layout["tensor"] * layout["context"] == 4


def test_long_samples_are_cut_over_context_ranks():
    """One sample a step of a small model: only context ranks can share its work."""
    model = ["--model.num_layers=4", "--model.hidden_size=512", "--model.num_heads=2", "--model.max_positions=131072"]
    asked = ["--hardware=a100-80", "--devices=8", *model, "--batch.global_size=1", "--data.sequence_length=131072"]
    report = json_of("search", *asked)
    one = json_of("search", *asked, "--parallel.context=1")
    assert report["layout"]["context"] > 1
    assert report["step_time_s"] < 0.7 * one["step_time_s"]


def test_other_schedules_are_tried_when_named():
    names = ["--schedules=zb_h1", "--parallel.pipeline=4", "--parallel.tensor=2"]
    assert json_of("search", *SEARCH, *LENGTH, *names)["layout"]["schedule"] == "zb_h1"


@pytest.mark.slow
def test_objectives_pick_the_largest_model_or_shortest_time():
    files = [str(MODELS / f"gpt3_{size}.yaml") for size in ("175b", "1.3b", "13b")]
    report = json_of("search", *SEARCH, "--objective=size", "--models", *files)["search"]
    named = {each["name"]: each["value"] for each in report["trials"]}
    assert list(named) == ["gpt3_1.3b", "gpt3_13b", "gpt3_175b"]
    text = output("search", *SEARCH, "--objective=size", "--models", *files)
    assert text.startswith("GPT of 12.9B parameters on 16 x ")
    report = json_of("search", *SEARCH, "--objective=time", "--tokens=1e9")
    days = {each["name"]: each["value"] for each in report["search"]["trials"] if each["value"] is not None}
    assert days["16 devices"] == min(days.values())


@pytest.mark.slow
def test_other_planners_are_asked_on_demand():
    flags = ["--per-layer", "--two-buffered", "--partition"]
    advice = json_of("search", *SEARCH, *flags)["advice"]
    assert set(advice) == {"per_layer", "two_buffered", "partition"}
    assert advice["two_buffered"]["width"] * advice["two_buffered"]["depth"] <= 16
    text = output("search", *SEARCH, *flags)
    assert "this is a paper's method; megapipe can train it only if" in text
    assert f"depth {advice['two_buffered']['depth']}, width {advice['two_buffered']['width']}, " in text
    assert f"stage 0: embedding to {advice['partition']['stages'][0]['layers'][1]}, " in text
    assert "by its model, which ignores memory; megapipe trains it if it fits and" in text
    layers = [layer["name"] for stage in advice["per_layer"]["stages"] for layer in stage["layers"]]
    assert layers[0] == "embedding"
    assert "embedding" in text
    assert "head: " in text


def test_speeds_without_a_known_efficiency_are_called_bounds():
    nominal = [each.replace("a100-80", "b200") for each in SEARCH]
    assert "is unknown, so its speeds are upper bounds" in output("search", *nominal, *PINS, "--top=1")
    assert "upper bounds" not in output("search", *SEARCH, *PINS, "--top=1")


def test_the_written_configuration_is_the_plan_and_runs(answer, written):
    file = written / "plan.yaml"
    config = parse(["--config", str(file)])
    assert run_problems(config, 16) == []
    assert config.training.precision == "bf16"
    assert config.model == parse(["--model", LARGE]).model
    again = json_of("predict", "--config", str(file), "--hardware", "a100-80", "--devices", "16")
    assert again["layout"] == answer["layout"]
    assert again["step_time_s"] == pytest.approx(answer["step_time_s"])
    assert again["memory_bytes"] == answer["memory_bytes"]


def test_the_report_has_every_part_and_needs_nothing_else(answer, written):
    page = (written / "report.html").read_text()
    titles = ("Memory", "Time", "Speed against memory", "Terms of a step", "The best layouts", "Why others are slower")
    for title in titles:
        assert f"<h3>{title}</h3>" in page
    assert page.count("<svg") == 3
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", page)
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) == {"http://www.w3.org/2000/svg"}
    assert {each.stem for each in (written / "pictures").iterdir()} >= {"memory", "breakdown", "pareto"}


def test_the_report_names_the_model_and_one_speed(answer, written):
    page = (written / "report.html").read_text()
    title = page.partition("<h1>")[2].partition("</h1>")[0]
    assert title.startswith("GPT of 6.66B parameters on 16 x ")
    data = json.loads(page.partition('<script id="data" type="application/json">')[2].partition("</script>")[0])
    figures = {name: value for name, value, _ in data["figures"]}
    ranked = page.partition("<h3>The best layouts</h3>")[2]
    columns = re.findall("<th>(.*?)</th>", ranked.partition("</tr>")[0])
    cells = re.findall("<td[^>]*>(.*?)</td>", ranked.partition("<tbody>")[2].partition("</tr>")[0])
    assert figures["tokens/s/device"] == dict(zip(columns, cells, strict=True))["tokens/s/device"]
    assert float(figures["tokens/s"].replace(",", "")) == pytest.approx(
        16 * float(figures["tokens/s/device"].replace(",", "")), rel=2e-4
    )
    front = page.partition("<h3>Speed against memory</h3>")[2]
    fastest = re.findall(r">(\d[\d,]*)</text>", front.partition(">1</text>")[2])
    if figures["tokens/s"] not in fastest:
        assert "speeds are estimates" in front.partition("<svg")[0], "two speeds of one layout need an explanation"


def test_models_that_fit_nowhere_report_the_missing_memory():
    model = ["--model", str(MODELS / "gpt3_175b.yaml"), "--hardware=v100-16", "--devices=8"]
    (line,) = refusal("search", *model, "--batch.global_size=64")
    assert re.search(r"no layout fits 8 devices .* out of memory by [\d.]+ GB: .* needs [\d.]+ GB of 15.2 GB", line)
