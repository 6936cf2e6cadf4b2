"""Bytes that each pipeline coordinate holds, in closed form: `predict_rank` without walking through the schedule."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import numpy as np

from megapipe.costs.layout import LayoutCosts
from megapipe.costs.memory import ELEMENT_BYTES, FULL_BYTES, StateBytes
from megapipe.costs.parameters import LayerSpec
from megapipe.costs.units import Unit
from megapipe.planner.cost.estimate import RankMemory
from megapipe.planner.cost.in_flight import most_held
from megapipe.planner.cost.message_slots import message_slots
from megapipe.planner.cost.run_layout import RunLayout
from megapipe.planner.hardware.device_type import hardware_device_type
from megapipe.planner.runs.scheduling import schedule_options
from megapipe.schedules.generators.registry import find_generator


@dataclass(frozen=True)
class LayerSizes:
    """Of one layer of each kind of a run (`RunLayout.kinds`), whatever its stages.

    layers: one of each kind. kept, pending: bytes of a micro-batch's activations, as `LayoutCosts` has them. units:
    parameters, without what is tied. elements: of their flat buffers. summands: bytes of a sum of their gradients.
    """

    costs: LayoutCosts
    layers: tuple[LayerSpec, ...]
    kept: tuple[float, ...]
    pending: tuple[float, ...]
    units: tuple[Unit, ...]
    elements: tuple[int, ...]
    summands: tuple[int, ...]

    @classmethod
    def of(cls, run: RunLayout) -> "LayerSizes":
        """Those of a run, which hold for all that differ from it in their schedule alone."""
        costs, tied = run.costs, set(run.tied)
        layers = tuple(run.stages.layers[index] for index in run.kinds)
        of_units, gloo = costs.of_units, hardware_device_type(run.hardware) == "cpu"
        units = [Unit(tuple(spec for spec in layer.parameters.values() if spec.name not in tied)) for layer in layers]
        return cls(
            costs,
            layers,
            tuple(float(costs.kept(layer)) for layer in layers),
            tuple(float(costs.pending(layer)) for layer in layers),
            tuple(units),
            tuple(of_units.elements(unit) for unit in units),
            tuple(of_units.summand_bytes(unit, gloo) for unit in units),
        )

    @cached_property
    def state(self) -> Callable[[int, int, int], StateBytes]:
        """Of a kind's unit, by weight versions and gradient buffers; each found once."""
        return cache(lambda kind, versions, buffers: self._state(self.units[kind], versions, buffers))

    @cached_property
    def tied_state(self) -> Callable[[str, int, int, int], StateBytes]:
        """The same of a tied weight, by its name and the uses that a rank has of it."""
        specs = {spec.name: spec for layer in self.layers for spec in layer.parameters.values()}
        return cache(lambda name, uses, *rest: self._state(Unit((specs[name],), tied=True, uses=uses), *rest))

    def _state(self, unit: Unit, versions: int, buffers: int) -> StateBytes:
        return self.costs.of_units.state(unit, num_versions=versions, gradient_buffers=buffers)

    @cached_property
    def uses(self) -> Callable[[str], tuple[int, ...]]:
        """Of a weight, how often a layer of each kind uses it."""
        return cache(
            lambda name: tuple(sum(spec.name == name for spec in each.parameters.values()) for each in self.layers)
        )


def rank_memories(run: RunLayout, sizes: LayerSizes | None = None) -> tuple[RankMemory, ...]:
    """Of every pipeline coordinate, ascending. sizes: of the run's layers, where they are known."""
    return _Memory(run, LayerSizes.of(run) if sizes is None else sizes).ranks()


