"""The machine at hand as a hardware file: what its devices, their neighbours and the links between them can do."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch

from megapipe.calibration.device import device_name, measured_bandwidth, measured_products, memory_bytes
from megapipe.calibration.layers import Cell, StepTimes, cells, measure_cell
from megapipe.calibration.ranks import on_ranks
from megapipe.calibration.samples import samples_for
from megapipe.calibration.together import Together, has_devices, measure_together
from megapipe.calibration.waits import measure_shared, shared_cells, waits
from megapipe.config.errors import ConfigError
from megapipe.config.run import PretrainConfig
from megapipe.data.durable import write_whole
from megapipe.layout.hardware.description import Device, Hardware, HostLink, IntraNodeLink, Network, NodeGroup
from megapipe.layout.hardware.measured import Contention, MeasuredLayer, Measurements
from megapipe.layout.hardware.reader import read_hardware
from megapipe.layout.hardware.roofline import Product, fit_efficiency
from megapipe.layout.hardware.writer import written
from megapipe.layout.validation import context_problems
from megapipe.parallel.mesh import Mesh
from megapipe.planner.measured.shape import shape_of
from megapipe.spec.layers import tensor_problems
from megapipe.training.offload_plan import copy_bandwidth
from megapipe.training.precision import with_precision

STEPS = 5
"""Of every run that is timed; medians count."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Alone:
    """What one rank found by itself."""

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
    """Measure this machine for the layers of a run, and write what was found to a hardware file.

    Layers are measured on one rank by itself, for every combination of the sizes, and on all ranks that share them, as
    far as there are so many; how much longer work takes, and what collectives take, with 2, 4, ... and with `ranks`
    ranks at once. Starts its own processes, one thread each.

    Args:
        config: model, sequence length, precision, optimizer, recompute and kernels count; the layout does not. A
            GPT is measured on random tokens, a BERT on its own data.
        out: the file, replaced as a whole at the end.
        ranks: devices of the machine: GPUs, or as many ranks as are to share its cores.
        tensor_sizes, micro_sizes, context_sizes: ranks that share a layer, samples of a micro-batch, ranks that share
            a sample.
        steps: training steps that are timed in every run.

    Raises:
        ConfigError: sizes that the model does not allow, more ranks than GPUs, a file that cannot be written, before
            anything is measured. CommunicationError: a rank failed.
    """
    device_type = _device_type(config)
    _check(config, out, device_type, ranks, tensor_sizes, micro_sizes, context_sizes, steps)
    wanted = cells(tensor_sizes, context_sizes, micro_sizes)
    say(f"layers and products on one {device_type} rank: {len(wanted)} combinations of sizes, {steps} steps each")
    (alone,) = on_ranks(1, device_type, measure_alone, config, wanted, ranks, steps)
    for line in alone.lines:
        say(line)
    together = []
    for count in _counts(ranks):
        say(f"{count} ranks at once: the same work side by side, and collectives")
        together.append(on_ranks(count, device_type, measure_together, alone.config, max(micro_sizes), steps)[0])
        say(f"the same work takes {together[-1].factor:.2f} times as long as alone")
    shared: dict[int, list[MeasuredLayer]] = {}
    for count, cells_of in shared_cells(wanted, ranks).items():
        say(f"{count} ranks that share layers: {len(cells_of)} combinations of sizes")
        shared[count] = on_ranks(count, device_type, measure_shared, alone.config, cells_of, steps)[0]
    text = written(assembled(alone, together, ranks, shared), _remark(ranks))
    write_whole(out, text.encode())
    return read_hardware(text, str(out))


