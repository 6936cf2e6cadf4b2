"""Rows from a user's file: fits to them, and errors of wrong rows."""

import re
from pathlib import Path

import pytest
import yaml

from megapipe.config import ConfigError
from megapipe.config.load import parse
from megapipe.layout.hardware.description import load_hardware
from megapipe.planner.cost.model import estimate
from megapipe.planner.fitting import fit_rows, read_rows, report_lines, with_shares

RUN = """
model: {num_layers: 8, hidden_size: 2048, num_heads: 16, vocabulary_size: 50304, max_positions: 1024}
data: {sequence_length: 1024}
batch: {global_size: 64}
training: {precision: bf16}
"""
TRUTH = {"ceiling": 0.6, "memory": 0.5, "links": 0.7}


ROWS: list[tuple[int, dict[str, int]]] = [
    (1, {}),
    (2, {"parallel.tensor": 2}),
    (8, {"parallel.tensor": 8}),
    (4, {"batch.micro_size": 4}),
    (16, {"parallel.pipeline": 2}),
]
"""Devices and what is changed of the run."""


@pytest.fixture(scope="module")
def seconds(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the cost model's times of the rows on a machine of known efficiency."""
    run = tmp_path_factory.mktemp("run") / "run.yaml"
    run.write_text(RUN)
    truth = with_shares(load_hardware("h100"), TRUTH)
    times = []
    for devices, overrides in ROWS:
        config = parse(["--config", str(run), *(f"--{key}={value}" for key, value in overrides.items())])
        times.append(estimate(config, truth, world_size=devices).step_seconds)
    return times


def write(folder: Path, seconds: list[float], change: dict[str, object] | None = None) -> str:
    """A file of rows; change: of fields of row 1."""
    (folder / "run.yaml").write_text(RUN)
    rows = [
        {
            "name": f"row {index}",
            "config": "run.yaml",
            "devices": devices,
            "step_seconds": each,
            "overrides": changed,
        }
        for index, ((devices, changed), each) in enumerate(zip(ROWS, seconds, strict=False))
    ]
    rows[1].update(change or {})
    (folder / "rows.yaml").write_text(yaml.safe_dump({"rows": rows}))
    return str(folder / "rows.yaml")


def test_a_machine_is_fitted_to_measured_rows(tmp_path: Path, seconds: list[float]) -> None:
    found_rates = fit_rows(write(tmp_path, seconds), load_hardware("h100"))
    report = "\n".join(report_lines(found_rates, "tokens/s"))
    shares = {name: float(value) for name, value in re.findall(r"(ceiling|memory|links) (0\.\d+)", report)}
    assert shares == pytest.approx({"ceiling": 0.6, "memory": 0.5, "links": 0.7}, rel=0.03)
    assert len(re.findall(r"^row \d.*%.*%", report, re.MULTILINE)) == 5  # in sample, and left out
    assert "tokens/s" in report


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": 0}, r"rows\.yaml:8: rows\[1\]\.devices is 0, but must be at least 1"),
        ({"step_seconds": "fast"}, r"rows\[1\]\.step_seconds is fast, but must be a number above 0"),
        ({"overrides": 3}, r"rows\[1\]\.overrides is 3, but must be a mapping"),
        ({"model": "t5"}, r"rows\[1\]\.model is t5, but must be one of gpt, bert"),
        ({"speed": 3}, r"rows\[1\]\.speed is an unknown key \(known here: name, config"),
        ({"overrides": {"parallel.tensr": 2}}, r"rows\[1\] unknown configuration key 'parallel.tensr'"),
        ({"config": "gone.yaml"}, r"rows\[1\] .*gone.yaml"),
        ("", r"rows\.yaml: the file is not a mapping"),
        ("rows: 3", r"rows\.yaml:1: rows is not a list"),
        ("rows: []", r"rows\.yaml:1: rows is not a list"),
        ("- 1", r"rows\.yaml:1: the file is not a mapping"),
        ("rows: [", r"rows\.yaml is not readable YAML"),
        ("rows: [{name: a, config: b, devices: 1}]", r"rows\[0\]\.step_seconds is missing; add it"),
        ("rows: [{name: a, config: b, step_seconds: 1}]", r"rows\[0\]\.devices is missing; add it"),
        ("rows: [{name: a}, 3]", r"(?s)rows\[0\]\.config is missing; add it.*rows\[1\] is not a mapping"),
        (None, r"rows file '.*rows\.yaml' cannot be read"),
    ],
)
def test_a_wrong_file_is_refused_with_the_row(
    tmp_path: Path, change: dict[str, object] | str | None, message: str
) -> None:
    file = tmp_path / "rows.yaml"
    if isinstance(change, dict):
        write(tmp_path, [1.0, 1.0], change)
    elif change is not None:
        file.write_text(change)
    with pytest.raises(ConfigError, match=message):
        read_rows(str(file))
