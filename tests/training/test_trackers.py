"""TensorBoard and Weights & Biases: records can be read back, and wandb never asks the user."""

import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megapipe.config.run import PretrainConfig
from megapipe.training.observe.listeners import (
    Listeners,
    TensorBoard,
    WeightsAndBiases,
    add_trackers,
    step_scalars,
    wandb_mode,
)
from megapipe.training.observe.records import RANKS, TIME_PARTS
from tests.training.records import evaluation_record, step_record

LOADS = {"expert_load_variations": [0.25, 0.75]}


def configuration(directory: Path) -> PretrainConfig:
    config = PretrainConfig()
    config.training = replace(config.training, directory=str(directory))
    config.tracking = replace(config.tracking, wandb_project="megapipe-test")
    return config


def test_tensorboard_reads_back_every_curve(tmp_path: Path) -> None:
    for steps in ((1, 2), (3,)):  # the second one is a resumed run
        tracker = TensorBoard(tmp_path)
        for step in steps:
            tracker.step(step_record(step, **LOADS))
        tracker.event(RANKS, step=steps[-1], **{part: [0.25, 0.75] for part in TIME_PARTS}, peak_bytes=[1000, 3000])
        tracker.event("checkpoint", step=steps[-1], path="somewhere")
        tracker.evaluation(evaluation_record(steps[-1]))
        tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    for name, value in step_scalars(step_record(3, **LOADS)).items():
        assert [event.step for event in events.Scalars(name)] == [1, 2, 3]
        assert events.Scalars(name)[-1].value == pytest.approx(value, rel=1e-6)
    assert [event.step for event in events.Scalars("validation/loss")] == [2, 3]
    assert [event.step for event in events.Scalars("step_time/waiting")] == [2, 3]
    assert events.Scalars("step_time/backward")[0].value == 0.5, "mean over ranks"
    assert [events.Scalars(f"memory/rank_{rank}_peak_bytes")[0].value for rank in (0, 1)] == [1000, 3000]
    assert "speed/data_seconds" in step_scalars(step_record(1))
    assert events.Scalars("experts/mean_load_variation")[0].value == 0.5
    assert events.Scalars("experts/worst_load_variation")[0].value == 0.75


def test_no_tracker_unless_asked_for(tmp_path: Path) -> None:
    config, listeners = configuration(tmp_path), Listeners()
    add_trackers(listeners, replace(config, tracking=replace(config.tracking, wandb_project="")), resumed=False)
    assert listeners._lanes == {}


@pytest.fixture
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(file))
    return file


def test_wandb_is_online_with_an_account(no_account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wandb_mode() == "offline"
    for host, mode in (("elsewhere.example", "offline"), ("api.wandb.ai", "online")):
        no_account.write_text(f"machine {host} login user password secret\n")
        assert wandb_mode() == mode
    no_account.unlink()
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert wandb_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode() == "disabled"


@pytest.mark.slow
def test_an_unreachable_wandb_costs_a_run_nothing(
    no_account: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")

    def run() -> None:
        start = time.monotonic()
        listeners = Listeners()
        add_trackers(listeners, configuration(tmp_path), resumed=False)
        for step in range(1, 100):
            listeners.step(step_record(step))
        started = time.monotonic() - start
        listeners.close(seconds=0.1)
        os._exit(0 if started < 5 and time.monotonic() - start < 10 else 1)

    # Its thread goes on trying for more than a minute, and would disturb wandb in other tests of this process.
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(60)
    assert process.exitcode == 0, "it starts in the background"


@pytest.mark.slow
@pytest.mark.usefixtures("no_account")
def test_an_offline_run_stays_in_the_folder_and_continues(tmp_path: Path) -> None:
    lines: list[str] = []
    config = configuration(tmp_path / "run")
    first = WeightsAndBiases(config, resumed=False, say=lines.append)
    first.step(step_record(1))
    first.evaluation(evaluation_record(1))
    first.close()
    identity = (tmp_path / "run/wandb-run-id").read_text().strip()
    assert f"offline run {identity}" in lines[0]
    assert list((tmp_path / "run/wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb"))
    WeightsAndBiases(config, resumed=True, say=lines.append).close()
    assert f"offline run {identity}" in lines[1]
    WeightsAndBiases(config, resumed=False, say=lines.append).close()
    assert (tmp_path / "run/wandb-run-id").read_text().strip() != identity
