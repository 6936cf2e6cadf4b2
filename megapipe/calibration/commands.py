"""The commands of `megapipe plan` that need torch: `dry-run` builds shapes, `profile` and `links` measure.

A dry run checks a run of any number of ranks in one process: rules, schedule, shapes and memory, without computing
anything. Ranks with the same pipeline coordinate are alike, so one of each is built on torch's meta device, whose
tensors have shapes but no memory. Its stages then run one forward and one backward of a micro-batch. This shows that
the shapes of all operations fit together, and that every stage returns the tensors that the next one expects.
"""

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from megapipe.calibration.collectives import NodeLinks, Place, measure_node_links, with_node_links
from megapipe.calibration.machine import check_output, profile
from megapipe.config import ConfigError
from megapipe.config.command_line import Report, bytes_text, check_folders, progress_bar, quiet, write_text
from megapipe.config.files import write_whole
from megapipe.config.memory import RecomputeConfig
from megapipe.config.parallel import MeshShape
from megapipe.config.run import PretrainConfig
from megapipe.data import DataError
from megapipe.engine.assembly import Assembly, Holding, ModelTable
from megapipe.engine.stage import Stage, TensorSpec, described, unit_states
from megapipe.kernels.ops import OPS
from megapipe.layers.context import BertContext, MicrobatchContext
from megapipe.layers.sequence_slices import sliced
from megapipe.layout.batch_plan import data_parallel_size, num_microbatches
from megapipe.layout.hardware.description import Hardware, hardware_device_type, with_named_precision, written
from megapipe.layout.prediction import RankPrediction, predict_rank
from megapipe.layout.scheduling import schedule_name
from megapipe.layout.stages import StageLayout, slice_ranges
from megapipe.layout.table import LayoutTable, lowered_schedule
from megapipe.layout.units import StateBytes
from megapipe.parallel.groups import CommunicationError, LaunchError
from megapipe.parallel.launch import LaunchEnvironment, initialize, shutdown
from megapipe.parallel.mesh import Mesh, silent_mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.planner.command.main import NO_DATA, Request
from megapipe.planner.command.planning import check_fields, layout_text, print_cells, print_table
from megapipe.planner.recompute import resolved
from megapipe.schedules.schedule import Header
from megapipe.schedules.validation import validate as validate_schedule
from megapipe.training.loop.loader import HeldTokens
from megapipe.training.resilience.signals import STOPS
from megapipe.training.validation import validate

META = torch.device("meta")


@dataclass(frozen=True)
class Coordinate:
    """Layers and memory of the ranks of one pipeline coordinate.

    ranks: number of these ranks. stages: their stages in the schedule. layers: names of their layers. parameters:
    elements in the buffers of one rank, with padding. state_bytes: persistent state, also in host memory.
    message_bytes: buffers in which messages of other stages arrive, and stay until their backward. peak_bytes: peak of
    a step on the device, with these buffers. kernel_calls: calls of one step, by op of the kernel registry and phase.
    """

    pipeline: int
    ranks: int
    stages: tuple[int, ...]
    layers: tuple[str, ...]
    parameters: int
    state_bytes: int
    message_bytes: int
    peak_bytes: int
    kernel_calls: dict[str, int]


