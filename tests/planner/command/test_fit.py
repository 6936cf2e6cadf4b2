"""fit and profile as a user runs them."""

import subprocess
import sys

import pytest

from megapipe.layout.hardware.description import load_hardware
from megapipe.planner.cost.layer_costs import MEASURED_WAITS
from megapipe.planner.fitting import TABLES
from tests.planner.command.plan import ROOT, json_of, output


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
