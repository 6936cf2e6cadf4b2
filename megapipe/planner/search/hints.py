"""Hints at similar requests that are much faster: other numbers of devices or samples, or a single kind of device."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby

from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware
from megapipe.planner.cost.estimate import Estimate

Fastest = Callable[[PretrainConfig, Hardware, int], Estimate]
"""Returns the best layout of a run on a number of devices. Raises ConfigError if none can run."""

MUCH = 1.1
"""Minimum ratio of tokens per second for a hint about devices or samples."""
NEIGHBOURS = 2
"""How many numbers of devices, and batch sizes, are tried."""
BATCH_CHANGE = 0.1
"""Maximum relative change of the batch size."""


def hints(base: PretrainConfig, hardware: Hardware, devices: int, best: Estimate, fastest: Fastest) -> Iterator[str]:
    """Yield one sentence for each similar request that is much faster than the best layout of this one."""

    def gain(config: PretrainConfig, machine: Hardware, count: int) -> float:
        try:
            return fastest(config, machine, count).tokens_per_second / best.tokens_per_second
        except ConfigError:
            return 0.0

    own = base.batch.global_size

    def gain_of_batch(size: int, count: int) -> float:
        return gain(replace(base, batch=replace(base.batch, global_size=size)), hardware, count)

    def batches(count: int) -> list[int]:
        return neighbour_batches(own, count) if base.batch.ramp_start is None else []

    counts = {
        (count, size): gain_of_batch(size, count)
        for count in neighbour_devices(hardware, devices)
        for size in (own, *batches(count))
    }
    count, size = max(counts, key=lambda each: counts[each], default=(devices, own))
    if counts.get((count, size), 0.0) >= MUCH:
        batch = "" if size == own else f" with --batch.global_size {size}"
        yield (
            f"{count:,} devices{batch} are {counts[count, size]:.1f} times as fast as {devices:,}, which has few "
            "divisors"
        )
    sizes = {size: gain_of_batch(size, devices) for size in batches(devices)}
    size = max(sizes, key=lambda each: sizes[each], default=0)
    if sizes.get(size, 0.0) >= MUCH:
        yield (
            f"--batch.global_size {size} trains {sizes[size]:.1f} times as many tokens per second as {own:,}, which "
            "has few divisors"
        )
    for machine, count in single_groups(hardware, devices):
        alone, name = gain(base, machine, count), machine.groups[0].device.name
        if alone > 1.0:
            yield (
                f"the {count:,} {name} alone are {alone:.2f} times as fast as all {devices:,} devices: each step "
                "waits for the slowest device"
            )


def neighbour_devices(hardware: Hardware, devices: int) -> list[int]:
    """Return smaller numbers of devices with more divisors, if the devices do not fill whole nodes."""
    node = hardware.nodes(1)[0].devices_per_node
    step = node if devices > node else max(1, node // 2)
    if devices % step == 0:
        return []
    found = (devices // each * each for each in (step, max(1, step // 2)))
    return [each for each in dict.fromkeys(found) if 0 < each < devices][:NEIGHBOURS]


def neighbour_batches(samples: int, devices: int) -> list[int]:
    """Return similar batch sizes with more divisors, unless the batch size or the devices divide each other."""
    if samples % devices == 0 or devices % samples == 0:
        return []
    found = [near] if abs((near := round(samples / devices) * devices) - samples) <= BATCH_CHANGE * samples else []
    power = 2 ** (samples.bit_length() - 1)
    while power > 1:
        near = max(1, round(samples / power)) * power
        if near != samples and abs(near - samples) <= BATCH_CHANGE * samples:
            found.append(near)
        power //= 2
    return list(dict.fromkeys(found))[:NEIGHBOURS]


def single_groups(hardware: Hardware, devices: int) -> Iterator[tuple[Hardware, int]]:
    """Yield each kind of device alone with its number in the run; nothing if there is only one kind."""
    nodes = hardware.nodes(devices)
    if len({node.device.name for node in nodes}) == 1:
        return
    left = devices
    for _, members in groupby(nodes, key=lambda node: node.name):
        group = list(members)
        count = min(left, sum(node.devices_per_node for node in group))
        left -= count
        yield Hardware(hardware.name, (replace(group[0], num_nodes=len(group)),)), count
