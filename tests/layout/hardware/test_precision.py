"""`training.precision auto` in plans: bf16 where every device's peak says that it is faster."""

from dataclasses import replace

import pytest

from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import PRESETS, Device, load_hardware, with_named_precision
from megapipe.planner.cost.model import estimate
from tests.planner.command.plan import LAYOUT, json_of, output


def auto() -> PretrainConfig:
    config = PretrainConfig()
    return replace(config, training=replace(config.training, precision="auto"))


def device(**peaks: float) -> Device:
    return Device("made up", peaks, 8e9, 1e11)


@pytest.mark.parametrize(
    ("devices", "choice"),
    [
        ([device(fp32=1e12, bf16=2e12)], "bf16"),
        ([device(fp32=1e12)], "fp32"),
        ([device(fp32=1e12, bf16=0.5e12)], "fp32"),  # a processor that emulates it
        ([device(fp32=1e12, tf32=8e12, bf16=4e12)], "fp32"),
        ([device(bf16=1e12)], "bf16"),
        ([device(fp32=1e12, bf16=2e12), device(fp32=1e12)], "fp32"),
    ],
)
def test_the_higher_peak_on_every_device_is_taken(devices: list[Device], choice: str) -> None:
    config, remark = with_named_precision(auto(), devices)
    assert config.training.precision == choice
    assert str(remark).startswith(f"training.precision auto: planned as {choice}, by the peaks of made up")


def test_bf16_is_chosen_for_recent_gpus() -> None:
    """NVIDIA's data sheets: tensor cores multiply bf16 from the A100 on."""
    for preset in PRESETS:
        precision = with_named_precision(auto(), [load_hardware(preset).groups[0].device])[0].training.precision
        assert precision == ("fp32" if preset.startswith(("v100", "cpu")) else "bf16")


def test_a_precision_that_is_named_stays() -> None:
    config = PretrainConfig()
    assert with_named_precision(config, [device(bf16=1e12)]) == (config, None)


def test_the_cost_model_plans_with_it() -> None:
    hardware, config = load_hardware("a100-80"), auto()
    named = replace(config, training=replace(config.training, precision="bf16"))
    actual, expected = (estimate(each, hardware, world_size=1) for each in (config, named))
    assert actual == expected


def test_commands_say_what_they_take() -> None:
    printed = output("predict", *LAYOUT, "--training.precision=auto")
    assert (
        "note: training.precision auto: planned as bf16, by the peaks of A100-SXM4-80GB; a run measures both"
        in printed
    )
    report = json_of("predict", *LAYOUT, "--training.precision=auto")
    assert report["step_time_s"] == json_of("predict", *LAYOUT, "--training.precision=bf16")["step_time_s"]
