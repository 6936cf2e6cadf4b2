"""`training.precision auto` before a run: what its timing would choose, by the devices' peaks."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Device

SINGLE = ("fp32", "tf32")
"""Formats that fp32 matrices may be multiplied in."""


def with_named_precision(config: PretrainConfig, devices: Iterable[Device]) -> tuple[PretrainConfig, str | None]:
    """The run with auto replaced, and a remark on that; without auto the run itself.

    A run takes bf16 where a matrix product is faster in it than in fp32 (`training.precision`): here where every
    device has the higher peak in it, tf32 taken for fp32.
    """
    if config.training.precision != "auto":
        return config, None
    devices = tuple(devices)
    choice: Literal["bf16", "fp32"] = "bf16" if all(_is_faster_in_bf16(device) for device in devices) else "fp32"
    names = ", ".join(dict.fromkeys(device.name for device in devices))
    remark = (
        f"training.precision auto: planned as {choice}, by the peaks of {names}; a run measures both when it starts"
    )
    return replace(config, training=replace(config.training, precision=choice)), remark


def _is_faster_in_bf16(device: Device) -> bool:
    single = max((device.peak_flops[name] for name in SINGLE if name in device.peak_flops), default=0.0)
    return device.peak_flops.get("bf16", 0.0) > single
