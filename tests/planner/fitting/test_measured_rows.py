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
    return [
        estimate(
            parse(["--config", str(run), *(f"--{key}={value}" for key, value in overrides.items())]),
            truth,
            world_size=devices,
        ).step_seconds
        for devices, overrides in ROWS
    ]


def write(folder: Path, seconds: list[float], changes: dict[int, dict[str, object]] | None = None) -> str:
    """A file of rows; changes: by row, of its fields."""
    (folder / "run.yaml").write_text(RUN)
    rows = [
        {
            "name": f"row {index}",
            "config": "run.yaml",
            "devices": devices,
            "step_seconds": each,
            "overrides": overrides,
        }
        | (changes or {}).get(index, {})
        for index, ((devices, overrides), each) in enumerate(zip(ROWS, seconds, strict=False))
    ]
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
    ],
)
def test_errors_of_a_row_name_its_number(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_rows(write(tmp_path, [1.0, 1.0], {1: change}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"rows\.yaml: the file is not a mapping"),
        ("rows: 3", r"rows\.yaml:1: rows is not a list"),
        ("rows: []", r"rows\.yaml:1: rows is not a list"),
        ("- 1", r"rows\.yaml:1: the file is not a mapping"),
        ("rows: [", r"rows\.yaml is not readable YAML"),
    ],
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "rows.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_rows(str(tmp_path / "rows.yaml"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows file '.*gone\.yaml' cannot be read"):
        read_rows(str(tmp_path / "gone.yaml"))


def test_missing_fields_of_a_row_are_reported(tmp_path: Path) -> None:
    (tmp_path / "rows.yaml").write_text("rows: [{name: a}, 3]")
    with pytest.raises(ConfigError) as raised:
        read_rows(str(tmp_path / "rows.yaml"))
    problems = "\n".join(raised.value.problems)
    assert all(f"rows[0].{key} is missing; add it" in problems for key in ("config", "devices", "step_seconds"))
    assert "rows[1] is not a mapping" in problems
