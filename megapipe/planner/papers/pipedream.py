"""The planners of PipeDream and PipeDream-2BW, which divide a model over workers for their schedules.

PipeDream's partitioners cut layers into stages, each on its own number of workers, by dynamic programming. `flat` has
all workers on equal links: Harlap et al. (2018), "PipeDream: Fast and Efficient Pipeline Parallel DNN Training", arXiv
1806.03377, partitioning algorithm. `hierarchical` has links that slow down from level to level: Narayanan et al.
(2019), "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP'19, partitioning algorithm. Both minimise
the time of the slowest stage per mini-batch, and both use every worker, as in the papers. The formulas come from
secondary descriptions of the papers (the second one's from memory) and were not checked in them.

PipeDream-2BW's planner chooses width, depth, micro-batch size and recomputation of a model of equal blocks: Narayanan
et al. (2021), "Memory-Efficient Pipeline-Parallel DNN Training", arXiv 2006.09503, section 4, appendix A and algorithm
1. Width is the number of replicas, depth the number of stages. Algorithm 1 and its objective, the throughput, are the
paper's. For a model of this project, times come from its layers, and memory comes from a walk through the schedule
instead of the closed form of appendix A (`two_buffered_plan`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from megapipe.config import ConfigError
from megapipe.config.command_line import Report, quiet
from megapipe.config.memory import RecomputeConfig
from megapipe.config.parallel import LayerStrategy, ScheduleConfig, ZeroConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Hardware, hardware_device_type
from megapipe.layout.prediction import layout_costs
from megapipe.layout.stages import layers_of, num_parameters
from megapipe.planner.cost.layer_times import LayerTimes, slowest_roofline
from megapipe.planner.cost.memory import rank_memories
from megapipe.planner.cost.model import estimate
from megapipe.planner.cost.run_layout import lay_run
from megapipe.schedules.actions import Floats, Ints
from megapipe.schedules.registry import find_published
from megapipe.spec.ops import FULL_BYTES

Passes = Callable[[Ints], npt.NDArray[np.floating]]
"""Numbers of replicas -> how often weights cross a link in a gradient sum."""


@dataclass(frozen=True)
class Layer:
    """Profile of one layer for one mini-batch: seconds of forward and backward, bytes of output and of weights."""

    seconds: float
    activation_bytes: float
    weight_bytes: float


@dataclass(frozen=True)
class Level:
    """A level of the machine, such as the devices of a server, or the servers of a cluster.

    width: m_k, number of components of the level below. bytes_per_second: B_k, bandwidth between these components.
    """

    width: int
    bytes_per_second: float


@dataclass(frozen=True)
class PartitionStage:
    """Layers first to last - 1, replicated over `workers` components of a level.

    inner: stages into which each component divides these layers on the level below; empty for devices.
    """

    first: int
    last: int
    workers: int
    inner: tuple["PartitionStage", ...] = ()

    def on_devices(self) -> list[tuple[int, int, int]]:
        """Return the first layer, the end and the number of devices of its stages on the innermost level."""
        stages = [each for stage in self.inner for each in stage.on_devices()] or [(self.first, self.last, 1)]
        return [(first, last, self.workers * devices) for first, last, devices in stages]


@dataclass(frozen=True)
class Partition:
    """Stages in order, and the seconds per mini-batch of the slowest stage or transfer between stages."""

    seconds: float
    stages: tuple[PartitionStage, ...]

    @property
    def in_flight(self) -> int:
        """Return NOAM, the mini-batches that fill the pipeline: workers / replicas of the first stage, rounded up."""
        return -(-sum(stage.workers for stage in self.stages) // self.stages[0].workers)


def flat(layers: Sequence[Layer], workers: int, bytes_per_second: float, report: Report = quiet) -> Partition:
    """Return the best partition over `workers` workers with equal links (arXiv 1806.03377, partitioning algorithm).

    T(i..j, m) = max(sum of seconds, sum of W_l) / m, where `W_l = 4 (m - 1) |w_l| / (m x bandwidth)`; a transfer takes
    twice the activation over the bandwidth. report: receives the fraction of the work that is done.
    """
    return _best(layers, [Level(workers, bytes_per_second)], lambda count: 4.0 * (count - 1.0) / count, report)


def hierarchical(layers: Sequence[Layer], levels: Sequence[Level], report: Report = quiet) -> Partition:
    """Return the best partition over levels of links (SOSP'19, partitioning algorithm). levels: the innermost first.
    report: receives the fraction of each level that is done.

    `T^k(i..j, m) = max(A^(k-1)(i..j, m_(k-1)), 2 (m - 1) sum of |w_l| / B_k) / m`, and A^0 is the sum of seconds; a
    transfer of level k takes twice the activation over B_k.
    """
    return _best(layers, levels, lambda count: 2.0 * (count - 1.0), report)


def _best(layers: Sequence[Layer], levels: Sequence[Level], passes: Passes, report: Report) -> Partition:
    """Return the best partition. report: receives the fraction of each level that is done."""
    profile, chosen = np.array([astuple(layer) for layer in layers]).T, list[Ints]()
    totals = np.pad(profile.cumsum(axis=1), [(0, 0), (1, 0)])
    # Sums over layers first to last - 1, shape [firsts, lasts]; fastest is A^(k-1), on one component of a level.
    fastest, _, weights = totals[:, None] - totals[:, :-1, None]
    for number, level in enumerate(levels):
        counts, rate = np.arange(1, level.width + 1), level.bytes_per_second
        synchronised = passes(counts) * weights[..., None] / rate
        stage = np.maximum(fastest[..., None], synchronised) / counts
        # Outer levels need every range of layers; of the outermost one, only all layers are asked.
        firsts = len(layers) if number + 1 < len(levels) else 1
        best, last = _best_of_level(stage[:firsts], stage, 2 * profile[1] / rate, report)
        chosen.append(last)
        fastest = best[..., -1]

    def stages(k: int, first: int, last: int, count: int) -> tuple[PartitionStage, ...]:
        if k == 0:
            return ()
        at, width = int(chosen[k - 1][first, last, count - 1]), levels[k - 2].width if k > 1 else 1
        cut, own = (first, count) if at < 0 else (at // (count - 1) + 1, at % (count - 1) + 1)
        stage = PartitionStage(cut, last, own, stages(k - 1, cut, last, width))
        return (stage,) if at < 0 else (*stages(k, first, cut, count - own), stage)

    return Partition(float(fastest[0, -1]), stages(len(levels), 0, len(layers), levels[-1].width))


def _best_of_level(whole: Floats, stage: Floats, transfer: Floats, report: Report) -> tuple[Floats, Ints]:
    """Return A^k(first..last, m), and the last stage: (its first layer - 1) (m - 1) + its workers - 1, or -1 for all.

    whole: T^k of the layers as one stage; stage: T^k of a last stage, shape [firsts, lasts, workers]; a level's A has
    the shape of `whole`. transfer: seconds to send the output of each layer.
    """
    best, chosen, firsts = whole.copy(), np.full(whole.shape, -1), np.arange(len(whole))
    for last in range(2, whole.shape[1]):
        report(last / whole.shape[1])
        # The layers up to a cut on some workers, the transfer, then a stage on the others.
        after = np.maximum(stage[1:last, last], transfer[: last - 1, None])
        impossible = firsts[:, None] >= np.arange(1, last)
        for count in range(2, whole.shape[2] + 1):
            slowest = np.maximum(best[:, 1:last, count - 2 :: -1], after[:, : count - 1])
            slowest[impossible] = np.inf
            choices = slowest.reshape(len(whole), -1)
            at = choices.argmin(axis=1)
            fastest = choices[firsts, at]
            better = fastest < best[:, last, count - 1]
            best[better, last, count - 1], chosen[better, last, count - 1] = fastest[better], at[better]
    return best, chosen


def partition_plan(config: PretrainConfig, hardware: Hardware, devices: int, report: Report = quiet) -> dict[str, Any]:
    """Return the stages of PipeDream's partitioners for micro-batches of batch.micro_size, ready for JSON.

    On the devices of one node, the answer is that of `flat`, otherwise that of `hierarchical` over devices of a node
    and nodes. `replicas` of a stage is its number of devices. megapipe cannot train it if the numbers differ. Times of
    layers are the roofline of the first group's device, and every layer sends a message between stages. report:
    receives the fraction of each level that is done.

    Raises ConfigError if the last node has fewer devices than the others, the precision is auto, or the device has no
    peak for it.
    """
    machine, run = Machine.of(hardware, devices), uniform_run(config, config.batch.micro_size)
    inside = machine.devices_per_server
    if devices > inside and devices % inside:
        raise ConfigError(
            f"PipeDream's partitioner: {devices} devices are not whole nodes of "
            f"{inside}, but it needs nodes of one size; use a multiple of {inside} devices"
        )
    times = slowest_roofline([hardware.groups[0].device], config.training.precision)
    sent = float(layout_costs(run, device=hardware_device_type(hardware)).stream)
    members, profile = layers_of(run), []
    for layer in members:
        weights = FULL_BYTES * sum(spec.num_elements for spec in layer.parameters.values())
        profile.append(Layer(sum(times.of(run, layer)[:4]), sent, float(weights)))
    if devices > inside:
        levels = [Level(inside, machine.fast), Level(devices // inside, inside * machine.slow)]
        source, partition = "hierarchical", hierarchical(profile, levels, report)
    else:
        source, partition = "flat", flat(profile, devices, machine.fast, report)
    return {
        "source": f"PipeDream's {source} partitioner",
        "tokens_per_s": config.batch.micro_size * config.data.sequence_length / partition.seconds,
        "in_flight": partition.in_flight,
        "stages": [
            {"layers": [members[first].name, members[last - 1].name], "replicas": replicas}
            for stage in partition.stages
            for first, last, replicas in stage.on_devices()
        ],
    }


PAPER = "arXiv 2006.09503"
SETTINGS = (
    "parallel.data", "parallel.pipeline", "parallel.tensor", "batch.micro_size", "schedule.name", "recompute.method",
)  # fmt: skip
"""Configuration fields that every plan sets."""
Execution = Literal["no_pipelining", "pipelined", "recomputed"]
"""The planner's r: one micro-batch in the pipeline at a time, a full pipeline, or a full one with recomputation."""


@dataclass(frozen=True)
class BlockModel:
    """A model of equal blocks. b is the number of sequences of a micro-batch.

    num_blocks: number of blocks; every stage has the same number. block_seconds: (b, recomputed) -> seconds of one
    block's forward and backward, and of its recomputed forward. boundary_bytes: b -> bytes of a stage's input.
    memory_bytes: (depth, b, execution) -> bytes of the fullest stage. gradient_bytes: gradients of the whole model,
    which replicas reduce once per batch.
    """

    num_blocks: int
    block_seconds: Callable[[int, bool], float]
    boundary_bytes: Callable[[int], float]
    memory_bytes: Callable[[int, int, Execution], float]
    gradient_bytes: float


@dataclass(frozen=True)
class Machine:
    """Equal devices in equal servers: memory of a device in bytes, and bandwidth of its links in bytes per second.

    fast: B_high, inside a server. slow: B_low, between servers.
    """

    devices: int
    devices_per_server: int
    memory_bytes: float
    fast: float
    slow: float

    @classmethod
    def of(cls, hardware: Hardware, devices: int) -> "Machine":
        """Return the lowest figures of the hardware's devices, while all devices of a node send to other nodes. Raises
        ConfigError if there are fewer devices than `devices`."""
        nodes = hardware.nodes(devices)
        return cls(
            devices,
            min(node.devices_per_node for node in nodes),
            min(node.device.memory_bytes for node in nodes),
            min(node.inside.bandwidth for node in nodes),
            min(node.outside.of_device(node.devices_per_node) for node in nodes),
        )


@dataclass(frozen=True)
class Configuration:
    """A configuration of the planner: w, d, b, r, B, memory of a device in bytes, and sequences per second."""

    width: int
    depth: int
    micro_size: int
    execution: Execution
    batch_size: int
    memory_bytes: float = 0.0
    sequences_per_second: float = 0.0

    @property
    def accumulation(self) -> int:
        """Return g = B / (w d b). A replica's batch has m = d g micro-batches, so 2BW's condition m >= d holds."""
        return self.batch_size // (self.width * self.depth * self.micro_size)


def sequences_per_second(
    model: BlockModel, machine: Machine, batch_size: int, width: int, depth: int, micro_size: int, execution: Execution
) -> float:
    """Return THROUGHPUT of algorithm 1, the paper's objective, by appendix A, for all replicas together.

    A stage takes max(compute + sends, all-reduce / m(b)). A full pipeline is as fast as its slowest stage; without
    pipelining, a micro-batch takes the sum of all stages. Sends are `2 |A_in + A_out|` bytes. The paper's b / t is the
    throughput of one pipeline; to compare different widths, this function returns the sum over replicas.
    """
    # If there are several servers, stages are on different ones; so are replicas, unless they are fewer than a
    # server's devices.
    between_stages = machine.fast if machine.devices <= machine.devices_per_server else machine.slow
    between_replicas = machine.fast if width < machine.devices_per_server else machine.slow
    compute = model.num_blocks // depth * model.block_seconds(micro_size, execution == "recomputed")
    sends = 2 * 2 * model.boundary_bytes(micro_size) / between_stages if depth > 1 else 0.0
    reduced = 2 * (width - 1) / width * model.gradient_bytes / depth / between_replicas
    stage = max(compute + sends, reduced * width * micro_size / batch_size)
    return width * micro_size / (depth * stage if execution == "no_pipelining" else stage)


def configurations(
    model: BlockModel, machine: Machine, batch_size: int, report: Report = quiet
) -> Iterator[Configuration]:
    """Yield the configurations that algorithm 1 compares: for every width, depth and execution, the one with the
    largest micro-batch that fits.

    They satisfy w d <= devices, the depth divides the number of blocks, and the batch is w d b g, or w b g without
    pipelining, with whole numbers b and g.
    """
    numbers = range(1, machine.devices + 1)
    for width, depth, execution in product(numbers, numbers, get_args(Execution)):
        report((width - 1) / machine.devices)
        most, rest = divmod(batch_size, width * (1 if execution == "no_pipelining" else depth))
        if width * depth > machine.devices or model.num_blocks % depth or rest:
            continue
        for micro_size in (size for size in range(most, 0, -1) if not most % size):
            memory = model.memory_bytes(depth, micro_size, execution)
            if memory <= machine.memory_bytes:
                rate = sequences_per_second(model, machine, batch_size, width, depth, micro_size, execution)
                yield Configuration(width, depth, micro_size, execution, batch_size, memory, rate)
                break


def plan(model: BlockModel, machine: Machine, batch_size: int, report: Report = quiet) -> Configuration:
    """Return the fastest configuration for a global batch of `batch_size` sequences (algorithm 1).

    Trying all micro-batch sizes gives the same result if a block's time per sequence does not increase with the size.
    report: receives the fraction of the work that is done.
    Raises ValueError if nothing fits into memory.
    """
    every = configurations(model, machine, batch_size, report)
    fastest = max(every, key=lambda each: each.sequences_per_second, default=None)
    if fastest is None:
        raise ValueError(
            f"no width and depth of {machine.devices} devices fits {machine.memory_bytes:.4g} "
            f"bytes per device and a batch of {batch_size} sequences; use more "
            "devices, more memory, or a number of blocks with more divisors"
        )
    return fastest


def two_buffered_plan(
    config: PretrainConfig, hardware: Hardware, devices: int, report: Report = quiet
) -> dict[str, Any]:
    """Return the answer of algorithm 1 for batches of batch.global_size, ready for JSON.

    The paper's blocks are equal, so the time of embedding and head is spread over them. `memory_bytes` is that of the
    fullest stage. `settings` are `SETTINGS` and all other fields of `config` that the plan changes. `by_cost_model`
    is this project's estimate; it differs, because the paper's model ignores the update before the next forwards.
    Times of layers are the roofline of the first group's device. report: receives the fraction of work that is done.

    Raises ConfigError if nothing fits, the precision is auto, or the device has no peak for it.
    """
    times = slowest_roofline([hardware.groups[0].device], config.training.precision)
    try:
        model, machine = _block_model(config, hardware, times), Machine.of(hardware, devices)
        chosen = plan(model, machine, config.batch.global_size, report)
    except ValueError as error:
        raise ConfigError(f"2bw plan: {error}") from error
    configured = _configured(config, chosen)
    before, after = _fields(config), _fields(configured)
    return {
        "source": f"PipeDream-2BW's planner, {PAPER}, algorithm 1",
        **{name: getattr(chosen, name) for name in ("width", "depth", "micro_size", "execution", "accumulation")},
        "devices": chosen.width * chosen.depth,
        "memory_bytes": chosen.memory_bytes,
        "tokens_per_s": chosen.sequences_per_second * config.data.sequence_length,
        "step_time_s": chosen.batch_size / chosen.sequences_per_second,
        "settings": {name: after[name] for name in after if name in SETTINGS or after[name] != before[name]},
        "by_cost_model": estimate(configured, hardware, times=times).as_json(),
    }


def _fields(config: PretrainConfig) -> dict[str, Any]:
    """Return the fields of all groups by name."""
    groups = {group: members for group, members in asdict(config).items() if isinstance(members, dict)}
    return {f"{group}.{name}": value for group, members in groups.items() for name, value in members.items()}


def _block_model(config: PretrainConfig, hardware: Hardware, times: LayerTimes) -> BlockModel:
    """Return the model with times of its layers, and with memory by a walk through the schedule."""
    blocks = config.model.num_layers

    @cache
    def seconds(micro_size: int, recomputed: bool) -> float:
        whole = uniform_run(config, micro_size, recompute=recomputed)
        layers = [times.of(whole, layer) for layer in layers_of(whole)]
        return sum(sum(each[:4]) for each in layers) / blocks  # passes, and the forward again

    @cache
    def memory(depth: int, micro_size: int, execution: Execution) -> int:
        batch_size = micro_size * (1 if execution == "no_pipelining" else depth)
        run = _configured(config, Configuration(1, depth, micro_size, execution, batch_size))
        return max(each.total for each in rank_memories(lay_run(run, hardware)))

    def boundary(micro_size: int) -> int:
        return layout_costs(uniform_run(config, micro_size), device=hardware_device_type(hardware)).stream

    return BlockModel(blocks, seconds, boundary, memory, FULL_BYTES * num_parameters(config))


def uniform_run(
    config: PretrainConfig,
    micro_size: int,
    *,
    data: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    recompute: bool = False,
) -> PretrainConfig:
    """Return the same model with one strategy in all layers, by default on one device, without sharding.

    `parallel.layers` keeps only the fp8 setting of layers.
    """
    layers = {name: LayerStrategy(fp8=own.fp8) for name, own in config.parallel.layers.items() if own.fp8 is not None}
    parallel = replace(config.parallel, data=data, tensor=tensor, pipeline=pipeline, context=1, sequence=False)
    schedule = replace(config.schedule, name=ScheduleConfig.name, chunks=None, group_size=None, update=None, file="")
    return replace(
        config,
        parallel=replace(parallel, sequence_chunks=1, layers_per_stage=None, layers=layers),
        zero=ZeroConfig(),
        recompute=RecomputeConfig(method="full" if recompute else "none", logits=config.recompute.logits),
        schedule=schedule,
        batch=replace(config.batch, micro_size=micro_size),
    )


def _configured(config: PretrainConfig, chosen: Configuration) -> PretrainConfig:
    """Return the run with the layout of a plan, and defaults for all other fields of its layout.

    No schedule here keeps one micro-batch at a time in the pipeline. So plans without pipelining use the default
    schedule, which is never slower; with depth 1 it is plain gradient accumulation.
    """
    recompute = chosen.execution == "recomputed"
    run = uniform_run(config, chosen.micro_size, data=chosen.width, pipeline=chosen.depth, recompute=recompute)
    if chosen.execution != "no_pipelining":
        run = replace(run, schedule=replace(run.schedule, name=find_published(PAPER).name))
    return replace(run, batch=replace(run.batch, global_size=chosen.batch_size))
