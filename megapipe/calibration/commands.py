"""The commands of `megapipe plan` that need torch: `dry-run` builds shapes, `profile` and `links` measure."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from megapipe.calibration.collectives import NodeLinks, Place, measure_node_links, with_node_links
from megapipe.calibration.machine import check_output, profile
from megapipe.config.command_line import bytes_text, progress_bar
from megapipe.config.errors import ConfigError
from megapipe.config.memory import RecomputeConfig
from megapipe.config.run import PretrainConfig
from megapipe.data import DataError
from megapipe.data.files import write_whole
from megapipe.layout.hardware.description import Hardware, hardware_device_type, with_named_precision
from megapipe.layout.hardware.files import written
from megapipe.layout.table import LayoutTable
from megapipe.parallel.groups import CommunicationError, LaunchError
from megapipe.parallel.launch import LaunchEnvironment, initialize, shutdown
from megapipe.planner.command.main import NO_DATA, Request
from megapipe.planner.command.planning import check_fields, check_folders, layout_text, print_table, write_text
from megapipe.planner.recompute import resolved
from megapipe.training.dry_run import DryRun, ShapeError, dry_run
from megapipe.training.resilience.signals import STOPS
from megapipe.training.validation import validate


def run_dry_run(request: Request) -> int:
    """Check a configuration for any number of ranks. Raises ConfigError if a rank does not fit on --hardware."""
    file_request = request.for_file(request.flags["file"]) if request.flags["file"] else request
    config, devices = file_request.config, file_request.devices()
    check_folders(request.flags["write_layout"])
    hardware = request.hardware() if request.flags["hardware"] is not None else None
    limit = None if hardware is None else _limit(hardware, devices)
    if not config.data.prefixes[0]:
        config.data.prefix = NO_DATA
    quiet = request.flags["json"]
    say = _say_nothing if quiet else _say
    config = _without_auto(config, hardware, devices, say)
    try:
        with progress_bar("checking pipeline coordinates") as report:
            result = dry_run(config, devices, device=_device(file_request, hardware), say=say, report=report)
    except ShapeError as error:
        raise ConfigError(f"{error}; this is a defect of megapipe: please report it with the configuration") from error
    if quiet:
        fits = limit is None or all(each.peak_bytes <= limit for each in result.coordinates)
        print(json.dumps(result.as_json() | {"memory_limit_bytes": limit, "fits": fits if limit else None}, indent=2))
    else:
        _print(result)
    if request.flags["write_layout"] is not None:
        write_text(request.flags["write_layout"], LayoutTable.of(result.config).as_yaml())
    _check_memory(result, limit)
    return 0


def run_profile(request: Request) -> int:
    """Measure this machine for the layers of a model, and write the hardware file.

    SIGTERM and Ctrl-C end the measuring processes and do not change the file. The exit status is then 128 plus the
    number of the signal, as in shells. It is 1 if a measuring process failed.
    """
    flags = request.flags
    config = request.config
    check_fields(config)
    if config.recompute.method == "auto":
        # Without recomputation, its time is measured in a separate run; auto needs both times.
        config = replace(config, recompute=RecomputeConfig(logits=config.recompute.logits))
    try:
        with _stopped_by_signals():
            hardware = profile(
                config,
                flags["output"],
                ranks=flags["ranks"],
                tensor_sizes=flags["tensor_sizes"],
                context_sizes=flags["context_sizes"],
                micro_sizes=flags["micro_sizes"],
                say=_say_nothing if flags["json"] else _say,
            )
    except _Stopped as stop:
        print(f"error: stopped by {stop.signal.name}; {flags['output']} was not written", file=sys.stderr)
        return 128 + stop.signal
    except CommunicationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except DataError as error:
        raise ConfigError(f"{error}; or leave data.prefix out, to measure on random tokens") from error
    if flags["json"]:
        print(json.dumps({"name": hardware.name, "file": str(flags["output"])}))
    else:
        print(f"wrote {flags['output']}; use it with --hardware {flags['output']}")
    return 0


def run_links(request: Request) -> int:
    """Measure the links between the nodes on which torchrun started this command, and write a hardware file."""
    flags = request.flags
    first = os.environ.get("RANK", "0") == "0"
    try:
        hardware, num_bytes = request.hardware(), int(flags["megabytes"] * 1e6)
        check_output(flags["output"])
        world_size = LaunchEnvironment.read(os.environ).world_size
        if world_size == 1:
            raise ConfigError(
                "links are measured between nodes: start this command on two or more nodes with torchrun --nnodes N "
                "--nproc_per_node DEVICES -m megapipe plan links, as for a training run"
            )
        mesh = initialize({"data": world_size}, request.config.parallel.device)
        links = measure_node_links(mesh, Place.of_this_process(), num_bytes)
        hardware = with_node_links(hardware, links)
    except LaunchError as error:
        raise ConfigError(str(error)) from error
    except ConfigError:
        if first:
            raise
        return 2  # rank 0 prints the error
    if first:
        hosts = ", ".join(f"{number} {host}" for number, host in enumerate(links.hosts))
        write_whole(flags["output"], written(hardware, f"Links measured between nodes: {hosts}").encode())
        if flags["json"]:
            print(json.dumps(vars(links)))
        else:
            _print_links(links)
            print(f"\nwrote {flags['output']}; use it with --hardware {flags['output']}")
    shutdown()
    return 0


def _print_links(links: NodeLinks) -> None:
    rows = [
        [f"{number} {host}", *("" if i == number else f"{rate / 1e9:.3g}" for i, rate in enumerate(row))]
        for number, (host, row) in enumerate(zip(links.hosts, links.bandwidth, strict=True))
    ]
    columns = ["from, to", *map(str, range(len(links.hosts)))]
    print_table(columns, rows, f"GB/s between nodes, latency {links.latency * 1e6:.3g} us")


def _without_auto(
    config: PretrainConfig, hardware: Hardware | None, devices: int, say: Callable[[str], None]
) -> PretrainConfig:
    """Return the configuration with training.precision auto and recompute.method auto replaced. Raises ConfigError if
    one of them is auto but no machine is given."""
    automatic = [
        name
        for name, value in (
            ("training.precision", config.training.precision),
            ("recompute.method", config.recompute.method),
        )
        if value == "auto"
    ]
    if hardware is None:
        if automatic:
            raise ConfigError(
                [f"{name} auto depends on the machine; give --hardware, or set a value" for name in automatic]
            )
        return config
    if automatic:
        validate(config, devices)
    config, precision = with_named_precision(config, (node.device for node in hardware.nodes(devices)))
    choice = resolved(config, hardware, devices)
    for remark in (precision, choice.remark):
        if remark is not None:
            say(remark)
    return choice.config


class _Stopped(BaseException):
    """Raised for a signal. It is not an Exception, so that no `except Exception` handles it as an error."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Raise `_Stopped` in the block on SIGTERM and Ctrl-C, so that processes and files are cleaned up."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped(number)

    previous = {each: signal.signal(each, stop) for each in STOPS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _device(request: Request, hardware: Hardware | None) -> str:
    """Return the device type of --hardware, or else that of parallel.device, where auto means GPUs."""
    if hardware is not None:
        return hardware_device_type(hardware)
    return "cpu" if request.config.parallel.device == "cpu" else "cuda"


def _limit(hardware: Hardware, devices: int) -> float:
    return min(node.device.memory_bytes for node in hardware.nodes(devices))


def _check_memory(result: DryRun, limit: float | None) -> None:
    """Raise ConfigError if a rank needs more memory than its device has."""
    if limit is None:
        return
    full = [each for each in result.coordinates if each.peak_bytes > limit]
    if full:
        fullest = max(full, key=lambda each: each.peak_bytes)
        raise ConfigError(
            f"{len(full)} of {len(result.coordinates)} pipeline coordinates do not fit in {bytes_text(limit)} per "
            f"device; coordinate {fullest.pipeline} needs {bytes_text(fullest.peak_bytes)}, "
            f"{bytes_text(fullest.peak_bytes - limit)} too much; megapipe plan search looks for a layout that fits"
        )


def _print(result: DryRun) -> None:
    print(f"layout: {layout_text(result.config)}\n")
    rows = [
        [
            str(each.pipeline),
            f"{each.ranks:,}",
            str(len(each.stages)),
            str(len(each.layers)),
            f"{each.parameters:,}",
            bytes_text(each.state_bytes),
            bytes_text(each.message_bytes),
            bytes_text(each.peak_bytes),
        ]
        for each in result.coordinates
    ]
    columns = [
        "coordinate",
        "ranks",
        "stages",
        "layers",
        "parameters of a rank",
        "state",
        "messages",
        "peak in a step",
    ]
    print_table(columns, rows, f"memory of a rank by pipeline coordinate, on {result.device}")
    print(f"\n{result.world_size:,} ranks checked in one process")


def _say(line: str) -> None:
    print(line, flush=True)


def _say_nothing(line: str) -> None:
    """Print nothing, because a program reads the output."""


HANDLERS: dict[str, Callable[[Request], int]] = {"profile": run_profile, "links": run_links, "dry-run": run_dry_run}
"""Functions of the commands, by name."""