class _Memory:
    """Sizes of one layer of each kind, and what ranks have of them."""

    def __init__(self, run: RunLayout, sizes: LayerSizes) -> None:
        self.run, self.costs, self.sizes = run, run.costs, sizes
        config = run.config
        generator = find_generator(config.schedule.name)
        options = schedule_options(config)
        self.splits = generator.splits or config.schedule.two_bp
        arguments = generator.arguments(generator.policy_options, options)
        self.policy = generator.policy(run.pipeline, run.num_microbatches, **arguments)
        self.flushes = max(self.policy.versions_by_rank) == 1 and self.policy.updates_per_step == 1
        schedule = config.schedule.name, run.pipeline, run.num_microbatches, generator.number_of_chunks(options)
        self.held = most_held(*schedule, options)
        places = tuple(sorted(options.items())), run.ranks
        self.slots = _slots(*schedule, *places, splits=self.splits, flushes=self.flushes)
        self.kept, self.pending, self.elements, self.summands = (
            sizes.kept,
            sizes.pending,
            sizes.elements,
            sizes.summands,
        )
        self.recomputed = run.recomputed
        self.of_stages: dict[tuple[tuple[int, ...], bool], tuple[float, float, float]] = {}

    def ranks(self) -> tuple[RankMemory, ...]:
        found, cache = [], dict[object, RankMemory]()
        own: list[list[int]] = [[] for _ in range(self.run.pipeline)]
        for stage, place in enumerate(self.run.ranks):
            own[place].append(stage)
        for rank, stages in enumerate(own):
            key = self._likeness(rank, stages)
            if key not in cache:
                cache[key] = self._rank(rank, stages)
            found.append(cache[key])
        return tuple(found)

    def _likeness(self, rank: int, stages: list[int]) -> object:
        """What two ranks have in common whose memory is the same."""
        ranges, last = self.run.stages.ranges, len(self.run.ranks) - 1
        members = tuple((self.run.classes[ranges[s].start : ranges[s].stop], s == 0, s == last) for s in stages)
        at_end = rank in (0, self.run.pipeline - 1)
        return members, self.policy.versions_by_rank[rank], self.held[rank].tobytes(), at_end

    def _rank(self, rank: int, stages: list[int]) -> RankMemory:
        state, present = self._state(rank, stages)
        return RankMemory(
            state.weights,
            state.master,
            state.gradients,
            state.moments,
            self._activations(rank, stages),
            self._buffers(present),
            self.slots[rank] * self.costs.stream,
        )

    def _state(self, rank: int, stages: list[int]) -> tuple[StateBytes, Counter[int]]:
        """What lives between steps, and how many layers of each kind the rank has."""
        classes, ranges = self.run.classes, self.run.stages.ranges
        present = Counter[int]()
        for stage in stages:
            present.update(classes[ranges[stage].start : ranges[stage].stop])
        kept = self.policy.versions_by_rank[rank], self.policy.gradient_buffers
        states = [(self.sizes.state(kind, *kept), count) for kind, count in present.items()]
        for name in self.run.tied:
            uses = sum(self.sizes.uses(name)[kind] * count for kind, count in present.items())
            if uses:
                states.append((self.sizes.tied_state(name, uses, *kept), 1))
        names = ("weights", "master", "gradients", "moments")
        return StateBytes(*(sum(getattr(each, name) * count for each, count in states) for name in names)), present

    def _activations(self, rank: int, stages: list[int]) -> int:
        """The fullest moment: what waits for backwards or is put off, and beside it what runs again and a gradient."""
        kept, pending, working = zip(*(self._of_stage(stage) for stage in stages), strict=True)
        most = float((self.held[rank] @ np.array([*kept, *pending])).max())
        return round(most + max(working) + self.costs.stream)

    def _of_stage(self, stage: int) -> tuple[float, float, float]:
        """Bytes of a micro-batch between forward and backward, between its halves, and of what runs again."""
        members, ranks = self.run.stages.ranges[stage], self.run.ranks
        arrives = stage > 0 and ranks[stage - 1] != ranks[stage]
        key = self.run.classes[members.start : members.stop], arrives
        if key not in self.of_stages:
            self.of_stages[key] = self._of_layers(*key, self.recomputed[stage] if self.recomputed else [])
        return self.of_stages[key]

    def _of_layers(self, kinds: tuple[int, ...], arrives: bool, spans: list[range]) -> tuple[float, float, float]:
        """A message from another rank stays where it was received, which is no activation."""
        stream = self.costs.stream
        inside = {unit for span in spans for unit in span}
        kept = sum(self.kept[kind] for unit, kind in enumerate(kinds) if unit not in inside) + len(spans) * stream
        # Of a split backward what runs again gives way to what its halves hand over, which counts as pending.
        working = 0.0
        for span in spans:
            again = sum(self.kept[kinds[unit]] for unit in span)
            working = max(working, again - (sum(self.pending[kinds[u]] for u in span) if self.splits else stream))
        pending = sum(self.pending[kind] for kind in kinds)
        if arrives:
            kept -= min(stream, stream if 0 in inside else self.kept[kinds[0]])
            pending -= min(stream, self.pending[kinds[0]])
        return kept, pending, working

    def _buffers(self, present: Counter[int]) -> int:
        """Whole weights and gradients of sharded units, and what their sums need."""
        units, zero = self.costs.of_units, self.run.config.zero
        if units.shards == 1:
            return 0
        sizes = sorted((self.elements[kind] for kind in present.elements()), reverse=True)
        found = 0
        if zero.stage >= 3:
            found += sum(sizes[: zero.weight_buffers]) * ELEMENT_BYTES[self.costs.precision]
        if zero.stage >= 2:
            found += sum(sizes[: zero.gradient_buffers]) * FULL_BYTES
        return found + self._summands(present)

    def _summands(self, present: Counter[int]) -> int:
        """Of sums under way: as many as there are gradient buffers, or all of the step where gradients are whole."""
        units, zero = self.costs.of_units, self.run.config.zero
        each = sorted((self.summands[kind] for kind in present.elements()), reverse=True)
        if units.shards != self.costs.replicas:
            return each[0]
        return sum(each[: zero.gradient_buffers] if zero.stage >= 2 else each)


@lru_cache(maxsize=4096)
def _slots(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int,
    options: tuple[tuple[str, object], ...],
    ranks: tuple[int, ...],
    *,
    splits: bool,
    flushes: bool,
) -> tuple[int, ...]:
    """By pipeline rank, slots of messages from other ranks, forward and backward. ranks: of every stage."""
    held = most_held(name, num_ranks, num_microbatches, num_chunks, dict(options))  # type: ignore[arg-type]
    slots, chunks = [0] * num_ranks, [0] * num_ranks
    for stage, rank in enumerate(ranks):
        found = message_slots(
            name, held[rank], chunks[rank], num_ranks, rank, num_microbatches, splits=splits, flushes=flushes
        )
        chunks[rank] += 1
        if stage > 0 and ranks[stage - 1] != rank:
            slots[rank] += found.activations
        if stage < len(ranks) - 1 and ranks[stage + 1] != rank:
            slots[rank] += found.gradients
    return tuple(slots)
