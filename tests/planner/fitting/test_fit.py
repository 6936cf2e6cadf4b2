"""Fits compared with the truth that rows were made from, and with the published tables; rows of a user's file."""

from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
import yaml

from megapipe.config import ConfigError
from megapipe.config.load import parse
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware, load_hardware
from megapipe.planner.cost.model import estimate
from megapipe.planner.fitting import (
    PARAMETERS,
    TABLES,
    WIDTH,
    Belief,
    FitResult,
    Floats,
    MeasuredRow,
    Prior,
    fit,
    fit_parameters,
    fit_table,
    judge,
    prior_of,
    read_rows,
    report_lines,
    with_shares,
)
from tests.docs.figures.cost_model import fitted
from tests.planner.cost.runs import SMALL, config_of

TRUTH = {"ceiling": 0.62, "memory": 0.45, "links": 0.8}


def row(config: PretrainConfig, devices: int) -> MeasuredRow:
    """A row whose speed the cost model itself gave."""
    truth = with_shares(load_hardware("a100-80"), TRUTH)
    seconds = estimate(config, truth, world_size=devices).step_seconds
    return MeasuredRow(f"{devices} devices", config, devices, seconds, "made up")


def made_up() -> list[MeasuredRow]:
    """Bound by products, by updates, by links inside a node and between nodes."""
    runs = [({}, 64), ({}, 1), ({"tensor": 8}, 64), ({"data": 16}, 64), ({"pipeline": 4}, 64), ({"tensor": 4}, 32)]
    return [
        row(config_of(SMALL, parallel=dict(parallel), batch={"global_size": batch}), prod(parallel.values()))
        for parallel, batch in runs
    ]


@pytest.fixture(scope="module")
def result() -> FitResult:
    """A fit to five rows, which also predicts the sixth."""
    return fit(made_up()[:5], load_hardware("a100-80"), made_up()[5:], leave_one_out=False)


def test_the_truth_that_rows_were_made_with_is_found(result: FitResult) -> None:
    """Speeds to 0.5%, also of a row that it was not fitted to."""
    for parameter in PARAMETERS:
        assert 0 < parameter.low < parameter.start < parameter.high == 1
        assert getattr(result.efficiency, parameter.name) == pytest.approx(TRUTH[parameter.name], rel=0.03)
    assert result.worst_error < 5e-3
    assert abs(result.unfitted[0].error) < 5e-3


def test_too_few_or_unknown_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown rows 'sc20'; did you mean 'sc21'"):
        fit_table("sc20")
    with pytest.raises(ConfigError, match=r"3 rows given: 3 parameters .* need 4 or more"):
        fit(made_up()[:3], load_hardware("a100-80"))


@pytest.mark.parametrize("name", TABLES)
def test_presets_predict_fitted_and_other_rows(name: str) -> None:
    """The goal: on average within 4%, each within 8%. Every row is assumed to be interleaved if it has a pipeline,
    with the sizes of the table, and it fits the memory of its machine."""
    table = TABLES[name]
    hardware = load_hardware(table.hardware)
    for rows in filter(None, (table.rows, table.unfitted)):
        results = [judge(row, hardware) for row in rows]
        errors = [abs(result.error) for result in results]
        assert len(errors) == 5
        assert sum(errors) / len(errors) <= 0.04
        assert max(errors) <= 0.08
        for row, result in zip(rows, results, strict=True):
            config = result.estimate.config
            assert result.estimate.fits
            assert result.estimate.world_size == row.devices
            assert (config.parallel.tensor, config.parallel.pipeline) == (row.tensor, row.pipeline)
            assert config.batch.global_size == row.batch
            assert config.schedule.name == ("interleaved_1f1b" if row.pipeline > 1 else "1f1b")


def test_a_row_that_fits_no_device_is_reported() -> None:
    hardware = load_hardware("a100-80")
    (group,) = hardware.groups
    tiny = replace(hardware, groups=(replace(group, device=replace(group.device, memory_bytes=1e9)),))
    with pytest.raises(ConfigError, match=r"row 1\.7B: none of 4 layouts fits the memory of 'A100-80'"):
        TABLES["sc21"].rows[0].predict(tiny)


def test_the_report_names_parameters_rows_and_errors(result: FitResult) -> None:
    lines = list(report_lines(result, "steps/s"))
    assert lines[0].startswith("3 free parameters of A100-80: ceiling 0.")
    assert [line.split()[:2] for line in lines[2:5]] == [[each.name, "unknown"] for each in PARAMETERS]
    assert "left out" in lines[5]
    assert lines[11] == f"mean error {result.mean_error:.1%}, worst {result.worst_error:.1%}"
    assert lines[12] == "not fitted, only predicted:"
    assert len(lines) == 14
    as_json = result.as_json()
    assert as_json["parameters"].keys() == as_json["standard_deviations"].keys() == {"ceiling", "memory", "links"}
    assert [row["leave_one_out_error"] for row in as_json["rows"]] == [None] * 5
    assert as_json["prior"] is as_json["leave_one_out_mean_error"] is as_json["leave_one_out_worst_error"] is None


def test_the_report_names_priors_and_left_out_rows() -> None:
    prior = prior_of("a100-80")
    result = fit(made_up()[:4], load_hardware("a100-80"), prior=prior)
    lines = list(report_lines(result, "steps/s"))
    for line, (name, belief) in zip(lines[2:5], prior.beliefs.items(), strict=True):
        assert line.split()[:3] == [name, f"{belief.mean:.3f}", "+-"]
        assert line.endswith(belief.origin)
    left_out = [abs(row.left_out or 0.0) for row in result.fitted]
    assert lines[-1] == f"left out: mean error {sum(left_out) / 4:.1%}, worst {max(left_out):.1%}"
    as_json = result.as_json()
    assert as_json["leave_one_out_worst_error"] == max(left_out)
    assert as_json["prior"]["shares"]["memory"]["mean"] == prior.beliefs["memory"].mean


