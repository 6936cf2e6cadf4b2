"""Galvatron's search: batch size, pipeline degree, micro-batches and a strategy for every layer.

Miao et al. (2022), arXiv 2211.13878, optimization algorithm: for growing batches until none fits, for every pipeline
degree, layers are cut into stages and the dynamic programming runs on each.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megapipe.planner.checks import require_counts
from megapipe.planner.galvatron.costs import BACKWARD, EqualDevices, LayerProfile, StrategyCosts
from megapipe.planner.galvatron.dynamic import LayerStrategies, choose
from megapipe.planner.galvatron.strategies import Strategy, stage_strategies, strategies
from megapipe.schedules.balance import balance_layers

ROUNDING = 1e-9
"""Relative, by which sums of the same seconds in another order may differ at the most."""


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
    machine: EqualDevices,
    batch_sizes: Iterable[int],
    *,
    recompute: bool = True,
    units: int = 512,
    tensor_valid: Callable[[int], bool] = lambda size: True,
) -> Plan:
    """The plan of most sequences per second over batch sizes in growing order, up to the first that nothing fits.

    tensor_valid: whether the model can be split over a number of tensor ranks. units: number of parts into which the
    dynamic programming divides the memory. The numbers of micro-batches are powers of 2.

    Raises:
        ValueError: no layers, devices that are no power of 2, or no batch size of which a plan fits.
    """
    if not layers:
        raise ValueError("layers is empty; name at least one layer")
    strategies(machine.devices)  # refuses devices that are no power of 2
    best: Plan | None = None
    sizes = sorted(set(batch_sizes))
    for batch_size in sizes:
        fastest = _fastest(layers, machine, batch_size, recompute, units, tensor_valid)
        if fastest is None:
            break
        if best is None or fastest.sequences_per_second > best.sequences_per_second:
            best = fastest
    if best is None:
        raise ValueError(
            f"no strategy of {machine.devices} devices fits {machine.memory_bytes:.4g} bytes per device at a batch of "
            f"{min(sizes, default=0)}; use more memory or devices, or smaller batch sizes that powers of 2 divide"
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


def _fastest(
    layers: Sequence[LayerProfile],
    machine: EqualDevices,
    batch_size: int,
    recompute: bool,
    units: int,
    tensor_valid: Callable[[int], bool],
) -> Plan | None:
    """Of one batch size, over all pipeline degrees and numbers of micro-batches; of equal plans that with the
    smallest, None where nothing fits. What its bound rules out is not planned."""
    require_counts({"batch_size": batch_size})
    shapes = [
        _Shape(layers, machine, batch_size, depth, microbatches, recompute, tensor_valid)
        for depth in (2**power for power in range(machine.devices.bit_length()))
        if depth <= len(layers)
        for microbatches in _powers_within(batch_size)
    ]
    bounds = [shape.least_seconds() for shape in shapes]
    best: Plan | None = None
    place = len(shapes)
    for at in sorted(range(len(shapes)), key=bounds.__getitem__):
        if best is not None and bounds[at] > best.seconds:
            break
        plan = shapes[at].plan(units, float("inf") if best is None else best.seconds)
        if plan is not None and (best is None or (plan.seconds, at) < (best.seconds, place)):
            best, place = plan, at
    return best


def _powers_within(batch_size: int) -> Iterator[int]:
    """Powers of 2 that divide a batch, ascending."""
    power = 1
    while batch_size % power == 0:
        yield power
        power *= 2


@dataclass(frozen=True)
class _Shape:
    """One pipeline degree and number of micro-batches."""

    layers: Sequence[LayerProfile]
    machine: EqualDevices
    batch_size: int
    depth: int
    microbatches: int
    recompute: bool
    tensor_valid: Callable[[int], bool]

    def least_seconds(self) -> float:
        """What no plan goes below: its first stage's layers one by one, whatever they hold and changes take.

        An iteration takes at least as long as all micro-batches in any one stage, with the part of the reduction that
        each has (`iteration_seconds`: a stage's reduction hides behind no more than a part of what fills the pipeline
        ahead of it).
        """
        first = self._stage(0, self._cuts()[0])
        return self.microbatches * float(first.tables().seconds.min(axis=1).sum()) * (1.0 - ROUNDING)

    def plan(self, units: int, most: float) -> Plan | None:
        """The stages, each by dynamic programming; None where one does not fit, or all take longer than `most`
        seconds."""
        stages, steady, extra = [], [], []
        known: dict[StrategyCosts, LayerStrategies | None] = {}
        for index, (first, last) in enumerate(self._cuts()):
            costs = self._stage(index, (first, last))
            if costs not in known:
                of_stage = most / self.microbatches * (1.0 + ROUNDING)
                known[costs] = choose(costs.tables(), self.machine.memory_bytes, units, of_stage)
            choice = known[costs]
            if choice is None:
                return None
            picked = tuple(costs.options[number] for number in choice.strategies)
            added = sum(costs.extra_seconds(*pair) for pair in zip(costs.layers, picked, strict=True))
            stages.append(StagePlan(first, last, picked, choice.memory_bytes))
            steady.append(choice.seconds - added / self.microbatches)
            extra.append(added)
        seconds = iteration_seconds(steady, extra, self.microbatches)
        return Plan(self.batch_size, self.microbatches, tuple(stages), seconds)

    def _cuts(self) -> tuple[tuple[int, int], ...]:
        return balance_layers([layer.forward_seconds for layer in self.layers], self.depth)

    def _stage(self, index: int, cut: tuple[int, int]) -> StrategyCosts:
        options = stage_strategies(self.machine.devices, self.depth, recompute=self.recompute)
        return StrategyCosts(
            self.machine,
            tuple(self.layers[slice(*cut)]),
            tuple(each for each in options if self.tensor_valid(each.degree("tensor"))),
            micro_size=self.batch_size // self.microbatches,
            in_flight=min(self.depth - index, self.microbatches),
            microbatches=self.microbatches,
            last=index == self.depth - 1,
        )
