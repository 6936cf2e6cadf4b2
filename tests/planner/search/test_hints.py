"""Hints at faster requests: the neighbours that are tried, and hardware with several kinds of devices."""

from dataclasses import replace

import pytest

from megapipe.config.run import BatchConfig, PretrainConfig
from megapipe.layout.hardware.description import PRESETS, Hardware, load_hardware
from megapipe.planner.cost.estimate import Estimate
from megapipe.planner.search.findings import hints, neighbour_batches, neighbour_devices, single_groups


@pytest.mark.parametrize(
    ("samples", "devices", "expected"),
    [(1023, 64, [1024]), (1024, 64, []), (1536, 64, []), (32, 256, []), (100, 64, [96])],
)
def test_batches_that_more_sizes_divide(samples: int, devices: int, expected: list[int]) -> None:
    assert neighbour_batches(samples, devices)[:1] == expected


def test_devices_that_fill_nodes_have_no_better_neighbour() -> None:
    hardware = load_hardware("a100-80")
    assert neighbour_devices(hardware, 63) == [56, 60]
    assert neighbour_devices(hardware, 64) == neighbour_devices(hardware, 8) == neighbour_devices(hardware, 1) == []


class _Speed:
    def __init__(self, tokens_per_second: float) -> None:
        self.tokens_per_second = tokens_per_second


def test_hints_name_what_is_much_faster() -> None:
    slow, fast = (load_hardware(name).groups[0] for name in ("v100-32", "a100-80"))
    mixed = Hardware("two kinds", (replace(slow, num_nodes=1), replace(fast, num_nodes=1)))
    assert [(each.groups[0].device.name, count) for each, count in single_groups(mixed, 16)] == [
        (slow.device.name, 8),
        (fast.device.name, 8),
    ]

    def fastest(config: PretrainConfig, machine: Hardware, count: int) -> Estimate:
        alone = len(machine.groups) == 1 and machine.groups[0].device.name == fast.device.name
        faster = alone or config.batch.global_size == 1024
        return _Speed(1.3 if faster else 0.5)  # type: ignore[return-value]

    base = PretrainConfig(batch=BatchConfig(global_size=1023))
    said = list(hints(base, mixed, 16, _Speed(1.0), fastest))  # type: ignore[arg-type]
    assert len(said) == 2
    assert "--batch.global_size 1024 trains 1.3 times as many tokens" in said[0]
    assert "the 8 A100-SXM4-80GB alone are 1.30 times as fast as all 16 devices" in said[1]


def test_a_hint_names_the_batch_that_it_needs() -> None:
    def fastest(config: PretrainConfig, machine: Hardware, count: int) -> Estimate:
        return _Speed(1.5 if (count, config.batch.global_size) == (60, 1020) else 1.0)  # type: ignore[return-value]

    base = PretrainConfig(batch=BatchConfig(global_size=1024))
    said = list(hints(base, load_hardware("a100-80"), 63, _Speed(1.0), fastest))  # type: ignore[arg-type]
    assert said == ["60 devices with --batch.global_size 1020 are 1.5 times as fast as 63, which has few divisors"]


def test_presets_of_one_chip_share_its_fitted_efficiency() -> None:
    devices = {name: load_hardware(name).groups[0].device for name in PRESETS}
    for chip, source in (("A100", "a100-80"), ("H100", "h100"), ("H200", "h100")):
        same = [each for each in devices.values() if each.name.startswith(chip)]
        assert {each.efficiency for each in same} == {devices[source].efficiency}
