"""profile.trace: the files in the folder afterwards, for windows, layouts and schedules of every kind."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.config.run import PretrainConfig
from megapipe.engine.step import EngineError
from megapipe.parallel.mesh import Mesh
from megapipe.schedules.command.main import main
from megapipe.schedules.measured.traces import read_rank, read_run
from megapipe.training.observe.traces import Profiler
from tests.support.gpt_runs import GPT2_SHAPE, make_config, opened
from tests.support.launch import launch
from tests.support.meshes import run_threads


def trained(mesh: Mesh, config: PretrainConfig, steps: int, drain_after: int) -> tuple[list[str], list[Tensor]]:
    """Feed the engine as the loop does, draining once on the way, and return the printed lines and the weights."""
    sizes = mesh.shape.sizes
    parallel = replace(config.parallel, data=sizes["data"], pipeline=sizes["pipeline"], timeout_seconds=30.0)
    config = replace(config, parallel=parallel)
    replica, given = opened(mesh, config)
    said: list[str] = []
    with Profiler(config, mesh, said.append, 0) as profiler:
        for step in range(steps):
            profiler.before(step, replica.engine)
            replica.engine.feed(given(step))
            if step == drain_after:
                replica.engine.drain()
        replica.engine.drain()
    return said, [state.master.clone() for state in replica.states()]


def traced(folder: Path, corpus: str, sizes: dict[str, int], name: str, **how: Any) -> list[tuple[list[str], Any]]:
    """groups: other groups of the configuration."""
    config = make_config(
        corpus,
        replace(GPT2_SHAPE, num_layers=3),
        batch={"global_size": 4 * sizes.get("data", 1)},
        schedule={"name": name},
        profile={"trace": str(folder), **how.pop("profile", {})},
        **how.pop("groups", {}),
    )
    return run_threads(sizes, trained, config, how.get("steps", 6), how.get("drain_after", -1))


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("1f1b", 3),
        ("2bw", 1),
        pytest.param("zb_v", 1, marks=pytest.mark.exhaustive),
        pytest.param("2bw", 3, marks=pytest.mark.exhaustive),
    ],
)
def test_the_window_holds_the_steps_that_were_asked_for(tmp_path: Path, corpus: str, name: str, first: int) -> None:
    results = traced(tmp_path, corpus, {"pipeline": 2}, name, profile={"first_step": first, "steps": 3})
    traces = [read_rank(tmp_path / f"rank-{rank}.json") for rank in range(2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.json", "rank-1.json", "schedule.txt"]
    assert results[0][0] == [f"traced steps {first} to {first + 2}: megapipe schedule overlay {tmp_path}"]
    for trace in traces:
        assert {event.step + 1 for event in trace.events} == set(range(first, first + 3))
        assert trace.layout["pipeline"] == 2
        assert trace.about["schedule"] == name
        assert trace.about["model"]["num_layers"] == 3
        assert trace.about["versions"]["torch"] == torch.__version__
    run = read_run(tmp_path)
    assert len(run.recorded) == (4 if name == "2bw" and first == 1 else 3)  # the first step has a prologue of its own


@pytest.mark.parametrize("name", [pytest.param("1f1b", marks=pytest.mark.exhaustive), "2bw"])
def test_tracing_changes_no_weight(tmp_path: Path, corpus: str, name: str) -> None:
    with_trace = traced(tmp_path, corpus, {"pipeline": 2}, name)
    without = traced(tmp_path, corpus, {"pipeline": 2}, name, profile={"trace": None})
    for (_, weights), (said, expected) in zip(with_trace, without, strict=True):
        assert said == []
        assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def test_a_drain_within_the_window_splits_it(tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    traced(tmp_path, corpus, {"pipeline": 2}, "2bw", profile={"first_step": 2, "steps": 4}, drain_after=2)
    episodes = [[(each.section, each.step) for each in episode] for episode in read_run(tmp_path).episodes]
    assert episodes == [[("body", 1), ("epilogue", 2)], [("prologue", 3), ("body", 3), ("body", 4)]]
    assert main(["overlay", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == [4, 5]


def test_every_replica_of_the_pipeline_can_be_shown(
    tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    traced(tmp_path, corpus, {"pipeline": 2, "data": 2}, "1f1b")
    for pipeline in (0, 1):
        assert main(["overlay", str(tmp_path), "--json", "--pipeline", str(pipeline)]) == 0
        assert len(json.loads(capsys.readouterr().out)["ranks"]) == 2
    assert main(["overlay", str(tmp_path), "--pipeline", "2"]) == 2
    assert "the run had 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "groups",
    [
        {"offload": {"activations": "auto", "memory": 1.0, "optimizer": True, "weights": True}},
        pytest.param({"recompute": {"method": "full"}}, marks=pytest.mark.exhaustive),
    ],
    ids=lambda groups: next(iter(groups)),
)
def test_traces_of_moved_and_recomputed_blocks_are_laid_over(
    tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str], groups: dict[str, Any]
) -> None:
    traced(tmp_path, corpus, {"pipeline": 2}, "1f1b", groups=groups)
    assert main(["overlay", str(tmp_path), "-o", str(tmp_path / "overlay.html")]) == 0
    output = capsys.readouterr().out
    assert ": measured over predicted" in output
    assert ("recompute" in output) == ("recompute" in groups)


def test_runs_that_end_early_keep_what_was_traced(tmp_path: Path, corpus: str) -> None:
    late, never = tmp_path / "late", tmp_path / "never"
    (said, _), _ = traced(late, corpus, {"pipeline": 2}, "1f1b", profile={"first_step": 5, "steps": 10})
    assert said[0].startswith("traced steps 5 to 6:")
    (said, _), _ = traced(never, corpus, {"pipeline": 2}, "1f1b", profile={"first_step": 9})
    assert said == ["profile.trace: the run ended before step 9, the first step to trace"]
    assert not never.exists()


def test_failed_runs_keep_their_trace_and_error(tmp_path: Path, corpus: str) -> None:
    def failing(mesh: Mesh) -> None:
        config = make_config(corpus, GPT2_SHAPE, profile={"trace": str(tmp_path), "first_step": 1})
        config.parallel = replace(config.parallel, pipeline=1, data=1)
        replica, given = opened(mesh, config)
        with Profiler(config, mesh, lambda line: None, 0) as profiler:
            profiler.before(0, replica.engine)
            replica.engine.feed(given(0))
            profiler.before(1, replica.engine)
            second = given(1)
            broken = [replace(context, tokens=context.tokens + 10_000) for context in second.contexts]
            replica.engine.feed(replace(second, contexts=broken))

    with pytest.raises(EngineError, match="step 1, action"):
        run_threads({}, failing)
    assert {each.step for each in read_run(tmp_path).recorded} == {0}


def test_an_unwritable_folder_costs_the_trace_alone(
    tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    results = traced(tmp_path / "file", corpus, {"pipeline": 2}, "1f1b")
    assert len(results) == 2
    assert "warning: rank 1 could not write its trace to" in capsys.readouterr().err


@pytest.mark.slow
def test_a_launched_run_is_traced_and_laid_over(
    tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--parallel.pipeline=2", "--schedule.name=2bw", "--training.steps=6", "--profile.trace=trace"]
    done = launch(2, f"--data.prefix={corpus}", *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "traced steps 3 to 5: megapipe schedule overlay trace" in done.stdout
    assert main(["overlay", str(tmp_path / "trace"), "-o", str(tmp_path / "overlay.html")]) == 0
    assert "steps 3 to 5: measured over predicted" in capsys.readouterr().out
    assert (tmp_path / "overlay.html").stat().st_size > 10_000
