"""MFU against its definition, and where the peak comes from."""

import pytest
import torch

from megapipe.config.model import ModelConfig
from megapipe.config.run import DataConfig, PretrainConfig
from megapipe.spec.layers import model_layers
from megapipe.training.observe import display
from megapipe.training.observe.display import DevicePeak, UtilisationMeter, device_peak


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


def test_a_processor_is_measured_in_the_runs_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measured(dtype: torch.dtype, device: torch.device) -> float:
        asked.append(dtype)
        return 1.5e11

    monkeypatch.setattr(display, "product_flops", measured)
    assert str(device_peak(torch.device("cpu"), "bf16")) == (
        "0.15 TFLOP/s per rank (measured with a 512 x 512 product)"
    )  # fmt: skip
    assert asked == [torch.bfloat16]


@pytest.mark.parametrize(("name", "flops"), [("NVIDIA H200", 989.4e12), ("Some GPU", 7e12)])
def test_a_known_gpu_has_its_data_sheets_peak(monkeypatch: pytest.MonkeyPatch, name: str, flops: float) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(display, "product_flops", lambda dtype, device: 7e12)
    assert device_peak(torch.device("cuda", 0), "bf16").flops == flops