@dataclass(frozen=True)
class DryRun:
    """Result of a dry run. config: the configuration, with parallel.data filled in. actions: number of actions of one
    step, over all pipeline coordinates."""

    config: PretrainConfig
    world_size: int
    microbatches: int
    actions: int
    coordinates: tuple[Coordinate, ...]
    device: str
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return the figures for JSON; memory by pipeline coordinate."""
        return {
            "world_size": self.world_size,
            "microbatches": self.microbatches,
            "schedule": schedule_name(self.config),
            "actions": self.actions,
            "device": self.device,
            "seconds": self.seconds,
            "memory_bytes": [each.peak_bytes for each in self.coordinates],
            "coordinates": [vars(each) for each in self.coordinates],
        }


class ShapeError(RuntimeError):
    """Stages do not fit together, or their bytes differ from the prediction: a defect of megapipe, not of a
    configuration."""


def dry_run(
    config: PretrainConfig,
    world_size: int,
    *,
    device: str = "cuda",
    say: Callable[[str], None] = quiet,
    report: Report = quiet,
) -> DryRun:
    """Check a run on `world_size` ranks.

    device: type of its devices, "cpu" or "cuda", on which memory depends. say: prints each part when it is done.
    report: called with the fraction of the pipeline coordinates that are done.

    Raises ConfigError for rules that the configuration breaks, ScheduleError, and ShapeError.
    """
    start = time.perf_counter()
    validate(config, world_size)
    config = replace(config, parallel=replace(config.parallel, data=data_parallel_size(config, world_size)))
    say(f"configuration: valid on {world_size:,} ranks")
    layout, microbatches = StageLayout.of(config), num_microbatches(config, world_size)
    shape = MeshShape.of(config.parallel)
    schedule = lowered_schedule(config, layout)
    validate_schedule(schedule)
    actions = sum(len(rows) for rows in schedule.sections.body)
    header = schedule.header
    say(
        f"schedule: {header.name}, class {header.numerical_class}, "
        f"{microbatches:,} micro-batches, {actions:,} actions a step, valid"
    )
    first = predict_rank(config, schedule, 0, device=device)
    kernels, holding = OPS.with_overrides(config.kernels.backends), Holding.of(LayoutTable.of(config, layout))
    coordinates = []
    for place in range(shape.sizes["pipeline"]):
        rank = shape.rank_of({"data": 0, "pipeline": place, "context": 0, "tensor": 0})
        mesh = silent_mesh(shape, rank, META)
        model = ModelTable.of(config, layout, mesh, kernels)
        stages = Assembly(model, holding, mesh, schedule.header, kernels=kernels).stages
        _run_shapes(config, stages, HeldTokens.of(config, mesh))
        # The memory of a rank depends only on its pipeline coordinate.
        coordinates.append(_coordinate(replace(first, pipeline_rank=place), mesh, stages, layout))
        report((place + 1) / shape.sizes["pipeline"])
    say(f"shapes: a forward and a backward of every stage fit together ({len(layout.ranges)} in all)")
    return DryRun(config, world_size, microbatches, actions, tuple(coordinates), device, time.perf_counter() - start)


def _run_shapes(config: PretrainConfig, stages: Mapping[int, Stage], tokens: HeldTokens) -> None:
    """Run a forward and a backward of each stage, and compare the shapes with its declared inputs and outputs."""
    terms = len(config.loss_terms)
    context = _context(config, tokens)
    for number, stage in stages.items():
        inputs = [spec.allocate(META).requires_grad_(spec.requires_grad) for spec in stage.inputs]
        outputs: tuple[Tensor, ...] = tuple(inputs)
        for unit in stage.units:
            outputs = unit[0](*outputs, context=context)
        loss = TensorSpec((terms,) if terms > 1 else (), torch.float32)
        expected = described(stage.outputs or [loss])
        if described(outputs) != expected:
            raise ShapeError(f"stage {number} returns {described(outputs)}, but {expected} is expected")
        torch.autograd.backward(outputs, [torch.empty_like(tensor) for tensor in outputs])
        for tensor in inputs:
            if tensor.grad is None or tensor.grad.shape != tensor.shape:
                raise ShapeError(f"stage {number} returns no gradient of shape {list(tensor.shape)}")


def _context(config: PretrainConfig, held: HeldTokens) -> MicrobatchContext:
    """Return the context of a micro-batch as the loader of the run makes it, on the meta device."""
    size, whole = config.batch.micro_size, config.data.sequence_length
    tokens = whole // config.parallel.context
    integers = partial(torch.empty, dtype=torch.int64, device=META)
    shared: dict[str, Any] = {
        "ordinals": integers(size),
        "tokens": integers((size, tokens)),
        "seed": config.training.seed,
        "token_numbers": None if held.numbers is None else integers(tokens),
    }
    predictions = config.predictions
    if predictions is not None:
        return BertContext(
            **shared,
            labels=integers((size, predictions)),
            loss_mask=torch.empty((size, predictions), device=META),
            lengths=integers(size),
            token_types=integers((size, tokens)),
            positions=integers((size, predictions)),
            sentence_labels=integers(size),
            sentence_weights=torch.empty(size, device=META),
        )
    starts = integers((size, tokens)) if config.data.isolate_documents else None
    whole_starts = integers((size, whole)) if held.gathers else None
    whole_sample = MicrobatchContext(
        **shared,
        labels=integers((size, tokens)),
        loss_mask=torch.empty((size, tokens), device=META),
        document_starts=starts,
        whole_document_starts=whole_starts if starts is not None else None,
    )
    return sliced(whole_sample, slice_ranges(config))[0]


def _coordinate(predicted: RankPrediction, mesh: Mesh, stages: Mapping[int, Stage], layout: StageLayout) -> Coordinate:
    """Return the predicted memory of a rank. Raises ShapeError if the buffers that were built have other sizes."""
    states, predicted_state = unit_states(dict(stages)), predicted.state()
    built = zip(*map(_bytes, states), strict=True)
    for name, total, formula in zip(StateBytes._fields, map(sum, built), predicted_state, strict=False):
        if total != formula:
            raise ShapeError(
                f"rank {mesh.rank} was built with {total} bytes of {name}, but the formulas predict {predicted_state}"
            )
    messages = _message_bytes(predicted.schedule.header, stages)
    if messages != predicted.messages:
        raise ShapeError(
            f"rank {mesh.rank} has {messages} bytes of message slots, but the formulas predict {predicted.messages}"
        )
    return Coordinate(
        pipeline=predicted.pipeline_rank,
        ranks=mesh.world_size // mesh.size("pipeline"),
        stages=tuple(stages),
        layers=tuple(layout.layers[index].name for stage in stages for index in layout.ranges[stage]),
        parameters=sum(state.table.num_elements for state in states),
        state_bytes=predicted_state.total,
        message_bytes=messages,
        peak_bytes=predicted.device_bytes(),
        kernel_calls={f"{op} {phase}": calls for (op, phase), calls in sorted(predicted.kernel_calls().items())},
    )


def _bytes(state: UnitState) -> list[int]:
    """Return the persistent bytes of a unit: weights, master weights and gradients."""
    weights = state.weight_shards if state.transient_weights else state.weights
    master = [] if state.working_copy is None else [state.master]
    gradients = state.gradient_shards if state.sharding.gradients else state.gradients
    return [sum(each.nbytes for each in tensors) for tensors in (weights, master, gradients)]


def _message_bytes(header: Header, stages: Mapping[int, Stage]) -> int:
    """Return the bytes of the slots in which these stages receive from other ranks, as `engine.transfers.connect`
    allocates them. Vocabulary shards have no slots."""
    total, ranks = 0, header.stage_ranks
    for number, stage in stages.items():
        if number >= header.num_routed:
            continue
        if stage.inputs and ranks[number - 1] != ranks[number]:
            total += header.activation_slots[number] * _spec_bytes(stage.inputs)
        if stage.outputs and ranks[number + 1] != ranks[number]:
            total += header.gradient_slots[number] * _spec_bytes(stage.outputs)
    return total


def _spec_bytes(specs: Sequence[TensorSpec]) -> int:
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)


def run_dry_run(request: Request) -> int:
    """Check a configuration for any number of ranks. Raises ConfigError if a rank does not fit on --hardware."""
    file_request = request.for_file(request.flags["file"]) if request.flags["file"] else request
    config, devices = file_request.config, file_request.devices()
    check_folders(request.flags["write_layout"])
    hardware = request.hardware() if request.flags["hardware"] is not None else None
    limit = None if hardware is None else min(node.device.memory_bytes for node in hardware.nodes(devices))
    if not config.data.prefixes[0]:
        config.data.prefix = NO_DATA
    say = quiet if request.flags["json"] else _say
    config = _without_auto(config, hardware, devices, say)
    try:
        with progress_bar("checking pipeline coordinates") as report:
            result = dry_run(config, devices, device=_device(file_request, hardware), say=say, report=report)
    except ShapeError as error:
        raise ConfigError(f"{error}; this is a defect of megapipe: please report it with the configuration") from error
    too_large = [each for each in result.coordinates if limit is not None and each.peak_bytes > limit]
    if request.flags["json"]:
        fits = None if limit is None else not too_large
        print(json.dumps(result.as_json() | {"memory_limit_bytes": limit, "fits": fits}, indent=2))
    else:
        _print(result)
    if request.flags["write_layout"] is not None:
        write_text(request.flags["write_layout"], LayoutTable.of(result.config).as_yaml())
    if limit is not None and too_large:
        fullest = max(too_large, key=lambda each: each.peak_bytes)
        raise ConfigError(
            f"{len(too_large)} of {len(result.coordinates)} pipeline coordinates do not "
            f"fit in {bytes_text(limit)} per device; coordinate {fullest.pipeline} needs "
            f"{bytes_text(fullest.peak_bytes)}, {bytes_text(fullest.peak_bytes - limit)} "
            "too much; megapipe plan search looks for a layout that fits"
        )
    return 0


def run_profile(request: Request) -> int:
    """Measure this machine for the layers of a model, and write the hardware file.

    SIGTERM and Ctrl-C end the measuring processes and do not change the file. The exit status is then 128 plus the
    number of the signal, as in shells. It is 1 if a measuring process failed.
    """
    flags, config = request.flags, request.config
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
                say=quiet if flags["json"] else _say,
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
    is_first_rank = os.environ.get("RANK", "0") == "0"
    try:
        hardware, num_bytes = request.hardware(), int(flags["megabytes"] * 1e6)
        check_output(flags["output"])
        world_size = LaunchEnvironment.read(os.environ).world_size
        if world_size == 1:
            raise ConfigError(
                "links are measured between nodes: start this command on two or more nodes "
                "with torchrun --nnodes N --nproc_per_node DEVICES -m megapipe plan links"
            )
        mesh = initialize({"data": world_size}, request.config.parallel.device)
        links = measure_node_links(mesh, Place.of_this_process(), num_bytes)
        hardware = with_node_links(hardware, links)
    except LaunchError as error:
        raise ConfigError(str(error)) from error
    except ConfigError:
        if is_first_rank:
            raise
        return 2  # rank 0 prints the error
    if is_first_rank:
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
    values = {"training.precision": config.training.precision, "recompute.method": config.recompute.method}
    automatic = [name for name, value in values.items() if value == "auto"]
    if hardware is None:
        if automatic:
            raise ConfigError(
                [f"{name} auto depends on the machine; give --hardware, or set a value" for name in automatic]
            )
        return config
    if automatic:
        validate(config, devices)
    config, precision = with_named_precision(config, (node.device for node in hardware.nodes(devices)))
    config, choice = resolved(config, hardware, devices)
    for remark in (precision, choice):
        if remark is not None:
            say(remark)
    return config


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


def _print(result: DryRun) -> None:
    print(f"layout: {layout_text(result.config)}\n")
    rows = [
        {
            "coordinate": str(each.pipeline),
            "ranks": f"{each.ranks:,}",
            "stages": str(len(each.stages)),
            "layers": str(len(each.layers)),
            "parameters of a rank": f"{each.parameters:,}",
            "state": bytes_text(each.state_bytes),
            "messages": bytes_text(each.message_bytes),
            "peak in a step": bytes_text(each.peak_bytes),
        }
        for each in result.coordinates
    ]
    print_cells(rows, f"memory of a rank by pipeline coordinate, on {result.device}")
    print(f"\n{result.world_size:,} ranks checked in one process")


def _say(line: str) -> None:
    print(line, flush=True)


HANDLERS: dict[str, Callable[[Request], int]] = {"profile": run_profile, "links": run_links, "dry-run": run_dry_run}
"""Functions of the commands, by name."""
