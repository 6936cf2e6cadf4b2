"""The commands of ``tools/plan.py`` that need torch: `dry-run` builds shapes, `profile` measures."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from megapipe.config.errors import ConfigError
from megapipe.data.errors import DataError
from megapipe.parallel.errors import CommunicationError
from megapipe.planner.command.arguments import NO_DATA, Request
from megapipe.planner.command.planning import check_fields
from megapipe.planner.hardware.description import Hardware
from megapipe.planner.hardware.device_type import hardware_device_type
from megapipe.planner.report.table import print_table
from megapipe.planner.report.words import bytes_told, layout_told
from megapipe.training.calibration import profile
from megapipe.training.dry_run import DryRun, ShapeError, dry_run
from megapipe.training.signals import STOPS


def run_dry_run(request: Request) -> int:
    """Check a configuration of any number of ranks; status 2 where a rank does not fit the devices of --hardware."""
    own = request.for_file(request.flags["file"])
    config, devices = own.config, own.devices()
    hardware = request.hardware() if request.flags["hardware"] is not None else None
    limit = None if hardware is None else _limit(hardware, devices)
    if not config.data.prefixes[0]:
        config.data.prefix = NO_DATA
    quiet = request.flags["json"]
    try:
        found = dry_run(config, devices, device=_device(own, hardware), say=_say_nothing if quiet else _say)
    except ShapeError as error:
        raise ConfigError(f"{error}; this is a defect of megapipe: please report it with the configuration") from error
    if quiet:
        fits = limit is None or all(each.peak_bytes <= limit for each in found.coordinates)
        print(json.dumps(found.as_json() | {"memory_limit_bytes": limit, "fits": fits if limit else None}, indent=2))
    else:
        _print(found)
    _check_memory(found, limit)
    return 0


def run_profile(request: Request) -> int:
    """Measure this machine for the layers of a model, and write the hardware file.

    SIGTERM and Ctrl-C end the processes that measure and leave the file as it was; the status is then 128 and the
    signal's number, as shells have it, and 1 where a process that measured failed.
    """
    flags = request.flags
    check_fields(request.config)
    try:
        with _stopped_by_signals():
            hardware = profile(
                request.config,
                flags["output"],
                ranks=flags["ranks"],
                tensor_sizes=flags["tensor_sizes"],
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
        print(f"written: {flags['output']}; plan with it by --hardware {flags['output']}")
    return 0


class _Stopped(BaseException):
    """A signal came. No Exception, so that nothing on the way takes it for an error of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Inside, SIGTERM and Ctrl-C raise `_Stopped`, so that what was begun is tidied up."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped(number)

    previous = {each: signal.signal(each, stop) for each in STOPS}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


def _device(request: Request, hardware: Hardware | None) -> str:
    """Of --hardware; without it what parallel.device says, where auto is taken for GPUs."""
    if hardware is not None:
        return hardware_device_type(hardware)
    return "cpu" if request.config.parallel.device == "cpu" else "cuda"


def _limit(hardware: Hardware, devices: int) -> float:
    return min(node.device.memory_bytes for node in hardware.nodes(devices))


def _check_memory(found: DryRun, limit: float | None) -> None:
    """Raise ConfigError where a rank holds more than its device."""
    if limit is None:
        return
    full = [each for each in found.coordinates if each.peak_bytes > limit]
    if full:
        most = max(full, key=lambda each: each.peak_bytes)
        raise ConfigError(
            f"{len(full)} of {len(found.coordinates)} pipeline coordinates do not fit {bytes_told(limit)} a device; "
            f"coordinate {most.pipeline} holds {bytes_told(most.peak_bytes)}, {bytes_told(most.peak_bytes - limit)} "
            "too much: plan.py search looks for a layout that fits"
        )


def _print(found: DryRun) -> None:
    print(f"layout: {layout_told(found.config)}\n")
    rows = [
        [
            str(each.pipeline),
            f"{each.ranks:,}",
            str(len(each.stages)),
            str(len(each.layers)),
            f"{each.parameters:,}",
            bytes_told(each.state_bytes),
            bytes_told(each.message_bytes),
            bytes_told(each.peak_bytes),
        ]
        for each in found.coordinates
    ]
    columns = [
        "coordinate",
        "ranks",
        "stages",
        "layers",
        "parameters of a rank",
        "state",
        "messages",
        "most in a step",
    ]
    print_table(columns, rows, f"memory of a rank by pipeline coordinate, on {found.device}")
    print(f"\n{found.world_size:,} ranks checked in one process")


def _say(line: str) -> None:
    print(line, flush=True)


def _say_nothing(line: str) -> None:
    """For output that a program reads."""
