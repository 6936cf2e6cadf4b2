"""The training benchmark runs every contestant at a tiny size and ends in one JSON object; no time is judged."""

import json
import time
from typing import Any

import pytest
import torch

from tests.support.commands import ROOT, run


def benchmark(flags: str = "") -> dict[str, Any]:
    output = run(f"python benchmarks/train_step.py --device cpu --models toy --repeats 2 {flags}", 400)
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    return report


@pytest.mark.slow
def test_every_contestant_and_the_pipeline_run() -> None:
    report = benchmark()
    (model,) = report["models"]
    assert set(model["contestants"]) == {"megapipe", "plain torch", "transformers"}
    assert all(rate["tokens_per_second"] > 0 and rate["mfu"] > 0 for rate in model["contestants"].values())
    ours = model["contestants"]["megapipe"]["tokens_per_second"]
    assert report["summary"].startswith(f"toy: {ours:,.0f} tokens/s")
    assert set(report["pipeline"]["contestants"]) == {"two ranks, 1f1b", "one rank"}


@pytest.mark.exhaustive
def test_compiled_contestants_run() -> None:
    (model,) = benchmark("--compile --precision bf16")["models"]
    expected = {"megapipe", "megapipe, compiled", "plain torch, compiled", "transformers, compiled"}
    assert set(model["contestants"]) == expected


@pytest.mark.slow
def test_one_by_one_reports_failures_and_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from benchmarks.train_step_contest.timing import one_by_one

    def impossible() -> Any:
        raise RuntimeError("out of memory\nat some length")

    makers = {"large": impossible, "small": lambda: lambda: None}
    seconds, failures = one_by_one(makers, torch.device("cpu"), 3)
    assert failures == {"large": "RuntimeError: out of memory"}
    assert [*seconds] == ["small"]
    assert len(seconds["small"]) == 3


@pytest.mark.slow
def test_one_by_one_stops_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from benchmarks.train_step_contest.timing import WARM_UP, one_by_one

    steps: list[float] = []
    counts: list[tuple[int, int]] = []
    deadline = time.monotonic() + 2.0

    def until_the_time_is_up() -> None:
        steps.append(time.sleep(max(0.0, deadline - time.monotonic()) + 0.01) or 0.0)

    makers = {"first": lambda: until_the_time_is_up, "second": lambda: lambda: None}
    seconds, failures = one_by_one(
        makers, torch.device("cpu"), 50, deadline, lambda done, lost: counts.append((len(done), len(lost)))
    )
    assert len(seconds["first"]) == 2, "the number that quartiles need, though the time was up"
    assert len(steps) == WARM_UP + 2
    assert failures == {"second": "TimeoutError: the time was up"}
    assert counts == [(1, 0), (1, 1)]
