"""precision: auto: one choice for all ranks, kept by the runs that go on from it."""

import pytest
import torch

from megapipe.config.parallel import MeshShape
from megapipe.config.run import PretrainConfig, TrainingConfig
from megapipe.parallel.launch import connected_mesh
from megapipe.parallel.mesh import Mesh
from megapipe.training import device
from megapipe.training.device import with_precision
from tests.support.meshes import run_threads

AUTO = PretrainConfig(training=TrainingConfig(precision="auto"))


def solo() -> Mesh:
    return connected_mesh(MeshShape({}), torch.device("cpu"))


def fake_timing(monkeypatch: pytest.MonkeyPatch, bf16: float, fp32: float) -> None:
    times = {torch.bfloat16: bf16, torch.float32: fp32}
    monkeypatch.setattr(device, "product_seconds", lambda dtype, device: times[dtype])


@pytest.mark.parametrize(("bf16", "fp32", "choice"), [(0.001, 0.002, "bf16"), (0.004, 0.002, "fp32")])
def test_the_faster_precision_is_used_and_both_times_printed(
    monkeypatch: pytest.MonkeyPatch, bf16: float, fp32: float, choice: str
) -> None:
    fake_timing(monkeypatch, bf16, fp32)
    lines: list[str] = []
    assert with_precision(AUTO, solo(), None, lines.append).training.precision == choice
    (line,) = lines
    assert choice in line
    assert f"{bf16 * 1e3:.2f} ms in bf16" in line
    assert f"{fp32 * 1e3:.2f} ms in fp32" in line


def test_a_checkpoints_precision_stays_whatever_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_timing(monkeypatch, 0.001, 0.002)
    assert with_precision(AUTO, solo(), "fp32", print).training.precision == "fp32"


@pytest.mark.parametrize("asked", ["fp32", "bf16"])
def test_a_precision_that_was_asked_for_is_not_timed(asked: str) -> None:
    config = PretrainConfig(training=TrainingConfig(precision=asked))  # type: ignore[arg-type]
    assert with_precision(config, solo(), "fp32" if asked == "bf16" else "bf16", print) is config


def chosen(mesh: Mesh) -> tuple[str, list[str]]:
    lines: list[str] = []
    return with_precision(AUTO, mesh, None, lines.append).training.precision, lines


def test_rank_zero_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_timing(monkeypatch, 0.001, 0.002)
    (first, first_lines), (second, second_lines) = run_threads({"pipeline": 2}, chosen)
    assert (first, second) == ("bf16", "bf16")
    assert len(first_lines) == 1
    assert second_lines == []
