"""Rows that a user has measured, from a YAML file, and the fit of a machine to them.

::

    rows:
    - name: dp2
      config: dp2.yaml           # of the run; relative to this file
      overrides: {batch.micro_size: 4}   # optional
      devices: 2
      step_seconds: 0.81
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megapipe.config.bert import BertPretrainConfig
from megapipe.config.errors import ConfigError
from megapipe.config.load import parse_as
from megapipe.config.run import PretrainConfig
from megapipe.config.untrusted import decode_yaml
from megapipe.layout.hardware.description import Hardware
from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.cost.model import estimate
from megapipe.planner.fitting.fit import FitResult, fit

FIELDS = ("name", "config", "overrides", "devices", "step_seconds", "model")
REQUIRED = ("name", "config", "devices", "step_seconds")


@dataclass(frozen=True)
class MeasuredRow:
    """A run and the seconds that its step took; its speed is in tokens per second."""

    name: str
    config: PretrainConfig
    devices: int
    step_seconds: float
    source: str

    def predict(self, hardware: Hardware) -> Estimate:
        """The run on a machine, whether it fits or not: it has run."""
        return estimate(self.config, hardware, world_size=self.devices)

    def speeds(self, estimate: Estimate) -> tuple[float, float]:
        """Predicted and measured tokens per second."""
        predicted = estimate.tokens_per_second
        return predicted, predicted * estimate.step_seconds / self.step_seconds


def fit_rows(path: str, hardware: Hardware) -> FitResult:
    """Fit a machine to the rows of a file; see the head of this module. Raises ConfigError for all that is wrong."""
    rows = read_rows(path)
    return fit(rows, hardware, leave_one_out=True)


def read_rows(path: str) -> tuple[MeasuredRow, ...]:
    """The rows of a file. Raises ConfigError that names every wrong row."""
    try:
        content = decode_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"rows file {path!r} cannot be read: {error}; choose a readable YAML file") from None
    rows = content.get("rows") if isinstance(content, Mapping) else None
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"rows file {path!r} has no list `rows`; write `rows:` and one `- ` item for each run")
    problems: list[str] = []
    found = []
    for index, row in enumerate(rows):
        wrong = _row_problems(row)
        if not wrong:
            try:
                found.append(_row(row, Path(path)))
            except ConfigError as error:
                wrong = list(error.problems)
        problems += [f"{path}: rows[{index}] {problem}" for problem in wrong]
    if problems:
        raise ConfigError(problems)
    return tuple(found)


def _row_problems(row: Any) -> list[str]:
    if not isinstance(row, Mapping):
        return [f"is {row!r}, but must be a mapping with {', '.join(REQUIRED)}"]
    problems = [f"has an unknown key {key!r} (known: {', '.join(FIELDS)})" for key in row if key not in FIELDS]
    problems += [f"lacks {key}; add it" for key in REQUIRED if key not in row]
    devices, seconds = row.get("devices", 1), row.get("step_seconds", 1.0)
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        problems.append(f"has devices {devices!r}; it must be a whole number of at least 1")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        problems.append(f"has step_seconds {seconds!r}; it must be a number above 0, such as 0.81")
    if not isinstance(row.get("overrides", {}), Mapping):
        problems.append(f"has overrides {row['overrides']!r}; it must be a mapping such as {{batch.micro_size: 4}}")
    if row.get("model", "gpt") not in ("gpt", "bert"):
        problems.append(f"has model {row['model']!r}; it must be gpt or bert")
    return problems


def _row(row: Mapping[str, Any], origin: Path) -> MeasuredRow:
    kind = BertPretrainConfig if row.get("model", "gpt") == "bert" else PretrainConfig
    overrides = [f"--{name}={value}" for name, value in row.get("overrides", {}).items()]
    config = parse_as(kind, ["--config", str(origin.parent / str(row["config"])), *overrides])
    return MeasuredRow(str(row["name"]), config, row["devices"], float(row["step_seconds"]), f"measured, {origin}")
