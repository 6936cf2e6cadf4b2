"""Whether a machine's devices are CPUs or GPUs."""

import re
from typing import Literal

from megapipe.layout.hardware.description import Device, Hardware

CPU_WORDS = re.compile(r"(?<![a-z])(cpus?|cores?)(?![a-z])", re.IGNORECASE)


def hardware_device_type(hardware: Hardware) -> Literal["cpu", "cuda"]:
    """The type that torch knows the first group's devices by, on which attention's path and sums of gradients depend.

    A device is a CPU where its name has the word cpu or core, or where fp32 is its only number format.
    """
    return device_type(hardware.groups[0].device)


def device_type(device: Device) -> Literal["cpu", "cuda"]:
    """Of one device; see `hardware_device_type`."""
    return "cpu" if CPU_WORDS.search(device.name) or set(device.peak_flops) == {"fp32"} else "cuda"
