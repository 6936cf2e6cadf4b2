"""fit, profile and train-time as a user runs them; train-time with the published figures of two papers."""

import subprocess
import sys

import pytest

from megapipe.layout.hardware.description import load_hardware
from megapipe.planner.command.train_time import Cluster, Transformer, shortest
from megapipe.planner.cost.layer_costs import MEASURED_WAITS
from megapipe.planner.fitting import TABLES
from tests.planner.command.plan import MODELS, ROOT, TRILLION, json_of, output, refusal


@pytest.mark.exhaustive
def test_published_rows_are_fitted_and_the_machine_written(tmp_path):
    name = next(iter(TABLES))
    file = tmp_path / "fitted.yaml"
    report = json_of("fit", "--published", name, "--output", str(file))
    assert len(report["parameters"]) <= 3
    assert report["mean_error"] <= 0.04
    assert all(row["leave_one_out_error"] is not None for row in report["rows"])
    efficiency = load_hardware(str(file)).groups[0].device.efficiency
    for parameter, value in report["parameters"].items():
        assert getattr(efficiency, parameter) == pytest.approx(value, rel=1e-5)


@pytest.mark.slow
def test_a_profile_is_measured_and_planned_with(tmp_path):
    file = tmp_path / "machine.yaml"
    shape = ["--model.vocabulary_size=61", "--model.num_layers=2", "--model.hidden_size=32", "--model.num_heads=4"]
    shape += ["--model.max_positions=16", "--data.sequence_length=16", "--training.precision=fp32"]
    sizes = ["--ranks=2", "--tensor_sizes=[1]", "--context_sizes=[1,2]", "--micro_sizes=[1,2]"]
    sizes.append("--parallel.device=cpu")
    program = [sys.executable, str(ROOT / "tools" / "plan.py"), "profile", *shape, *sizes, "--output", str(file)]
    finished = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert finished.returncode == 0, finished.stderr
    assert f"wrote {file}; use it with --hardware {file}" in finished.stdout
    planned = ["--hardware", str(file), "--devices=2", "--batch.global_size=4", "--batch.micro_size=2"]
    text = output("search", *shape, *planned, "--recompute.method=none", "--parallel.tensor=1")
    assert "measured 20" in text
    assert MEASURED_WAITS in output("explain", *shape, *planned, "--parallel.context=2")
    wrong = subprocess.run([*program, "--ranks=0"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: ")
    assert "Traceback" not in wrong.stderr


def test_megatron_s_estimates():
    """Narayanan et al. (2021, arXiv 2104.04473), section 5.1: 34 days for 175B parameters, 84 for 1T. The critical
    batch of GPT-3's parameters is GPT-3's."""
    small = json_of("train-time", "--parameters=175e9", "--tokens=300e9", "--devices=1024", "--achieved_tflops=140")
    assert round(small["days"], 1) == 33.9
    assert small["critical_batch_tokens"] == pytest.approx(3.2e6)
    large = json_of("train-time", "--parameters=1.008e12", "--tokens=450e9", "--devices=3072", "--achieved-tflops=163")
    assert round(large["days"], 1) == 83.9


@pytest.mark.slow
def test_each_method_s_shortest_is_the_analysis_s_own():
    report = json_of("train-time", *TRILLION, "--tokens=450e9", "--hardware=a100-80", "--devices=3072", "--bounds")
    assert [each["method"] for each in report["bounds"]] == ["3d", "sharded", "layered", "modular"]
    # 200 GB/s of adapters for 8 devices, and NVLink's 300 GB/s, a direction; the paper counts both.
    cluster = Cluster(312e12, 80e9, 600e9, 50e9, 8)
    assert report["thresholds"] == {"inside": 312e12 / 600e9, "outside": 312e12 / 50e9}
    model = Transformer(128, 25600, 160, 2048)
    for each in report["bounds"]:
        layout, seconds = shortest(
            model, cluster, each["method"], report["batch"], 450e9, max_devices=3072, least_efficiency=0.5
        )
        assert each["layout"] == vars(layout)
        assert each["days"] == pytest.approx(seconds / 86400)
        assert each["efficiency"] >= 0.5
        assert each["devices"] <= 3072


def test_the_one_time_is_the_search_s():
    model = ["--model", str(MODELS / "gpt3_1.3b.yaml"), "--data.sequence_length=2048"]
    run = [*model, "--batch.global_size=64", "--hardware=h100", "--devices=8", "--parallel.pipeline=1"]
    report = json_of("search", *run)
    days = 3e11 / (report["tokens_per_s_per_device"] * 8) / 86400
    text = output("train-time", *run, "--tokens=3e11")
    assert f" tokens: {days:.1f} days\n" in text
    assert text.count(" days") == 1
    assert text.count("not measured with megapipe") == 1
    (line,) = refusal("train-time", *run, "--tokens=3e11", "--achieved_tflops=400")
    assert "--achieved_tflops and --hardware both set the speed" in line


def test_formulas_of_dense_models_are_not_used_on_experts():
    flags = ["train-time", "--model", str(MODELS / "mixtral_8x7b.yaml"), "--tokens=1e12"]
    run = ["--devices=64", "--achieved_tflops=200"]
    (error,) = refusal(*flags, *run)
    assert "pass --parameters 12879925248, the parameters that a token uses" in error
    assert json_of(*flags, *run, "--parameters=12879925248")["days"] > 0
    assert refusal(*flags, "--hardware=h100", "--devices=64", "--bounds") != []


def test_no_more_devices_are_taken_than_the_file_has(tmp_path):
    text = (ROOT / "megapipe" / "layout" / "hardware" / "presets" / "h100.yaml").read_text()
    node = "  devices_per_node: 8\n"
    (tmp_path / "two.yaml").write_text(text.replace(node, f"{node}  num_nodes: 2\n"))
    file = MODELS / "gpt3_6.7b.yaml"
    model = ["--model", str(file), "--tokens=3e11", "--hardware", str(tmp_path / "two.yaml")]
    bounds = json_of("train-time", *model, "--devices=16", "--bounds")["bounds"]
    assert all(each["devices"] <= 16 for each in bounds if "devices" in each)
    assert any("devices" in each for each in bounds)
    (line,) = refusal("train-time", *model, "--devices=17")
    assert "17 devices are requested, but hardware" in line