def measure_alone(mesh: Mesh, config: PretrainConfig, wanted: Sequence[Cell], ranks: int, steps: int) -> Alone:
    """Everything that one rank measures by itself."""
    lines: list[str] = []
    config = with_precision(config, mesh, None, lines.append)
    rows, found = [], []
    for cell in wanted:
        layers, whole = measure_cell(config, cell, mesh.device, steps)
        rows += layers
        found.append(whole)
        block = next(row for row in layers if row.kind == "block")
        lines.append(
            f"tensor {cell.tensor}, context {cell.context}, micro_size {cell.micro_size}: a block takes "
            f"{1e3 * block.forward:.2f} ms forward, {1e3 * block.backward:.2f} ms backward"
        )
    return Alone(
        config,
        rows,
        found,
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
    """The machine as `ranks` devices of one node, each with its share of what they have together.

    shared: number of ranks -> layers that so many share, with all that these wait for one another.
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
    beside = [row for count, rows in shared.items() for row in waits(alone.layers, rows, measured.slowdown(count))]
    measured = replace(measured, waits=tuple(beside))
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
    """Inside the machine what its pairs of ranks reach; a machine without ranks that talk has its memory's rate."""
    rows = tuple(row for each in together for row in each.collectives)
    if not rows:
        return IntraNodeLink(0.0, bandwidth, bandwidth), Network(0.0, bandwidth, 1)
    pair = next(row for row in rows if row.operation == "all_reduce")
    # Of two ranks' all-reduce, two steps of a ring.
    inside = IntraNodeLink(pair.latency / 2, pair.bandwidth, pair.bandwidth, rows)
    last = [row for row in rows if row.operation == "send"][-1]
    return inside, Network(last.latency, last.bandwidth, 1)


def _counts(ranks: int) -> list[int]:
    """2, 4, 8, ... and `ranks` itself."""
    powers = (2**power for power in range(1, ranks.bit_length()))
    return sorted({count for count in (*powers, ranks) if 1 < count <= ranks})


def _remark(ranks: int) -> str:
    return (
        f"Measured on this machine, declared as {ranks} devices of one node. peak_flops, memory_bandwidth,\n"
        "efficiency and host are a device's share while all of them are busy. No other machine was there: `outside`\n"
        "is this host's own loopback."
    )


def _device_type(config: PretrainConfig) -> str:
    if config.parallel.device != "auto":
        return config.parallel.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _check(
    config: PretrainConfig,
    out: Path,
    device_type: str,
    ranks: int,
    tensor_sizes: Sequence[int],
    micro_sizes: Sequence[int],
    context_sizes: Sequence[int],
    steps: int,
) -> None:
    problems = [
        f"{name} {value} must be 1 or more"
        for name, values in {
            "ranks": [ranks],
            "tensor size": tensor_sizes,
            "micro size": micro_sizes,
            "context size": context_sizes,
            "steps": [steps],
        }.items()
        for value in values
        if value < 1
    ]
    lists = {"tensor size": tensor_sizes, "micro size": micro_sizes, "context size": context_sizes}
    problems += [f"no {name} is given; give one or more" for name, values in lists.items() if not values]
    if not problems:
        problems += [problem for size in tensor_sizes for problem in tensor_problems(config.model, size)]
        problems += [problem for size in context_sizes for problem in context_problems(_of_context(config, size))]
    if not has_devices(device_type, ranks):
        problems.append(
            f"{ranks} ranks are requested, but this machine has {torch.cuda.device_count()} GPUs; request fewer"
        )
    problems += output_problems(out)
    if problems:
        raise ConfigError(problems)
    samples_for(config)


def check_output(out: Path) -> None:
    """Raise ConfigError where no hardware file can be written."""
    problems = output_problems(out)
    if problems:
        raise ConfigError(problems)


def output_problems(out: Path) -> list[str]:
    """Why no hardware file can be written there, one message each."""
    found = []
    if out.is_dir() or out.suffix not in (".yaml", ".yml"):
        found.append(f"{out} is not a name for a hardware file; give one that ends in .yaml, such as machine.yaml")
    folder = next(each for each in out.resolve().parents if each.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        found.append(f"{out} cannot be written: {folder} is not a folder that you can write to; name another file")
    return found


def _of_context(config: PretrainConfig, size: int) -> PretrainConfig:
    return replace(config, parallel=replace(config.parallel, context=size, tensor=1))
