"""The parts of a machine (devices in nodes, links inside a node, adapters between nodes), its measurements, and the
files with both.

Units: bytes, seconds, FLOP/s, bytes per second and direction. A data sheet that counts both directions of a link
together gives twice the number. A hardware file is the YAML of a `Hardware`, a preset of the package or the user's.
`megapipe.calibration` measures layers of one model, collectives, and the cost of busy neighbours; `planner.measured`
uses these `Measurements`.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, get_args

from megapipe.config import ConfigError, nearest
from megapipe.config.field_types import Bound, NaturalFloat, PositiveFloat, Share
from megapipe.config.files import read_text
from megapipe.config.load import read_dataclass, written_dataclass
from megapipe.config.run import PretrainConfig
from megapipe.spec.ops import Operation

DTYPE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of an element in memory, by the number formats of matrix products that a device may have a peak for."""

# Values outside of these bounds were written in another unit.
FlopRate = Annotated[float, Bound(1e3, 1e24, words="from 1e3 to 1e24, in FLOP/s (312e12, not 312)")]
ByteCount = Annotated[float, Bound(1e3, 1e24, words="from 1e3 to 1e24, in bytes (80e9, not 80)")]
BYTE_RATES = Bound(1e3, 1e24, words="from 1e3 to 1e24, in bytes per second (50e9, not 50)")
ByteRate = Annotated[float, BYTE_RATES]
Dimension = Annotated[float, Bound(0, 10**9)]
Latency = Annotated[float, Bound(0, 1, words="from 0 to 1, in seconds (3e-6, not 3)")]


@dataclass(frozen=True)
class Efficiency:
    """Ratio between the actual and the nominal performance of a device. Matrix products have three parameters.

    The rate follows Hockney's law in each dimension of a product (Hockney and Jesshope, Parallel Computers 2, 1988,
    section 1.3: r = r_max / (1 + n_half / n)). With the defaults, times are those at the peak: a bound, not a
    prediction.

    ceiling: fraction of the peak that a very large product reaches. half_size: size of one dimension that alone halves
    the rate. launch: additional seconds of every kernel. memory, links: fractions of the nominal bandwidths of memory,
    and of links inside and between nodes, that are reached. They do not apply to a link_matrix, which is measured.
    """

    ceiling: Share = 1.0
    half_size: Dimension = 0.0
    launch: Latency = 0.0
    memory: Share = 1.0
    links: Share = 1.0


@dataclass(frozen=True)
class Device:
    """One accelerator, or one core of a CPU.

    peak_flops: by number format (`DTYPE_BYTES`), dense products, no sparsity. memory_bytes: of its own memory.
    memory_bandwidth: nominal bytes per second, reads and writes together.
    """

    name: str
    peak_flops: Mapping[str, FlopRate]
    memory_bytes: ByteCount
    memory_bandwidth: ByteRate
    efficiency: Efficiency = field(default_factory=Efficiency)

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for each rule that the fields break."""
        if not self.peak_flops:
            yield "peak_flops", f"is empty: write the FLOP/s of at least one of {', '.join(DTYPE_BYTES)}"
        for dtype in self.peak_flops:
            if dtype not in DTYPE_BYTES:
                hint = nearest(dtype, DTYPE_BYTES)
                yield f"peak_flops.{dtype}", f"is an unknown key{hint} (known here: {', '.join(DTYPE_BYTES)})"

    @property
    def reached_bandwidth(self) -> float:
        """Bytes per second of its memory that kernels reach."""
        return self.memory_bandwidth * self.efficiency.memory

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s in a number format. Raises ConfigError if the device has none."""
        if dtype not in self.peak_flops:
            known = [each for each in DTYPE_BYTES if each in self.peak_flops]
            raise ConfigError(
                f"device {self.name!r} has no peak for {dtype!r}{nearest(dtype, known)} (it has {', '.join(known)}); "
                "choose another precision, or add the number to its peak_flops"
            )
        return self.peak_flops[dtype]


LayerKind = Literal["embedding", "block", "head"]
Transport = Literal["gloo", "shared_memory", "nccl"]
LAYER_KINDS: tuple[LayerKind, ...] = get_args(LayerKind)
Count = Annotated[int, Bound(1, 10**9)]
_ISO_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


@dataclass(frozen=True)
class LayerRow:
    """Seconds of one micro-batch in a layer on one rank.

    tensor, context: numbers of ranks over which the layer is sharded. micro_size: samples. backward: of the whole
    backward; backward_input and backward_weight: of its halves, run separately.
    """

    kind: LayerKind
    tensor: Count
    context: Count
    micro_size: Count
    forward: NaturalFloat
    backward: NaturalFloat
    backward_input: NaturalFloat
    backward_weight: NaturalFloat


