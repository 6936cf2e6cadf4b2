"""What a configuration of watchdog, spikes and reliability may be."""

import re
from dataclasses import replace
from typing import Any

import pytest

from megapipe.config.load import parse
from megapipe.config.run import PretrainConfig


@pytest.mark.parametrize(
    ("group", "fields", "problem"),
    [
        ("watchdog", {"floor_seconds": 0.0}, "watchdog.floor_seconds is 0.0; it must be finite and above 0"),
        ("watchdog", {"factor": float("inf")}, "watchdog.factor is inf"),
        ("watchdog", {"pause_seconds": -1.0}, "watchdog.pause_seconds is -1.0"),
        ("spikes", {"deviations": 0.0}, "spikes.deviations is 0.0; it must be finite and above 0, or null"),
        ("spikes", {"threshold": float("nan")}, "spikes.threshold is nan"),
        ("spikes", {"window": 3}, "spikes.window is 3; it must be at least 4, and at most the 100"),
        ("spikes", {"skip_batches": 0}, "spikes.skip_batches is 0; it must be at least 1"),
        ("spikes", {"patience": 0}, "spikes.patience is 0"),
        ("reliability", {"skip_samples": [[8, 8]]}, r"reliability.skip_samples has \[8, 8\]; a range is"),
        ("reliability", {"skip_samples": [[1, 2, 3]]}, r"reliability.skip_samples has \[1, 2, 3\]"),
        ("reliability", {"compare_every": 0}, "reliability.compare_every is 0; it must be at least 1"),
        ("reliability", {"straggler_factor": 1.0}, "reliability.straggler_factor is 1.0; it must be above 1"),
    ],
)
def test_a_wrong_value_is_named(group: str, fields: dict[str, Any], problem: str) -> None:
    config = PretrainConfig()
    config = replace(config, **{group: replace(getattr(config, group), **fields)})
    found = getattr(config, group).problems()
    assert len(found) == 1
    assert found[0] in config.problems()
    assert re.match(problem, found[0])


def test_what_needs_something_else_says_so() -> None:
    def problems(*arguments: str) -> str:
        return "\n".join(parse(arguments).problems())

    assert "there is no checkpoint to go back to" in problems("--spikes.threshold=9")
    assert "no checkpoint to go back to" not in problems("--spikes.threshold=9", "--checkpoint.every=10")
    for asked in ("--spikes.deviations=10", "--reliability.skip_samples=[[0, 8]]"):
        assert "no sample can be skipped" in problems("--data.order=megatron", asked)
    assert "adjusts its loss scale by skipping" in problems(
        "--training.precision=fp16", "--reliability.skip_non_finite=false"
    )
