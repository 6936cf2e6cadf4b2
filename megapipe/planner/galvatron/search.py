"""Galvatron's search: batch size, pipeline degree, micro-batches and a strategy for every layer.

Miao et al. (2022), arXiv 2211.13878, optimization algorithm: for growing batches until none fits, for every pipeline
degree, layers are cut into stages and the dynamic programming runs on each.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megapipe.planner.checks import require_counts
from megapipe.planner.galvatron.costs import BACKWARD, LayerProfile, Machine, StageCosts
from megapipe.planner.galvatron.dynamic import choose
from megapipe.planner.galvatron.strategies import Strategy, stage_strategies, strategies
from megapipe.schedules.balance import balance_layers


@dataclass(frozen=True)
class StagePlan:
    """Layers first to last - 1 of a stage, a strategy for each, and bytes of a device."""

    first: int
    last: int
    strategies: tuple[Strategy, ...]
    memory_bytes: float


@dataclass(frozen=True)
class Plan:
    """An iteration of `batch_size` sequences in `microbatches` per pipeline, and its seconds."""

    batch_size: int
    microbatches: int
    stages: tuple[StagePlan, ...]
    seconds: float

    @property
    def sequences_per_second(self) -> float:
        """What the search maximises."""
        return self.batch_size / self.seconds


def search(
    layers: Sequence[LayerProfile],
    machine: Machine,
    batch_sizes: Iterable[int],
    *,
    recompute: bool = True,
    units: int = 512,
) -> Plan:
    """The plan of most sequences per second over batch sizes in growing order, up to the first that nothing fits.

    units: parts of memory in which the dynamic programming counts. The numbers of micro-batches are powers of 2.

    Raises:
        ValueError: no layers, devices that are no power of 2, or no batch size of which a plan fits.
    """
    if not layers:
        raise ValueError("layers must name at least one layer, got none")
    strategies(machine.devices)  # refuses devices that are no power of 2
    best: Plan | None = None
    sizes = sorted(set(batch_sizes))
    for batch_size in sizes:
        plans = list(_plans(layers, machine, batch_size, recompute, units))
        if not plans:
            break
        fastest = max(plans, key=lambda plan: plan.sequences_per_second)
        if best is None or fastest.sequences_per_second > best.sequences_per_second:
            best = fastest
    if best is None:
        raise ValueError(
            f"no strategy of {machine.devices} devices fits {machine.memory_bytes:.4g} bytes a device at a batch of "
            f"{min(sizes, default=0)}; give more memory or devices, or smaller batch sizes that powers of 2 divide"
        )
    return best


def iteration_seconds(steady: Sequence[float], extra: Sequence[float], microbatches: int) -> float:
    """Of a 1F1B pipeline whose stages take `steady` seconds a micro-batch, and `extra` more behind the last one.

    The longest path through any stage: earlier stages fill and drain around it, later ones only as far as its warm-up
    forwards leave time. What a stage adds at the end hides behind the backwards of earlier stages, which end later
    (the paper's cost of a pipeline has these terms). Exact for equal stages; the simulated time of unequal ones is at
    most a little longer.
    """
    paths = []
    for index, each in enumerate(steady):
        warm_up = min(len(steady) - 1 - index, microbatches - 1) * each / (1 + BACKWARD)
        paths.append(sum(steady[:index]) + microbatches * each + max(0.0, sum(steady[index + 1 :]) - warm_up))
    hidden = BACKWARD / (1 + BACKWARD)
    end = max(each - hidden * sum(steady[:index]) for index, each in enumerate(extra))
    return max(paths) + max(0.0, end)


def _plans(
    layers: Sequence[LayerProfile], machine: Machine, batch_size: int, recompute: bool, units: int
) -> Iterable[Plan]:
    """Of one batch size, the best of every pipeline degree and number of micro-batches that fit."""
    require_counts({"batch_size": batch_size})
    for depth in (2**power for power in range(machine.devices.bit_length())):
        if depth > len(layers):
            return
        microbatches = 1
        while batch_size % microbatches == 0:
            plan = _plan(layers, machine, batch_size, depth, microbatches, recompute, units)
            if plan is not None:
                yield plan
            microbatches *= 2


def _plan(
    layers: Sequence[LayerProfile],
    machine: Machine,
    batch_size: int,
    depth: int,
    microbatches: int,
    recompute: bool,
    units: int,
) -> Plan | None:
    """The stages of one pipeline degree, each by dynamic programming; None where one does not fit."""
    options = stage_strategies(machine.devices, depth, recompute=recompute)
    stages, steady, extra = [], [], []
    for index, (first, last) in enumerate(balance_layers([layer.forward_seconds for layer in layers], depth)):
        costs = StageCosts(
            machine,
            tuple(layers[first:last]),
            options,
            micro_size=batch_size // microbatches,
            in_flight=min(depth - index, microbatches),
            microbatches=microbatches,
            last=index == depth - 1,
        )
        choice = choose(costs.tables(), machine.memory_bytes, units)
        if choice is None:
            return None
        picked = tuple(options[number] for number in choice.strategies)
        added = sum(costs.extra_seconds(*pair) for pair in zip(costs.layers, picked, strict=True))
        stages.append(StagePlan(first, last, picked, choice.memory_bytes))
        steady.append(choice.seconds - added / microbatches)
        extra.append(added)
    return Plan(batch_size, microbatches, tuple(stages), iteration_seconds(steady, extra, microbatches))