@dataclass(frozen=True)
class MeasuredLayer(LayerRow):
    """Times of the rank's own work, without communication and with nothing else running; the two halves together are
    slower than the whole.

    recompute: time of a recomputed forward, 0 for layers that are never recomputed.
    """

    recompute: NaturalFloat


@dataclass(frozen=True)
class MeasuredCollective:
    """A collective of `ranks` ranks of one node: a call takes latency + bytes / bandwidth.

    Bytes are those of the whole buffer, as `spec.ops.Exchange` counts them. over: transport. busy: CPU seconds that a
    rank spends per second of it, 0 if a separate device does the work.
    """

    operation: Operation
    ranks: Count
    over: Transport
    latency: NaturalFloat
    bandwidth: PositiveFloat
    busy: NaturalFloat = 0.0


@dataclass(frozen=True)
class Contention:
    """Factor by which the same work takes longer while `ranks` ranks of a node compute at the same time."""

    ranks: Count
    factor: PositiveFloat


@dataclass(frozen=True)
class Measurements:
    """Results of `profile`.

    date: ISO, of the day. torch: version. shape: settings on which the layers' times depend
    (`planner.measured.shape_of`). update_seconds: of an optimizer step with its gradient norm, per element that a rank
    updates. action_seconds: overhead of the engine for every forward and backward. contention: ascending in ranks, the
    first for one rank. waits: time that ranks of one layer wait for each other's messages, and for ranks that are
    late, in addition to their own work, for numbers of ranks that the machine has; models estimate the others.
    """

    date: str
    torch: str
    update_seconds: NaturalFloat
    action_seconds: NaturalFloat
    layers: tuple[MeasuredLayer, ...]
    shape: Mapping[str, str] = field(default_factory=dict)
    contention: tuple[Contention, ...] = (Contention(1, 1.0),)
    waits: tuple[LayerRow, ...] = ()

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for each rule that the fields break."""
        if not _ISO_DAY.fullmatch(self.date):
            yield "date", f"is {self.date!r}, which is not a date: write it as 2026-01-31"
        ranks = [each.ranks for each in self.contention]
        if ranks != sorted({1, *ranks}):
            yield (
                "contention",
                f"is for {', '.join(map(str, ranks))} ranks: write "
                "each number once, in ascending order, starting with 1",
            )

    def slowdown(self, ranks: float) -> float:
        """Return the factor while `ranks` ranks compute: interpolated linearly between rows, and in proportion to the
        ranks after the last row."""
        before = self.contention[0]
        for each in self.contention[1:]:
            if each.ranks >= ranks:
                share = max(0.0, ranks - before.ranks) / (each.ranks - before.ranks)
                return before.factor + share * (each.factor - before.factor)
            before = each
        return before.factor * max(ranks, before.ranks) / before.ranks


@dataclass(frozen=True)
class IntraNodeLink:
    """The links of every device inside a node.

    latency: seconds per message. bandwidth: of one device, to all others together, per direction. pair_bandwidth:
    between two devices only, which is lower without a switch; by default the same. collectives: measured calls, which
    replace formulas.
    """

    latency: Latency
    bandwidth: ByteRate
    pair_bandwidth: ByteRate = math.nan
    collectives: tuple[MeasuredCollective, ...] = ()

    def __post_init__(self) -> None:
        if math.isnan(self.pair_bandwidth):
            object.__setattr__(self, "pair_bandwidth", self.bandwidth)

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for each rule that the fields break."""
        if self.pair_bandwidth > self.bandwidth:
            yield (
                "pair_bandwidth",
                f"is {self.pair_bandwidth:g}; it must be at most bandwidth "
                f"{self.bandwidth:g}, which a device has to all others together",
            )

    def measured(self, operation: str, ranks: int) -> MeasuredCollective | None:
        """Return the first row of an operation with this number of ranks; None if there is none."""
        rows = (each for each in self.collectives if (each.operation, each.ranks) == (operation, ranks))
        return next(rows, None)

    def of_ring(self, members: int) -> float:
        """Return the bytes per second at which each of `members` devices sends in a ring: two devices only have the
        links of the pair."""
        return self.pair_bandwidth if members == 2 else self.bandwidth


@dataclass(frozen=True)
class Network:
    """The connection of a node to other nodes.

    latency: seconds per message. bandwidth: of all adapters of a node together, per direction. adapters: their number.
    """

    latency: Latency
    bandwidth: ByteRate
    adapters: Count = 1

    def of_device(self, active: int, bandwidth: float | None = None) -> float:
        """Return the bytes per second of one device while `active` devices of its node send to other nodes: an equal
        part, at most one adapter's bandwidth.

        bandwidth: measured bandwidth from the node to one other node, if there is one.
        """
        whole = self.bandwidth if bandwidth is None else bandwidth
        return whole / max(active, self.adapters)


