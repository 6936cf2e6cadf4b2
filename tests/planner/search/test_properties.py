"""Properties of every plan: within memory, able to run, no worse on a better machine, as fast as the authors'."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import load_hardware
from megapipe.layout.validation import run_problems
from megapipe.planner.cost.model import estimate
from megapipe.planner.fitting import A100
from megapipe.planner.search.findings import Findings, NothingFits, faster_or_slower, term_differences
from megapipe.planner.search.plan import Effort, search_speed
from megapipe.planner.search.space import Layouts, SearchSpace
from megapipe.training.validation import validate
from tests.planner.search.runs import machine, run, runs

CLOSED = Effort(actions=0, alternatives=False, stages=False)
SPACE = SearchSpace(max_micro_size=2, max_chunks=2)


@settings(max_examples=6, deadline=None)
@given(
    base=runs(),
    devices=st.sampled_from([2, 4, 8]),
    memory=st.floats(5e6, 2e8),
    pinned=st.sets(
        st.sampled_from(["parallel.tensor", "zero.stage", "recompute.method", "schedule.name"]), max_size=2
    ),
)
def test_plans_stay_within_memory_and_can_start(
    base: PretrainConfig, devices: int, memory: float, pinned: set[str]
) -> None:
    effort = Effort(actions=300, alternatives=False)
    try:
        findings = search_speed(base, machine(memory), devices, frozenset(pinned), space=SPACE, effort=effort)
    except NothingFits:
        return
    except ConfigError:
        if list(Layouts(base, devices, frozenset(pinned), SPACE)):
            raise  # only where no layout can run
        return
    proposed = (*findings.ranked, *findings.pareto)
    for each in proposed:
        assert each.estimate.peak_bytes <= memory
        assert run_problems(each.config, devices) == []
        assert each.estimate.world_size == devices
        for path in pinned:
            group, name = path.split(".")
            assert getattr(getattr(each.config, group), name) == getattr(getattr(base, group), name)
    for each in proposed[:2]:
        validate(each.config, devices)


ROWS = {run.name: run for run in (*A100.rows, *A100.unfitted)}


@pytest.mark.parametrize(
    "name",
    ["1.7B", *(pytest.param(row, marks=pytest.mark.exhaustive) for row in ("7.5B", "39.1B", "145.6B", "1008B"))],
)
def test_the_best_is_as_fast_as_the_authors_layout(name: str) -> None:
    """SC21 table 1, everything recomputed and nothing sharded there. Micro-batch size and chunks are free for them."""
    row, hardware = ROWS[name], load_hardware("a100-80")
    theirs = min(
        (estimate(each, hardware) for each in ROWS[name].candidates()),
        key=lambda each: (not each.fits, each.step_seconds),
    )
    base = replace(theirs.config, parallel=replace(theirs.config.parallel, layers_per_stage=None, data=None))
    base = replace(base, data=replace(base.data, prefix="corpus"))
    findings = search_speed(base, hardware, row.devices, effort=replace(CLOSED, slowest=0, keep=1))
    best = findings.best.estimate
    assert best.step_seconds <= theirs.step_seconds
    assert "faster in tokens per second" in faster_or_slower(best, theirs)
    assert any(line.startswith("recompute") and line.endswith("less") for line in term_differences(best, theirs))


def test_findings_count_every_layout_once() -> None:
    findings: Findings = search_speed(run(), machine(3e7), 4, space=SPACE, effort=CLOSED)
    assert findings.examined + sum(findings.pruned.values()) == findings.layouts
    assert findings.pruned["memory"] > 0
    assert findings.ranked[0].estimate.step_seconds == findings.pareto[0].estimate.step_seconds
