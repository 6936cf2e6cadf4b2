"""What a machine is made of: devices in nodes, links inside a node, adapters between nodes.

Units: bytes, seconds, FLOP/s, bytes per second and direction. A data sheet that counts both directions of a link
together gives twice the number.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from megapipe.config.errors import ConfigError, nearest
from megapipe.layout.hardware.measured import MeasuredCollective, Measurements

DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
"""Number formats of matrix products that a device may have a peak for."""


@dataclass(frozen=True)
class Efficiency:
    """How far a device stays below its nominal figures. Matrix products have three parameters.

    The rate follows Hockney's law in each dimension of a product (Hockney and Jesshope, Parallel Computers 2, 1988,
    section 1.3: r = r_max / (1 + n_half / n)). The defaults are the peak itself: a bound, not a prediction.

    ceiling: share of the peak that a very large product reaches, above 0, at most 1. half_size: elements of one
    dimension at which it alone halves the rate, 0 or more. launch: seconds that every kernel takes besides, 0 or more.
    memory, links: shares of the nominal bandwidths of its memory, and of links inside and between nodes, that are
    reached; above 0, at most 1. Not of a link_matrix, which is measured.
    """

    ceiling: float = 1.0
    half_size: float = 0.0
    launch: float = 0.0
    memory: float = 1.0
    links: float = 1.0


@dataclass(frozen=True)
class Device:
    """One accelerator, or one core of a CPU.

    peak_flops: by number format (`DTYPES`), dense products, no sparsity. memory_bytes: of its own memory.
    memory_bandwidth: nominal bytes per second, reads and writes together.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    efficiency: Efficiency = field(default_factory=Efficiency)

    @property
    def reached_bandwidth(self) -> float:
        """Bytes per second of its memory that kernels reach."""
        return self.memory_bandwidth * self.efficiency.memory

    def peak(self, dtype: str) -> float:
        """FLOP/s in a number format; ConfigError where the device has none."""
        if dtype not in self.peak_flops:
            raise ConfigError(
                f"device {self.name!r} has no peak for {dtype!r}{nearest(dtype, self.peak_flops)} "
                f"(it has {', '.join(self.peak_flops)}); choose another precision, or add the number to its peak_flops"
            )
        return self.peak_flops[dtype]


@dataclass(frozen=True)
class IntraNodeLink:
    """The links of every device inside a node.

    latency: seconds a message. bandwidth: of one device, to all others together, a direction. pair_bandwidth: between
    two devices alone, less than that where no switch joins them. collectives: measured calls, which count in place of
    formulas.
    """

    latency: float
    bandwidth: float
    pair_bandwidth: float
    collectives: tuple[MeasuredCollective, ...] = ()

    def measured(self, operation: str, ranks: int) -> MeasuredCollective | None:
        """The first row of an operation among as many ranks; None without any."""
        rows = (each for each in self.collectives if (each.operation, each.ranks) == (operation, ranks))
        return next(rows, None)

    def of_ring(self, members: int) -> float:
        """Bytes per second that each of `members` devices passes on: two have only what joins the pair."""
        return self.pair_bandwidth if members == 2 else self.bandwidth


@dataclass(frozen=True)
class Network:
    """How a node reaches other nodes.

    latency: seconds a message. bandwidth: of all adapters of a node together, a direction. adapters: how many.
    """

    latency: float
    bandwidth: float
    adapters: int

    def of_device(self, active: int, bandwidth: float | None = None) -> float:
        """Bytes per second of one device while `active` devices of its node send to other nodes: its share, at most
        one adapter's.

        bandwidth: of the node towards one other, where that has been measured.
        """
        whole = self.bandwidth if bandwidth is None else bandwidth
        return whole / max(active, self.adapters)