@dataclass(frozen=True)
class HostLink:
    """The link between a device and the memory of its host.

    bandwidth: of one device, per direction, in both directions at the same time. latency: seconds per copy.
    """

    bandwidth: ByteRate
    latency: Latency = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of one copy."""
        return self.latency + num_bytes / self.bandwidth


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of one kind.

    num_nodes: their number; None for no limit. price_per_hour: of one node, in any currency. host: None if unknown;
    then moves to host memory cannot be planned.
    """

    name: str
    device: Device
    devices_per_node: Count
    inside: IntraNodeLink
    outside: Network
    num_nodes: Count | None = None
    price_per_hour: NaturalFloat | None = None
    host: HostLink | None = None

    @property
    def reached(self) -> "NodeGroup":
        """Return the group with the bandwidths that its links reach."""
        share, inside, outside = self.device.efficiency.links, self.inside, self.outside
        return replace(
            self,
            inside=replace(inside, bandwidth=inside.bandwidth * share, pair_bandwidth=inside.pair_bandwidth * share),
            outside=Network(outside.latency, outside.bandwidth * share, outside.adapters),
        )


@dataclass(frozen=True)
class Hardware:
    """A machine, or an unlimited supply of its nodes.

    groups: of nodes, filled in this order. link_matrix: measured bytes per second from node to node, one row per
    sender; nodes are numbered through the groups, and the diagonal is not read. measured: times of layers, on the
    first group's devices.
    """

    name: str
    groups: tuple[NodeGroup, ...]
    link_matrix: tuple[tuple[NaturalFloat, ...], ...] | None = None
    measured: Measurements | None = None

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for each rule that the fields break."""
        endless = [group.name for group in self.groups if group.num_nodes is None]
        if endless and len(self.groups) > 1:
            yield (
                "groups",
                f"do not set num_nodes of {endless[0]!r}, but with several groups each needs its own; set it",
            )
        elif self.link_matrix is not None:
            yield from self._matrix_problems(self.link_matrix)

    def _matrix_problems(self, matrix: tuple[tuple[float, ...], ...]) -> Iterator[tuple[str, str]]:
        nodes = sum(group.num_nodes or 0 for group in self.groups)
        sizes = {len(row) for row in matrix}
        if len(matrix) != nodes or sizes != {nodes}:
            yield (
                "link_matrix",
                f"has {len(matrix)} rows of {', '.join(map(str, sorted(sizes)))} numbers, but the groups have {nodes} "
                "nodes by num_nodes: write one row and one column for each",
            )
            return
        places = {(row, column): value for row, values in enumerate(matrix) for column, value in enumerate(values)}
        if not all(value for (row, column), value in places.items() if row != column):
            yield "link_matrix", "has a 0 off its diagonal: write the bytes per second between each pair of nodes"
        elif any(value for (row, column), value in places.items() if row == column):
            yield "link_matrix", "has a value above 0 on its diagonal, where a node would send to itself: write 0"
        for (row, column), value in places.items():
            if value and not BYTE_RATES.holds(value):
                yield f"link_matrix[{row}][{column}]", f"is {value:g}, but must be {BYTE_RATES}"

    def nodes(self, num_devices: int) -> tuple[NodeGroup, ...]:
        """Return the nodes that `num_devices` ranks occupy, each given by its group; ranks fill a node before the
        next.

        Raises: ConfigError: fewer than 1 device, or more than there are, are requested.
        """
        if num_devices < 1:
            raise ConfigError(f"the number of devices is {num_devices}; it must be at least 1")
        occupied, left = [], num_devices
        for group in self.groups:
            for _ in itertools.count() if group.num_nodes is None else range(group.num_nodes):
                occupied.append(group)
                left -= group.devices_per_node
                if left <= 0:
                    return tuple(occupied)
        raise ConfigError(
            f"{num_devices} devices are requested, but hardware {self.name!r} has "
            f"{num_devices - left}; request fewer, or raise num_nodes of a group"
        )

    def price_per_hour(self, num_devices: int) -> float | None:
        """Return the price of all occupied nodes, each as a whole; None if a price is not known."""
        prices = [node.price_per_hour for node in self.nodes(num_devices)]
        known = [price for price in prices if price is not None]
        return sum(known) if len(known) == len(prices) else None

    def with_reserve(self, num_bytes: float) -> "Hardware":
        """Return the machine with this number of bytes less on every device: memory that is not for tensors.

        Raises:
            ConfigError: the number is negative, or a device would have no memory left.
        """
        smallest = min(self.groups, key=lambda group: group.device.memory_bytes).device
        if not 0 <= num_bytes < smallest.memory_bytes:
            raise ConfigError(
                f"the memory reserve is {num_bytes / 1e9:g} GB; it must be at least 0 and "
                f"below the {smallest.memory_bytes / 1e9:g} GB of device {smallest.name!r}"
            )
        return self.with_devices(lambda device: replace(device, memory_bytes=device.memory_bytes - num_bytes))

    def with_share(self, share: float) -> "Hardware":
        """Return this hardware with a fraction of every device's memory. share: above 0, at most 1."""
        return self.with_devices(lambda device: replace(device, memory_bytes=device.memory_bytes * share))

    def with_devices(self, changed: Callable[[Device], Device]) -> "Hardware":
        """Return this hardware with other devices. changed: returns the device that replaces one of this hardware."""
        groups = (replace(group, device=changed(group.device)) for group in self.groups)
        return replace(self, groups=tuple(groups))