def test_a_share_that_rows_do_not_determine_is_named() -> None:
    """One device has no links: their share was not fitted, and its prior stays."""
    alone = [row(config_of(SMALL, batch={"global_size": size}), 1) for size in (1, 2, 4, 8, 16)]
    result = fit(alone, load_hardware("a100-80"), leave_one_out=False)
    assert np.isinf(result.spreads[2])
    assert result.as_json()["standard_deviations"]["links"] is None
    assert ", not determined" in list(report_lines(result, "steps/s"))[4]
    prior = prior_of("a100-80")
    known = fit(alone, load_hardware("a100-80"), prior=prior, leave_one_out=False)
    assert known.efficiency.links == pytest.approx(prior.beliefs["links"].mean, rel=1e-2)
    assert known.spreads[2] / known.efficiency.links == pytest.approx(prior.width, rel=0.1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TABLES)
def test_presets_are_the_fit_and_predict_left_out_rows(name: str) -> None:
    """The goal for rows predicted from the others alone: on average within 4%, each within 8%."""
    result = fitted(name)
    preset = load_hardware(TABLES[name].hardware).groups[0].device.efficiency
    for parameter in PARAMETERS:
        assert getattr(result.efficiency, parameter.name) == pytest.approx(getattr(preset, parameter.name), abs=0.01)
    assert len(result.left_out_errors) == 5
    assert sum(result.left_out_errors) / 5 <= 0.04
    assert max(result.left_out_errors) <= 0.08


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TABLES)
def test_another_prior_predicts_left_out_rows_too(name: str) -> None:
    """Half as wide, and with all kernels as fast as a plain copy: nothing of the real one is tuned to the rows."""
    table = TABLES[name]
    beliefs = {**prior_of(table.hardware).beliefs, "memory": Belief(0.9, "a copy")}
    result = fit(table.rows, load_hardware(table.hardware), prior=Prior(beliefs, WIDTH / 2))
    assert result.worst_error <= 0.08
    assert result.mean_error <= 0.04
    assert max(result.left_out_errors) <= 0.08
    assert sum(result.left_out_errors) / 5 <= 0.05


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "squares", "too_fast"),
    [("sc21", (0.0079, 0.0022, 0.0007), 0.09), ("h100", (0.0041, 0.0030, 0.0025), 0.10)],
)
def test_rows_without_the_smallest_model_bound_memory(name: str, squares: tuple[float, ...], too_fast: float) -> None:
    """Why there is a prior: the other rows fit the better the more of its bandwidth memory reaches."""
    rows, hardware = TABLES[name].rows, load_hardware(TABLES[name].hardware)
    others = [parameter for parameter in PARAMETERS if parameter.name != "memory"]

    def machine(memory: float, point: Floats) -> Hardware:
        shares = dict(zip([each.name for each in others], map(float, point), strict=True))
        return with_shares(hardware, {**shares, "memory": memory})

    def best(memory: float) -> tuple[float, Hardware]:
        def errors(point: Floats) -> Floats:
            return np.log1p([judge(row, machine(memory, point)).error for row in rows[1:]])

        point = fit_parameters(errors, others).point
        return float(np.sum(errors(point) ** 2)), machine(memory, point)

    losses = [best(memory) for memory in (0.5, 0.75, 1.0)]
    assert [left for left, _ in losses] == pytest.approx(squares, abs=1e-4)
    assert judge(rows[0], losses[-1][1]).error == pytest.approx(too_fast, abs=0.01)


RUN = """
model: {num_layers: 8, hidden_size: 2048, num_heads: 16, vocabulary_size: 50304, max_positions: 1024}
data: {sequence_length: 1024}
batch: {global_size: 64}
training: {precision: bf16}
"""


def write(folder: Path, change: dict[str, object] | None = None) -> str:
    """A file of two rows; change: of fields of row 1."""
    (folder / "run.yaml").write_text(RUN)
    rows: list[dict[str, object]] = [
        {"name": "one", "config": "run.yaml", "devices": 1, "step_seconds": 1.0},
        {"name": "two", "config": "run.yaml", "devices": 2, "step_seconds": 0.5, "overrides": {"parallel.tensor": 2}},
    ]
    rows[1].update(change or {})
    (folder / "rows.yaml").write_text(yaml.safe_dump({"rows": rows}))
    return str(folder / "rows.yaml")


def test_rows_of_a_file_are_fitted(tmp_path: Path) -> None:
    one, two = read_rows(write(tmp_path))
    run = parse(["--config", str(tmp_path / "run.yaml")])
    assert (one.name, one.config, one.devices, one.step_seconds) == ("one", run, 1, 1.0)
    shared = replace(run, parallel=replace(run.parallel, tensor=2))
    assert (two.name, two.config, two.devices, two.step_seconds) == ("two", shared, 2, 0.5)
    with pytest.raises(ConfigError, match="2 rows given: 3 parameters"):
        fit(read_rows(str(tmp_path / "rows.yaml")), load_hardware("h100"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": 0}, r"rows\.yaml:7: rows\[1\]\.devices is 0, but must be at least 1"),
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
        (None, r"cannot read .*rows\.yaml: No such file or directory; choose a YAML file with measured rows"),
    ],
)
def test_a_wrong_file_is_refused_with_the_row(
    tmp_path: Path, change: dict[str, object] | str | None, message: str
) -> None:
    file = tmp_path / "rows.yaml"
    if isinstance(change, dict):
        write(tmp_path, change)
    elif change is not None:
        file.write_text(change)
    with pytest.raises(ConfigError, match=message):
        read_rows(str(file))
