"""The planner of PipeDream-2BW: width, depth, micro-batch size and recomputation of a model of equal blocks.

Narayanan et al. (2021), "Memory-Efficient Pipeline-Parallel DNN Training", arXiv 2006.09503, section 4, appendix A and
algorithm 1. Width is the number of replicas, depth the number of stages.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import get_args

from megapipe.planner.checks import require_counts, require_positive
from megapipe.planner.pipedream.memory import Execution, Footprint, stage_bytes


@dataclass(frozen=True)
class BlockModel:
    """What the planner asks of a model, profiled or modelled; a micro-batch has b sequences.

    num_blocks: equal blocks, of which every stage gets as many. block_seconds: b -> seconds of one block's forward and
    backward. footprint: b -> bytes. weight_bytes: of the whole model's gradients, that replicas reduce once a batch.
    recompute_factor: c_extra, of the time when forwards are recomputed; 4/3 for a backward of twice a forward.
    """

    num_blocks: int
    block_seconds: Callable[[int], float]
    footprint: Callable[[int], Footprint]
    weight_bytes: float
    recompute_factor: float = 4 / 3

    def __post_init__(self) -> None:
        require_counts({"num_blocks": self.num_blocks})
        require_positive({"weight_bytes": self.weight_bytes, "recompute_factor": self.recompute_factor})


@dataclass(frozen=True)
class Machine:
    """Equal devices in equal servers: bytes of memory of one, and bytes per second of a device's links.

    fast: inside a server, B_high. slow: between servers, B_low.
    """

    devices: int
    devices_per_server: int
    memory_bytes: float
    fast: float
    slow: float

    def __post_init__(self) -> None:
        require_counts({"devices": self.devices, "devices_per_server": self.devices_per_server})
        require_positive({"memory_bytes": self.memory_bytes, "fast": self.fast, "slow": self.slow})

    def width_bandwidth(self, width: int) -> float:
        """Of the replicas of a stage, which share servers where they can: B_high below a server's devices."""
        return self.fast if width < self.devices_per_server else self.slow

    def depth_bandwidth(self, depth: int) -> float:
        """Between stages, which lie on different servers as replicas come first; inside one where all devices do."""
        return self.fast if self.devices <= self.devices_per_server or depth == 1 else self.slow


@dataclass(frozen=True)
class Configuration:
    """An answer of the planner: w, d, b, r, with g, memory in bytes of a device and sequences per second.

    accumulation: g, micro-batches of a batch and replica beyond the depth's worth: m = d g, so that 2BW has m >= d.
    """

    width: int
    depth: int
    micro_size: int
    execution: Execution
    batch_size: int
    memory_bytes: float
    sequences_per_second: float

    @property
    def microbatches(self) -> int:
        """m(b) = B / (w b), of a replica in one batch."""
        return self.batch_size // (self.width * self.micro_size)

    @property
    def accumulation(self) -> int:
        """g = B / (w d b)."""
        return self.microbatches // self.depth


def sequences_per_second(
    model: BlockModel, machine: Machine, batch_size: int, width: int, depth: int, micro_size: int, execution: Execution
) -> float:
    """THROUGHPUT of algorithm 1 by the cost model of appendix A, of all replicas together.

    A stage takes max(compute + sends, all-reduce / m(b)); a full pipeline is as fast as its slowest stage, one without
    pipelining as slow as their sum. Sends are `2 |A_in + A_out|` bytes. The paper's b / t is one pipeline's: between
    widths the replicas' sum is what compares.
    """
    compute = model.num_blocks // depth * model.block_seconds(micro_size)
    if execution == "recomputed":
        compute *= model.recompute_factor
    boundary = model.footprint(micro_size).boundary
    sends = 2 * 2 * boundary / machine.depth_bandwidth(depth) if depth > 1 else 0.0
    reduced = 2 * (width - 1) / width * model.weight_bytes / depth / machine.width_bandwidth(width)
    stage = max(compute + sends, reduced * width * micro_size / batch_size)
    return width * micro_size / (depth * stage if execution == "no_pipelining" else stage)


def configurations(model: BlockModel, machine: Machine, batch_size: int) -> Iterator[Configuration]:
    """The configurations that algorithm 1 compares: of every width, depth and execution the largest micro-batch.

    Widths and depths have w d <= devices, the depth divides the blocks, and b divides the batch into w d b g; without
    pipelining the batch needs no micro-batch per stage, w b g. All of them are within memory.

    Raises:
        ValueError: a batch size below 1.
    """
    require_counts({"batch_size": batch_size})
    depths = [depth for depth in range(1, machine.devices + 1) if not model.num_blocks % depth]
    for width in range(1, machine.devices + 1):
        for depth in depths:
            if width * depth > machine.devices:
                break
            for execution in get_args(Execution):
                found = _search(model, machine, batch_size, width, depth, execution)
                if found is not None:
                    yield found


def plan(model: BlockModel, machine: Machine, batch_size: int) -> Configuration:
    """The fastest configuration for a global batch of `batch_size` sequences (algorithm 1).

    Equal to trying all micro-batch sizes wherever a block's time per sequence does not rise with the size.

    Raises:
        ValueError: a batch size below 1, or nothing fits into memory.
    """
    found = max(configurations(model, machine, batch_size), key=lambda each: each.sequences_per_second, default=None)
    if found is None:
        raise ValueError(
            f"no width and depth of {machine.devices} devices fits {machine.memory_bytes:.4g} bytes per device and a "
            f"batch of {batch_size} sequences; use more devices, more memory, or a number of blocks that more stages "
            "divide"
        )
    return found


def _search(
    model: BlockModel, machine: Machine, batch_size: int, width: int, depth: int, execution: Execution
) -> Configuration | None:
    """SEARCH of algorithm 1 for one execution: the largest micro-batch within memory; None where none is."""
    share, rest = divmod(batch_size, width * (1 if execution == "no_pipelining" else depth))
    if rest:
        return None
    for micro_size in (size for size in range(share, 0, -1) if not share % size):
        memory = stage_bytes(model.footprint(micro_size), depth, execution)
        if memory <= machine.memory_bytes:
            rate = sequences_per_second(model, machine, batch_size, width, depth, micro_size, execution)
            return Configuration(width, depth, micro_size, execution, batch_size, memory, rate)
    return None
