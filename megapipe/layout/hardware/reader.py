"""A hardware file, read strictly: every problem is told at once, with line, value, rule and way out."""

from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from megapipe.config.errors import ConfigError, nearest
from megapipe.config.untrusted import compose_yaml, read_bytes
from megapipe.layout.hardware.description import (
    DTYPES,
    Device,
    Efficiency,
    Hardware,
    HostLink,
    IntraNodeLink,
    Network,
    NodeGroup,
)
from megapipe.layout.hardware.measured_reader import collective, measurements
from megapipe.layout.hardware.sections import MISSING, Section, Values

PRESETS = tuple(sorted(each.stem for each in Path(str(files(__package__) / "presets")).glob("*.yaml")))
"""Names of the files that come with the package."""
LARGEST_FILE = 16_000_000
"""Maximum number of characters, enough for a link matrix of 1,000 nodes; a larger file takes minutes to read."""


def load_hardware(name_or_file: str) -> Hardware:
    """A preset by its name, or a YAML file (a name with a slash or a dot in it).

    Raises:
        ConfigError: an unknown preset, an unreadable file, or a wrong content.
    """
    if name_or_file in PRESETS:
        return read_hardware((files(__package__) / "presets" / f"{name_or_file}.yaml").read_text(), name_or_file)
    if not any(mark in name_or_file for mark in "./\\"):
        raise ConfigError(
            f"unknown hardware {name_or_file!r}{_meant(name_or_file)} (presets: {', '.join(PRESETS)}; write a file "
            "name with its ending, as in machine.yaml)"
        )
    try:
        text = read_bytes(Path(name_or_file), ConfigError, LARGEST_FILE).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"hardware file {name_or_file!r} cannot be read: {why}; choose a readable YAML file"
        ) from None
    return read_hardware(text, name_or_file)


def _meant(name: str) -> str:
    """Presets that a name begins, as a100 does, or else the nearest one."""
    longer = [preset for preset in PRESETS if name and preset.startswith(name)]
    return f"; did you mean {' or '.join(map(repr, longer))}?" if longer else nearest(name, PRESETS)


def read_hardware(text: str, origin: str = "hardware") -> Hardware:
    """Hardware from the YAML text of a file called `origin`; ConfigError names all that is wrong."""
    try:
        root = compose_yaml(text, LARGEST_FILE)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin} is not readable YAML: {error}") from None
    reader = _Reader(origin)
    hardware = reader.hardware(root)
    if reader.problems or hardware is None:
        raise ConfigError(reader.problems)
    return hardware


