"""From a plan to its start: the configuration file and the command."""

from dataclasses import asdict, fields
from pathlib import Path

import yaml

from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware
from megapipe.planner.command.arguments import NO_DATA


def config_yaml(config: PretrainConfig) -> str:
    """A configuration as a file that holds what differs from the defaults, and the whole layout."""
    always = {
        "parallel": ("data", "tensor", "pipeline", "context", "sequence"),
        "batch": ("global_size", "micro_size"),
        "schedule": ("name",),
        "zero": ("stage",),
        "recompute": ("method",),
        "training": ("precision",),
        "data": ("sequence_length",),
    }
    plain = type(config)()
    found: dict[str, object] = {}
    for group in fields(config):
        if group.name == "init_from":
            continue
        mine, theirs = asdict(getattr(config, group.name)), asdict(getattr(plain, group.name))
        kept = {
            name: value for name, value in mine.items() if value != theirs[name] or name in always.get(group.name, ())
        }
        if kept:
            found[group.name] = kept
    return str(yaml.safe_dump(found | ({"init_from": config.init_from} if config.init_from else {}), sort_keys=False))


def write_config(path: Path, config: PretrainConfig, remarks: list[str]) -> None:
    """Write the file. remarks: comment lines at its top. ConfigError where it cannot be written."""
    text = "".join(f"# {line}\n" for line in remarks) + config_yaml(config)
    write_text(path, text)


def check_folders(*paths: Path | None) -> None:
    """Raise ConfigError where a file could not be written, before any work is done for it."""
    problems = [
        f"{path} cannot be written because the folder {path.parent} does not exist; create it, or choose another file"
        for path in paths
        if path is not None and not path.parent.is_dir()
    ]
    problems += [f"{path} is a folder; choose a file name" for path in paths if path is not None and path.is_dir()]
    if problems:
        raise ConfigError(problems)


def write_text(path: Path, text: str) -> None:
    """Write a file of a result. ConfigError where that cannot be done."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose a file in a writable folder") from None


def launch_command(config: PretrainConfig, hardware: Hardware, devices: int, file: str) -> str:
    """The command to start on every node; of several, HEAD_NODE names one, as in examples/launch/several_nodes.sh."""
    nodes = hardware.nodes(devices)
    where = f"-n {min(devices, nodes[0].devices_per_node)}"
    if len(nodes) > 1:
        where += f" --nodes {len(nodes)} --rendezvous $HEAD_NODE:29500"
    kind = f" --kind {config.kind}" if config.kind != PretrainConfig.kind else ""
    data = f" --data.prefix {NO_DATA}" if not config.data.prefixes[0] else ""
    return f"megapipe train {where}{kind} --config {file}{data}"


def uneven_nodes(hardware: Hardware, devices: int) -> str | None:
    """A warning where nodes do not run the same number of ranks, which one command cannot say."""
    sizes = [node.devices_per_node for node in hardware.nodes(devices)]
    if sum(sizes) == devices and len(set(sizes)) == 1:
        return None
    if len(sizes) == 1:
        return None
    last = devices - sum(sizes[:-1])
    listed = ", ".join(str(size) for size in [*sizes[:-1], last])
    return f"nodes run {listed} ranks: set -n on each node accordingly"