@dataclass(frozen=True)
class HostLink:
    """Between a device and the memory of its host.

    bandwidth: of one device, a direction, both at once. latency: seconds a copy.
    """

    bandwidth: float
    latency: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Of one copy."""
        return self.latency + num_bytes / self.bandwidth


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of one kind.

    num_nodes: how many there are; None for as many as asked for. price_per_hour: of one node, in any currency. host:
    None where it is not known, so that nothing can be planned that moves there.
    """

    name: str
    device: Device
    devices_per_node: int
    inside: IntraNodeLink
    outside: Network
    num_nodes: int | None = None
    price_per_hour: float | None = None
    host: HostLink | None = None

    @property
    def reached(self) -> "NodeGroup":
        """The same with the bandwidths of links that are reached."""
        share = self.device.efficiency.links
        if share == 1.0:
            return self
        inside, outside = self.inside, self.outside
        return replace(
            self,
            inside=replace(inside, bandwidth=inside.bandwidth * share, pair_bandwidth=inside.pair_bandwidth * share),
            outside=Network(outside.latency, outside.bandwidth * share, outside.adapters),
        )


@dataclass(frozen=True)
class Hardware:
    """A machine, or an unlimited supply of its nodes.

    groups: of nodes, filled in this order. link_matrix: measured bytes per second from node to node, a row for each
    sender, both numbered through the groups; the diagonal is not read. measured: layers' times, on the first group's
    devices.
    """

    name: str
    groups: tuple[NodeGroup, ...]
    link_matrix: tuple[tuple[float, ...], ...] | None = None
    measured: Measurements | None = None

    def nodes(self, num_devices: int) -> tuple[NodeGroup, ...]:
        """The nodes that `num_devices` ranks occupy, each given by its group; ranks fill a node before the next.

        Raises:
            ConfigError: fewer than 1 device asked for, or more than there are.
        """
        if num_devices < 1:
            raise ConfigError(f"the number of devices is {num_devices}; it must be at least 1")
        found = []
        left = num_devices
        for node in self._supply():
            found.append(node)
            left -= node.devices_per_node
            if left <= 0:
                return tuple(found)
        raise ConfigError(
            f"{num_devices} devices are requested, but hardware {self.name!r} has {num_devices - left}; request "
            "fewer, or raise num_nodes of a group"
        )

    def price_per_hour(self, num_devices: int) -> float | None:
        """Of all nodes that are occupied, whole ones; None where a price is not known."""
        prices = [node.price_per_hour for node in self.nodes(num_devices)]
        known = [price for price in prices if price is not None]
        return sum(known) if len(known) == len(prices) else None

    def with_reserve(self, num_bytes: float) -> "Hardware":
        """The same with so much less memory on every device: for what is there beside tensors.

        Raises:
            ConfigError: less than nothing, or a device would have none left.
        """
        smallest = min(self.groups, key=lambda group: group.device.memory_bytes).device
        if not 0 <= num_bytes < smallest.memory_bytes:
            raise ConfigError(
                f"the memory reserve is {num_bytes / 1e9:g} GB; it must be at least 0 and below the "
                f"{smallest.memory_bytes / 1e9:g} GB of device {smallest.name!r}"
            )
        devices = (replace(group.device, memory_bytes=group.device.memory_bytes - num_bytes) for group in self.groups)
        groups = (replace(group, device=device) for group, device in zip(self.groups, devices, strict=True))
        return replace(self, groups=tuple(groups))

    def with_share(self, share: float) -> "Hardware":
        """Return this hardware with a fraction of every device's memory. share: above 0, at most 1."""
        devices = (replace(each.device, memory_bytes=each.device.memory_bytes * share) for each in self.groups)
        groups = (replace(group, device=device) for group, device in zip(self.groups, devices, strict=True))
        return replace(self, groups=tuple(groups))

    def _supply(self) -> Iterator[NodeGroup]:
        for group in self.groups:
            left = group.num_nodes
            while left is None or left > 0:
                yield group
                left = None if left is None else left - 1