class _Reader(Values):
    def hardware(self, node: yaml.Node | None) -> Hardware | None:
        section = Section(self, node, "", ("name", "groups", "link_matrix", "measured"))
        name = section.take("name", self.text)
        groups = section.take("groups", lambda each, place: self.items(each, place, self.group))
        matrix = section.take("link_matrix", self.matrix, None)
        measured = section.take("measured", lambda each, place: measurements(self, each, place), None)
        if self.problems:
            return None
        endless = [group.name for group in groups if group.num_nodes is None]
        if endless and len(groups) > 1:
            self.tell(
                section.fields["groups"],
                "groups",
                f"do not set num_nodes of {endless[0]!r}, but with several groups each needs its own; set it",
            )
        if matrix is not None:
            self.check_matrix(section.fields["link_matrix"], matrix, groups)
        return Hardware(name, groups, matrix, measured)

    def check_matrix(
        self, node: yaml.Node, matrix: tuple[tuple[float, ...], ...], groups: Iterable[NodeGroup]
    ) -> None:
        nodes = sum(group.num_nodes or 0 for group in groups)
        sizes = [len(row) for row in matrix]
        if len(matrix) != nodes or set(sizes) != {nodes}:
            self.tell(
                node,
                "link_matrix",
                f"has {len(matrix)} rows of {', '.join(map(str, sorted(set(sizes))))} numbers, but the groups have "
                f"{nodes} nodes by num_nodes: write one row and one column for each",
            )
        elif any(value == 0 for i, row in enumerate(matrix) for j, value in enumerate(row) if i != j):
            self.tell(
                node, "link_matrix", "has a 0 off its diagonal: write the bytes per second between each pair of nodes"
            )
        elif any(value for row, values in enumerate(matrix) for value in values[row : row + 1]):
            self.tell(
                node, "link_matrix", "has a value above 0 on its diagonal, where a node would send to itself: write 0"
            )

    def matrix(self, node: yaml.Node, place: str) -> Any:
        return self.items(node, place, lambda row, name: self.items(row, name, self.rate))

    def rate(self, node: yaml.Node, place: str) -> Any:
        """Of a link matrix: 0 on its diagonal alone."""
        value = self.non_negative(node, place)
        return value if value is MISSING or value == 0 else self.amount(node, place)

    def group(self, node: yaml.Node, path: str) -> NodeGroup:
        known = ("name", "device", "devices_per_node", "inside", "outside", "host", "num_nodes", "price_per_hour")
        section = Section(self, node, path, known)
        return NodeGroup(
            name=section.take("name", self.text),
            device=section.take("device", self.device),
            devices_per_node=section.take("devices_per_node", self.count),
            inside=section.take("inside", self.link),
            outside=section.take("outside", self.network),
            num_nodes=section.take("num_nodes", self.count, None),
            price_per_hour=section.take("price_per_hour", self.non_negative, None),
            host=section.take("host", self.host, None),
        )

    def device(self, node: yaml.Node, path: str) -> Device:
        section = Section(self, node, path, ("name", "peak_flops", "memory_bytes", "memory_bandwidth", "efficiency"))
        return Device(
            name=section.take("name", self.text),
            peak_flops=section.take("peak_flops", self.peaks),
            memory_bytes=section.take("memory_bytes", self.amount),
            memory_bandwidth=section.take("memory_bandwidth", self.amount),
            efficiency=section.take("efficiency", self.efficiency, Efficiency()),
        )

    def peaks(self, node: yaml.Node, path: str) -> dict[str, float]:
        section = Section(self, node, path, DTYPES)
        if isinstance(node, yaml.MappingNode) and not node.value:
            self.tell(node, path, f"is empty: write the FLOP/s of at least one of {', '.join(DTYPES)}")
        return {dtype: section.take(dtype, self.amount) for dtype in DTYPES if dtype in section.fields}

    def efficiency(self, node: yaml.Node, path: str) -> Efficiency:
        section = Section(self, node, path, ("ceiling", "half_size", "launch", "memory", "links"))
        return Efficiency(
            ceiling=section.take("ceiling", self.share, 1.0),
            half_size=section.take("half_size", self.non_negative, 0.0),
            launch=section.take("launch", self.non_negative, 0.0),
            memory=section.take("memory", self.share, 1.0),
            links=section.take("links", self.share, 1.0),
        )

    def link(self, node: yaml.Node, path: str) -> IntraNodeLink:
        section = Section(self, node, path, ("latency", "bandwidth", "pair_bandwidth", "collectives"))
        bandwidth = section.take("bandwidth", self.amount)
        # Where bandwidth could not be read, its problem is told once, and pair_bandwidth is not missing.
        pair = section.take("pair_bandwidth", self.amount, None if bandwidth is MISSING else bandwidth)
        if MISSING not in (bandwidth, pair) and pair is not None and pair > bandwidth:
            self.tell(
                section.fields["pair_bandwidth"],
                f"{path}.pair_bandwidth",
                f"is {pair:g}; it must be at most bandwidth {bandwidth:g}, which a device has to all others together",
            )
        measured = section.take(
            "collectives",
            lambda each, place: self.items(each, place, lambda row, name: collective(self, row, name)),
            (),
        )
        return IntraNodeLink(section.take("latency", self.seconds), bandwidth, pair, measured)

    def host(self, node: yaml.Node, path: str) -> HostLink:
        section = Section(self, node, path, ("bandwidth", "latency"))
        return HostLink(section.take("bandwidth", self.amount), section.take("latency", self.seconds, 0.0))

    def network(self, node: yaml.Node, path: str) -> Network:
        section = Section(self, node, path, ("latency", "bandwidth", "adapters"))
        return Network(
            latency=section.take("latency", self.seconds),
            bandwidth=section.take("bandwidth", self.amount),
            adapters=section.take("adapters", self.count, 1),
        )
