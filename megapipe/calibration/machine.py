"""Measure this machine for a hardware file: its devices, all of its ranks at once, and the links between them."""

import itertools
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, timedelta
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megapipe.calibration.collectives import Together, measure_together
from megapipe.calibration.layers import (
    Cell,
    StepTimes,
    cells,
    measure_cell,
    measure_shared,
    samples_for,
    shared_cells,
    waits,
)
from megapipe.calibration.planning import memory_bytes
from megapipe.config import ConfigError
from megapipe.config.command_line import end_with_parent, unwritable
from megapipe.config.files import write_whole
from megapipe.config.parallel import MeshShape
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import (
    Contention,
    Device,
    Hardware,
    HostLink,
    IntraNodeLink,
    MeasuredLayer,
    Measurements,
    Network,
    NodeGroup,
    read_hardware,
    written,
)
from megapipe.layout.hardware.roofline import Product, fit_efficiency
from megapipe.layout.validation import context_problems
from megapipe.models import DTYPES
from megapipe.parallel.groups import CommunicationError
from megapipe.parallel.launch import connected_mesh, shutdown
from megapipe.parallel.mesh import Mesh
from megapipe.planner.measured import shape_of
from megapipe.spec.layers import tensor_problems
from megapipe.training.device import COPY_BYTES, copy_bandwidth, product_times, seconds_of, with_precision
from megapipe.training.resilience.signals import STOPS

PRODUCTS = (
    (64, 64, 64), (256, 256, 256), (256, 256, 1024), (1024, 256, 256), (1024, 256, 1024), (512, 512, 512),
    (1024, 1024, 1024),
)  # fmt: skip
"""Rows, inner size and columns of products on a CPU; on a GPU, all are multiplied by GPU_SCALE."""
GPU_SCALE = 8
REPEATS, WARM_UP = 9, 2


def measured_products(precision: str, device: torch.device) -> list[Product]:
    """Return the median times of matrix products of several sizes."""
    scale = GPU_SCALE if device.type == "cuda" else 1
    sizes = [(rows * scale, inner * scale, columns * scale) for rows, inner, columns in PRODUCTS]
    times = (product_times(each, DTYPES[precision], device, REPEATS, WARM_UP) for each in sizes)
    return [Product(*each, median(seconds)) for each, seconds in zip(sizes, times, strict=True)]


def measured_bandwidth(device: torch.device) -> float:
    """Return the bytes per second of a copy in the device's memory, the sum of reads and writes."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * COPY_BYTES / median(seconds_of(lambda: target.copy_(source), device, REPEATS, WARM_UP))


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or `core` for a CPU, where each rank computes on one core."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "core"


TIMEOUT = 600.0
"""Seconds after which ranks that did not answer count as failed."""


def on_ranks(count: int, device_type: str, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the results of `function(mesh, *args)` on `count` new processes with one thread each, in rank order.

    The mesh has all ranks in its data dimension; `function`, arguments and results are pickled. In the main module of
    a program, call this under `if __name__ == "__main__"`, which multiprocessing's spawn requires.

    Raises:
        CommunicationError: a rank raised, died or did not answer; the message contains its traceback.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="megapipe-profile-") as folder:
        ranks: list[tuple[SpawnProcess, connection.Connection]] = []
        try:
            for rank in range(count):
                parent_end, child_end = context.Pipe()
                job = (rank, count, device_type, os.path.join(folder, "store"), child_end, function, args)
                process = context.Process(target=_work, args=job, name=f"rank {rank}", daemon=True)
                with _signals_blocked():
                    process.start()
                    ranks.append((process, parent_end))
                child_end.close()
            return _answers([pipe for _, pipe in ranks])
        finally:
            with _signals_blocked():
                for process, pipe in ranks:
                    process.kill()
                    process.join()
                    pipe.close()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals that end a program while processes are started or ended, so that every started process is recorded
    and ended. Processes that are started in the block never receive these signals: a terminal sends Ctrl-C to all
    processes, and the process that started the ranks ends them."""
    resource_tracker.ensure_running()  # start() would do this, and then unblock the signals
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _answers(pipes: list[connection.Connection]) -> list[Any]:
    deadline, answers = time.monotonic() + TIMEOUT, {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise CommunicationError(
                f"rank {', '.join(str(rank) for rank in waiting.values())} did not answer within {TIMEOUT:g} s"
            )
        for pipe in ready:
            assert isinstance(pipe, connection.Connection)
            rank = waiting.pop(pipe)
            try:
                succeeded, answer = pipe.recv()
            except EOFError:
                succeeded, answer = False, "its process died"
            if not succeeded:
                raise CommunicationError(f"rank {rank} of {len(pipes)} measuring ranks failed: {answer}")
            answers[rank] = answer
    return [answers[rank] for rank in range(len(pipes))]


def _work(
    rank: int,
    count: int,
    device_type: str,
    store: str,
    pipe: connection.Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    end_with_parent()
    try:
        mesh = _join(rank, count, device_type, store)
        pipe.send((True, function(mesh, *args)))
        mesh.world.barrier()
        shutdown()
    except Exception:
        pipe.send((False, traceback.format_exc()))


def _join(rank: int, count: int, device_type: str, store: str) -> Mesh:
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if count > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(store, count),
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=TIMEOUT),
        )
    return connected_mesh(MeshShape({"data": count}), device, TIMEOUT)