CPU_WORDS = re.compile(r"(?<![a-z])(cpus?|cores?)(?![a-z])", re.IGNORECASE)


def hardware_device_type(hardware: Hardware) -> Literal["cpu", "cuda"]:
    """Return torch's type of the first group's devices, on which attention's path and sums of gradients depend.

    A device is a CPU if its name has the word cpu or core, or if fp32 is its only number format.
    """
    return device_type(hardware.groups[0].device)


def device_type(device: Device) -> Literal["cpu", "cuda"]:
    """Return the type of one device; see `hardware_device_type`."""
    return "cpu" if CPU_WORDS.search(device.name) or set(device.peak_flops) == {"fp32"} else "cuda"


SINGLE = ("fp32", "tf32")
"""Formats in which fp32 matrices may be multiplied."""


def with_named_precision(config: PretrainConfig, devices: Iterable[Device]) -> tuple[PretrainConfig, str | None]:
    """Return the run with precision auto replaced, and a remark about it; without auto, the run itself.

    A run uses bf16 if a matrix product is faster in it than in fp32 (`training.precision`); here, if every device has
    a higher peak in bf16 than in fp32 or tf32.
    """
    if config.training.precision != "auto":
        return config, None
    devices = tuple(devices)
    peaks = [[each.peak_flops.get(name, 0.0) for name in ("bf16", *SINGLE)] for each in devices]
    choice: Literal["bf16", "fp32"] = "bf16" if all(bf16 > max(single) for bf16, *single in peaks) else "fp32"
    names = ", ".join(dict.fromkeys(device.name for device in devices))
    remark = (
        f"training.precision auto: planned as {choice}, by the peaks of {names}; a run measures both when it starts"
    )
    return replace(config, training=replace(config.training, precision=choice)), remark


PRESETS = tuple(sorted(each.stem for each in Path(str(files(__package__) / "presets")).glob("*.yaml")))
"""Names of the files that come with the package."""
LARGEST_FILE = 16_000_000
"""Maximum number of characters, enough for a link matrix of 1,000 nodes; a larger file takes minutes to read."""


def load_hardware(name_or_file: str) -> Hardware:
    """Return a preset by its name, or the hardware in a YAML file (a name with a slash or a dot in it).

    Raises:
        ConfigError: an unknown preset, an unreadable file, or a wrong content.

    Example:
        >>> from megapipe import load_hardware
        >>> load_hardware("h100").name
        'H100'
    """
    if name_or_file in PRESETS:
        return _preset(name_or_file)
    if not any(mark in name_or_file for mark in "./\\"):
        raise ConfigError(
            f"unknown hardware {name_or_file!r}{_meant(name_or_file)} (presets: "
            f"{', '.join(PRESETS)}; write a file name with its ending, as in machine.yaml)"
        )
    text = read_text(Path(name_or_file), ConfigError, "choose a YAML file with hardware", LARGEST_FILE)
    return read_hardware(text, name_or_file)


@cache
def _preset(name: str) -> Hardware:
    return read_hardware((files(__package__) / "presets" / f"{name}.yaml").read_text(), name)


def _meant(name: str) -> str:
    """Return a hint with the presets that start with a name, such as a100, or else with the nearest one."""
    longer = [preset for preset in PRESETS if name and preset.startswith(name)]
    return f"; did you mean {' or '.join(map(repr, longer))}?" if longer else nearest(name, PRESETS)


def read_hardware(text: str, origin: str = "hardware") -> Hardware:
    """Return the hardware that the YAML text of a file called `origin` describes; ConfigError names all problems."""
    return read_dataclass(Hardware, text, origin, LARGEST_FILE)


def written(hardware: Hardware, remark: str = "") -> str:
    """Return the text of a file that `read_hardware` can read, with six digits. remark: comment at the top."""
    return written_dataclass(hardware, remark)
