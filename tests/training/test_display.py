"""Output for people: plain lines without a terminal, a bar on one; MFU against its definition, and its peak."""

import io
import math
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from megapipe.config.model import ModelConfig
from megapipe.config.run import DataConfig, PretrainConfig
from megapipe.spec.layers import model_layers
from megapipe.training.observe import display as module
from megapipe.training.observe.display import (
    DevicePeak,
    LogFile,
    PlainLines,
    TrainingBar,
    UtilisationMeter,
    device_peak,
    duration,
    vital_signs,
)
from tests.training.records import evaluation_record, step_record


def test_a_duration_has_no_largest_value() -> None:
    assert duration(90_061) == "1 day, 1:01:01"
    assert duration(1e26) == duration(1e30) == "999999999 days, 23:59:59"


def test_lines_come_at_first_last_and_every_nth_step() -> None:
    lines: list[str] = []
    display = PlainLines(steps=7, log_every=3, printer=lines.append)
    display.event("start", total_samples=28)
    for step in range(1, 8):
        display.step(step_record(step, seconds=0.5 if step < 4 else 0.25))
    assert [line.split(" | ")[0] for line in lines] == ["step 1/7", "step 3/7", "step 6/7", "step 7/7"]
    # Steps 2 and 3: 64 tokens and 8 samples in a second, 16 samples left. Steps 4 to 6: 96 tokens in 0.75 s.
    assert lines[1].endswith("| loss 4.7000 | gradient norm 0.750 | learning rate 1.00e-03 | 64 tokens/s | MFU 25.0% "
                             "| 0:00:02 left")  # fmt: skip
    assert "| 128 tokens/s |" in lines[2]
    assert lines[3].endswith("| 0:00:00 left")


def test_rates_weigh_steps_by_their_time() -> None:
    lines: list[str] = []
    display = PlainLines(steps=9, log_every=2, printer=lines.append)
    display.step(step_record(1))
    display.step(step_record(2, seconds=0.5, mfu=0.6))
    display.step(step_record(3, seconds=1.5, mfu=0.2))
    display.step(step_record(4, seconds=0.5, mfu=0.6))
    assert "MFU 30.0%" in lines[2]  # 1.5 s at 20% and 0.5 s at 60%
    assert "| 32 tokens/s |" in lines[2]


def test_expert_loads_are_printed_for_the_worst_block() -> None:
    line = vital_signs(step_record(1, loss_scale=8.0, expert_load_variations=[0.25, 1.5, 0.5]))
    assert line.endswith("| loss scale 8 | expert loads vary by 150%")
    assert "vary" not in vital_signs(step_record(1))


def test_skipped_steps_and_evaluations_are_printed_at_once() -> None:
    lines: list[str] = []
    display = PlainLines(steps=9, log_every=5, printer=lines.append)
    display.step(step_record(1))
    display.step(step_record(2, skipped=True, gradient_norm=math.nan))
    display.evaluation(evaluation_record(2))
    assert lines[1] == "step 2: gradients are not finite (norm nan); the update is skipped"
    assert lines[2] == "after step 2: validation loss 4.2500, perplexity 70.10 (512 tokens in 1.5 s)"


def opened_bar(steps: int, log_every: int, width: int) -> tuple[TrainingBar, io.StringIO]:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, color_system=None, legacy_windows=False)
    return TrainingBar(steps=steps, log_every=log_every, console=console), screen


def test_the_bar_shows_the_same_and_restores_the_terminal() -> None:
    bar, screen = opened_bar(steps=4, log_every=10, width=90)
    bar.say("resumed [here]")
    bar.event("start", total_samples=16)
    for step in (1, 2):
        bar.step(step_record(step))
    bar.evaluation(evaluation_record(2))
    bar.step(step_record(3))
    bar.close()
    text = screen.getvalue()
    for part in ("resumed [here]\n", "step 3/4", "64 tokens/s | MFU 25.0% | 0:00:00 left", "loss 4.7000"):
        assert part in text
    assert "learning rate 1.00e-03 | validation 4.2500" in text
    assert text.endswith("\x1b[?25h")  # the cursor is visible again


def test_the_bar_leaves_its_losses_in_the_scrollback() -> None:
    bar, screen = opened_bar(steps=40, log_every=2, width=160)
    bar.event("start", total_samples=160)
    for step in range(1, 41):
        bar.step(step_record(step, seconds=1.5))
    bar.close()
    lines = re.findall(r"step +(\d+)/40 \| loss", screen.getvalue())
    assert [int(step) for step in lines] == [1, 6, 10, 14, 18, 22, 26, 30, 34, 38, 40], "at least 5 s apart"


def test_the_log_marks_every_start(tmp_path: Path) -> None:
    for start in ("first", "second"):
        log = LogFile(tmp_path, steps=2, log_every=1, separator=f"===== {start}")
        log.event("failed", error="another job has the folder")
        log.say("two\nlines")
        log.step(step_record(1))
        log.event("failed", error="no luck")
        log.close()
    lines = [re.sub(r"^[-0-9]{10} [:0-9]{8} ", "", line) for line in (tmp_path / "log.txt").read_text().splitlines()]
    step = "step 1/2 | loss 4.9000 | gradient norm 0.750 | learning rate 1.00e-03 | 64 tokens/s | MFU 25.0% | "
    rest = ["two", "lines", f"{step}0:00:00 left", "failed: no luck"]
    assert lines == ["===== first", *rest, "===== second", *rest]


def test_mfu_is_narayanans_flops_over_the_ranks_peak() -> None:
    layers, hidden, sequence, vocabulary = 2, 64, 32, 97
    model = ModelConfig(vocabulary_size=vocabulary, num_layers=layers, hidden_size=hidden, num_heads=4)
    config = PretrainConfig(model=model, data=DataConfig(sequence_length=sequence))
    # Equation 3 of arXiv 2104.04473 for one sequence, without the recomputed forward: 72 for 96.
    flops = 72 * sequence * layers * hidden**2 * (
        1 + sequence / (6 * hidden) + vocabulary / (12 * layers * hidden)
    )  # fmt: skip
    meter = UtilisationMeter(config, model_layers(model), DevicePeak(1e9, "made up"), num_ranks=4)
    assert meter.mfu(tokens=8 * sequence, seconds=2.0) == pytest.approx(8 * flops / (2.0 * 4e9), rel=1e-9)


@pytest.mark.parametrize(("name", "flops"), [("NVIDIA H200", 989.4e12), ("Some GPU", 1.5e11)])
def test_peaks_are_a_data_sheets_or_measured(monkeypatch: pytest.MonkeyPatch, name: str, flops: float) -> None:
    measured = {torch.bfloat16: 1.5e11, torch.float32: 7e10}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(module, "product_flops", lambda dtype, device: measured[dtype])
    assert device_peak(torch.device("cuda", 0), "bf16").flops == flops
    in_bf16 = str(device_peak(torch.device("cpu"), "bf16"))
    assert in_bf16 == "0.15 TFLOP/s per rank (measured with a 512 x 512 product)"