STEPS = 5
"""Number of timed steps in every run. The result is their median."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Alone:
    """Measurements of one rank alone."""

    config: PretrainConfig
    layers: list[MeasuredLayer]
    steps: list[StepTimes]
    products: list[Product]
    bandwidth: float
    host_bandwidth: float
    name: str
    memory: int
    lines: list[str]


def profile(
    config: PretrainConfig,
    out: Path,
    *,
    ranks: int,
    tensor_sizes: Sequence[int],
    micro_sizes: Sequence[int],
    say: Say,
    context_sizes: Sequence[int] = (1,),
    steps: int = STEPS,
) -> Hardware:
    """Measure this machine for the layers of a run, and write a hardware file.

    Layers are measured for every combination of the sizes: on one rank alone and, if `ranks` is large enough, on all
    ranks that share them. The slowdown of work and the times of collectives are measured on 2, 4, ... and on `ranks`
    ranks at once. This function starts its own processes, with one thread each.

    Args:
        config: model, sequence length, precision, optimizer, recompute and kernels are used; the layout is not. A
            GPT is measured on random tokens, a BERT on its own data.
        out: the file, which is replaced as a whole at the end.
        ranks: number of devices of the machine: its GPUs, or the number of ranks that will share its cores.
        tensor_sizes, micro_sizes, context_sizes: numbers of ranks that share a layer, of samples in a micro-batch, and
            of ranks that share a sample.
        steps: number of timed training steps in every run.

    Raises:
        ConfigError: sizes that the model does not allow, more ranks than GPUs, or a file that cannot be written. It is
            raised before anything is measured. CommunicationError: a rank failed.
    """
    device_type = _device_type(config)
    sizes = {"ranks": [ranks], "tensor size": tensor_sizes, "micro size": micro_sizes, "context size": context_sizes}
    _check(config, out, device_type, sizes | {"steps": [steps]})
    all_cells = cells(tensor_sizes, context_sizes, micro_sizes)
    say(f"layers and products on one {device_type} rank: {len(all_cells)} combinations of sizes, {steps} steps each")
    (alone,) = on_ranks(1, device_type, measure_alone, config, all_cells, ranks, steps)
    for line in alone.lines:
        say(line)
    together = []
    for count in _counts(ranks):
        say(f"{count} ranks at once: the same work on every rank, and collectives")
        together.append(on_ranks(count, device_type, measure_together, alone.config, max(micro_sizes), steps)[0])
        say(f"work takes {together[-1].factor:.2f} times as long as on a single rank")
    shared: dict[int, list[MeasuredLayer]] = {}
    for count, shared_layer_cells in shared_cells(all_cells, ranks).items():
        say(f"{count} ranks that share layers: {len(shared_layer_cells)} combinations of sizes")
        shared[count] = on_ranks(count, device_type, measure_shared, alone.config, shared_layer_cells, steps)[0]
    text = written(assembled(alone, together, ranks, shared), _remark(ranks))
    write_whole(out, text.encode())
    return read_hardware(text, str(out))


def measure_alone(mesh: Mesh, config: PretrainConfig, all_cells: Sequence[Cell], ranks: int, steps: int) -> Alone:
    """Return the measurements of one rank alone."""
    lines: list[str] = []
    config = with_precision(config, mesh, None, lines.append)
    rows, step_times = [], []
    for cell in all_cells:
        layers, whole = measure_cell(config, cell, mesh.device, steps)
        rows += layers
        step_times.append(whole)
        block = next(row for row in layers if row.kind == "block")
        lines.append(
            f"tensor {cell.tensor}, context {cell.context}, micro_size {cell.micro_size}: a block takes "
            f"{1e3 * block.forward:.2f} ms forward, {1e3 * block.backward:.2f} ms backward"
        )
    return Alone(
        config,
        rows,
        step_times,
        measured_products(config.training.precision, mesh.device),
        measured_bandwidth(mesh.device),
        copy_bandwidth(mesh.device),
        device_name(mesh.device),
        memory_bytes(mesh.device, ranks),
        lines,
    )


def assembled(
    alone: Alone, together: Sequence[Together], ranks: int, shared: Mapping[int, Sequence[MeasuredLayer]]
) -> Hardware:
    """Return the machine as `ranks` devices of one node, each with its part of common resources.

    shared: number of ranks -> layers that these ranks share, including the time for which they wait for each other.
    """
    contention = (Contention(1, 1.0), *(Contention(each.ranks, each.factor) for each in together))
    first = alone.steps[0]
    measured = Measurements(
        date=date.today().isoformat(),
        torch=str(torch.__version__),
        shape=shape_of(alone.config),
        update_seconds=first.update / first.elements,
        action_seconds=first.action,
        layers=tuple(alone.layers),
        contention=contention,
    )
    layer_waits = (waits(alone.layers, rows, measured.slowdown(count)) for count, rows in shared.items())
    measured = replace(measured, waits=tuple(itertools.chain.from_iterable(layer_waits)))
    factor = contention[-1].factor
    products = [each._replace(seconds=each.seconds * factor) for each in alone.products]
    peak = max(2.0 * each.batch * each.rows * each.inner * each.columns / each.seconds for each in products)
    precision = alone.config.training.precision
    device = Device(alone.name, {precision: peak}, alone.memory, alone.bandwidth / factor)
    device = replace(device, efficiency=fit_efficiency(device, precision, products))
    inside, outside = _links(together, alone.bandwidth)
    host = HostLink(alone.host_bandwidth / factor)
    group = NodeGroup("here", device, ranks, inside, outside, num_nodes=1, host=host)
    return Hardware("this machine", (group,), measured=measured)


def _links(together: Sequence[Together], bandwidth: float) -> tuple[IntraNodeLink, Network]:
    """Return the links of the machine, as measured between pairs of ranks; with a single rank, links at the rate of
    its memory."""
    rows = tuple(row for each in together for row in each.collectives)
    if not rows:
        return IntraNodeLink(0.0, bandwidth, bandwidth), Network(0.0, bandwidth, 1)
    pair = next(row for row in rows if row.operation == "all_reduce")
    # An all-reduce of two ranks is two steps of a ring.
    inside = IntraNodeLink(pair.latency / 2, pair.bandwidth, pair.bandwidth, rows)
    last = [row for row in rows if row.operation == "send"][-1]
    return inside, Network(last.latency, last.bandwidth, 1)


def _counts(ranks: int) -> list[int]:
    """Return 2, 4, 8, ... and `ranks` itself."""
    powers = (2**power for power in range(1, ranks.bit_length()))
    return sorted({count for count in (*powers, ranks) if 1 < count <= ranks})


def _remark(ranks: int) -> str:
    return (
        f"Measured on this machine, declared as {ranks} devices of one node. peak_flops, memory_bandwidth,\n"
        "efficiency and host are a device's share while all of them are busy. No other machine was used: `outside`\n"
        "is this host's own loopback."
    )


def _device_type(config: PretrainConfig) -> str:
    if config.parallel.device != "auto":
        return config.parallel.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _check(config: PretrainConfig, out: Path, device_type: str, sizes: Mapping[str, Sequence[int]]) -> None:
    """Raise ConfigError if a machine cannot be measured. sizes: numbers to measure with, by what they count."""
    problems = [
        f"{name} is {value}; it must be 1 or more" for name, values in sizes.items() for value in values if value < 1
    ]
    problems += [f"no {name} is given; pass at least one" for name, values in sizes.items() if not values]
    if config.model.layer_pattern:
        problems.append(
            f"model.layer_pattern is {', '.join(config.model.layer_pattern)}, "
            "but one block is measured for all; leave it and model.layer_kinds out, "
            "and set the fields of the kind of block to measure"
        )
    if not problems:
        problems += [problem for size in sizes["tensor size"] for problem in tensor_problems(config.model, size)]
        parallels = [replace(config.parallel, context=size, tensor=1) for size in sizes["context size"]]
        problems += [problem for each in parallels for problem in context_problems(replace(config, parallel=each))]
    (ranks,) = sizes["ranks"]
    if device_type == "cuda" and ranks > torch.cuda.device_count():
        problems.append(
            f"{ranks} ranks are requested, but this machine has {torch.cuda.device_count()} GPUs; request fewer ranks"
        )
    problems += output_problems(out)
    if problems:
        raise ConfigError(problems)
    samples_for(config)


def check_output(out: Path) -> None:
    """Raise ConfigError if no hardware file can be written there."""
    if problems := output_problems(out):
        raise ConfigError(problems)


def output_problems(out: Path) -> list[str]:
    """Return a message for each reason why no hardware file can be written there."""
    problems = []
    if out.is_dir() or out.suffix not in (".yaml", ".yml"):
        problems.append(f"{out} is not a name of a hardware file; choose one that ends in .yaml, such as machine.yaml")
    folder = next(each for each in out.resolve().parents if each.exists())
    if not folder.is_dir() or unwritable(folder) is not None:
        problems.append(f"{out} cannot be written: {folder} is not a writable folder; choose another file")
    return problems
