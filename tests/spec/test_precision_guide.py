"""The figures of docs/precision.md and docs/optimizers.md are those of the formulas."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.units import Unit, UnitCosts, num_moments
from megapipe.spec.parameters import Init, ParameterSpec

DOCS = Path(__file__).parents[2] / "docs"
SPEC = ParameterSpec("w", (64, 64), None, Init("normal", 1.0), decay=True, matrix=True)


@pytest.mark.parametrize(
    ("row", "precision", "fields"),
    [
        ("`precision fp32`", "fp32", {}),
        ("`precision bf16`", "bf16", {}),
        ("`precision fp16`", "fp16", {}),
        ("`precision bf16`, `master_weights false`", "bf16", {"master_weights": False}),
        ("the same, `optimizer.moment_dtype bf16`", "bf16", {"master_weights": False, "moments": "bf16"}),
    ],
)
def test_bytes_of_a_parameter(row: str, precision: Any, fields: dict[str, Any]) -> None:
    config = PretrainConfig(optimizer=OptimizerConfig(moment_dtype=fields.get("moments", "fp32")))
    config.training = replace(config.training, precision=precision, master_weights=fields.get("master_weights", True))
    found = re.search(rf"^\| {re.escape(row)} \| (\d+) \|", (DOCS / "precision.md").read_text(), re.M)
    assert found is not None
    assert int(found[1]) * SPEC.num_elements == UnitCosts(config, replicas=1).state(Unit((SPEC,))).total


def test_moments_of_optimizers() -> None:
    guide = (DOCS / "optimizers.md").read_text()
    muon = OptimizerConfig(name="muon")
    matrices, rest = num_moments(muon, matrix=True), num_moments(muon)
    assert f"| `muon` | {4 * matrices} for hidden matrices, {4 * rest} for the rest |" in guide
    assert f"| `adamw` | {4 * num_moments(OptimizerConfig())}; 4 with `optimizer.moment_dtype bf16` |" in guide
