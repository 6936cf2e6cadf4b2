"""Bytes that each pipeline coordinate holds, in closed form: `predict_rank` without walking through the schedule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megapipe.layout.hardware.device_type import hardware_device_type
from megapipe.layout.scheduling import schedule_options
from megapipe.layout.traffic import MESSAGES_IN_FLIGHT
from megapipe.layout.units import StateBytes, Unit, UnitCosts
from megapipe.planner.cost.estimate import RankMemory
from megapipe.planner.cost.held_by_ranks import held_by_ranks
from megapipe.planner.cost.run_layout import RunLayout
from megapipe.spec.dtypes import ELEMENT_BYTES, FULL_BYTES, Precision
from megapipe.spec.parameters import LayerSpec
from megapipe.spec.temporaries import Phase


@dataclass(frozen=True)
class LayerSizes:
    """Of a micro-batch in one layer of each kind of a run (`RunLayout.kinds`), whatever its stages.

    kept, pending, temporaries, halves: bytes as `LayoutCosts` has them, of activations, of whole backwards and of the
    larger half of split ones. stream: of a message between stages.
    """

    kept: tuple[float, ...]
    pending: tuple[float, ...]
    stream: int
    temporaries: tuple[int, ...]
    halves: tuple[int, ...]

    @classmethod
    def of(cls, run: RunLayout) -> "LayerSizes":
        """Those of a run, which hold for all that differ from it in their pipeline, their replicas and what these
        share out alone."""
        costs, layers = run.costs, [run.stages.layers[index] for index in run.kinds]
        kept, pending = ([float(count(layer)) for layer in layers] for count in (costs.kept, costs.pending))
        phases: tuple[tuple[Phase, ...], ...] = (("backward",), ("input half", "weight half"))
        whole, split = (
            tuple(max(costs.temporaries(layer, phase) for phase in each) for layer in layers) for each in phases
        )
        return cls(tuple(kept), tuple(pending), costs.stream, whole, split)

    @cached_property
    def of_stage(self) -> Callable[[tuple[int, ...], tuple[range, ...], bool, bool], "_Activations"]:
        """Of a stage, by the kinds of its layers, the runs of them that run again, whether its input comes from
        another rank, and whether backwards are split; each found once."""
        return cache(self._of_stage)

    def _of_stage(
        self, kinds: tuple[int, ...], spans: tuple[range, ...], arrives: bool, splits: bool
    ) -> "_Activations":
        """A message from another rank stays where it was received, which is no activation."""
        stream = self.stream
        inside = {unit for span in spans for unit in span}
        kept = sum(self.kept[kind] for unit, kind in enumerate(kinds) if unit not in inside) + len(spans) * stream
        # Of a split backward what runs again gives way to what its halves hand over, which counts as pending.
        working = 0.0
        for span in spans:
            again = sum(self.kept[kinds[unit]] for unit in span)
            working = max(working, again - (sum(self.pending[kinds[u]] for u in span) if splits else stream))
        pending = sum(self.pending[kind] for kind in kinds)
        temporaries = self._temporaries(kinds, spans, splits) - working
        if arrives:
            kept -= min(stream, stream if 0 in inside else self.kept[kinds[0]])
            pending -= min(stream, self.pending[kinds[0]])
        return _Activations(kept, pending, working, max(0.0, temporaries))

    def _temporaries(self, kinds: tuple[int, ...], spans: tuple[range, ...], splits: bool) -> float:
        """Return the peak bytes of a stage's backward beyond those held before it, without messages.

        Units run from the last to the first, and each frees its saved activations. A split backward may keep them for
        the weight half, so they are not subtracted there.
        """
        needed = self.halves if splits else self.temporaries
        span_of = {unit: span for span in spans for unit in span}
        found, freed = 0.0, 0.0
        for unit, kind in reversed(list(enumerate(kinds))):
            span = span_of.get(unit)
            again = 0.0 if span is None else sum(self.kept[kinds[each]] for each in range(span.start, unit + 1))
            found = max(found, again + needed[kind] - freed)
            if not splits:
                freed += self.kept[kind] if span is None else 0.0
        return found


class _Activations(NamedTuple):
    """Bytes of a micro-batch between forward and backward, between its halves, of what runs again, and what a backward
    needs for a moment beyond these."""

    kept: float
    pending: float
    working: float
    temporaries: float


@dataclass(frozen=True)
class StateSizes:
    """Of the parameters of one layer of each kind of a run (`RunLayout.kinds`), whatever its stages.

    of_units: of the run. layers: one of each kind. tied: names of weights that several
    layers use. units: parameters without these. elements: of their flat buffers. summands: bytes of a sum of their
    gradients.
    """

    of_units: UnitCosts
    layers: tuple[LayerSpec, ...]
    tied: tuple[str, ...]
    units: tuple[Unit, ...]
    elements: tuple[int, ...]
    summands: tuple[int, ...]

    @classmethod
    def of(cls, run: RunLayout) -> "StateSizes":
        """Those of a run, which hold for all with as many tensor ranks and replicas that shard the same."""
        of_units, gloo = run.costs.of_units, hardware_device_type(run.hardware) == "cpu"
        layers = tuple(run.stages.layers[index] for index in run.kinds)
        parameters = (layer.parameters.values() for layer in layers)
        units = tuple(Unit(tuple(spec for spec in each if spec.name not in run.tied)) for each in parameters)
        elements = tuple(of_units.elements(unit) for unit in units)
        return cls(
            of_units, layers, run.tied, units, elements, tuple(of_units.summand_bytes(unit, gloo) for unit in units)
        )

    @cached_property
    def of_rank(self) -> Callable[[tuple[int, ...], int, int], tuple[StateBytes, int]]:
        """What lives between steps, and `RankMemory.buffers`: by a rank's layers of each kind, weight versions and
        gradient buffers; each found once."""
        return cache(lambda present, *kept: (self._state(present, *kept), self._buffers(present)))

    @cached_property
    def _of_unit(self) -> Callable[[int, int, int], StateBytes]:
        """Of the unit of a kind, by weight versions and gradient buffers; each found once."""
        return cache(
            lambda kind, versions, buffers: self.of_units.state(
                self.units[kind], num_versions=versions, gradient_buffers=buffers
            )
        )

    def _state(self, present: tuple[int, ...], versions: int, buffers: int) -> StateBytes:
        states = [(self._of_unit(kind, versions, buffers), count) for kind, count in enumerate(present) if count]
        for name in self.tied:
            found = [
                (spec, count)
                for layer, count in zip(self.layers, present, strict=True)
                for spec in layer.parameters.values()
                if spec.name == name and count
            ]
            if found:
                unit = Unit((found[0][0],), tied=True, uses=sum(count for _, count in found))
                states.append(
                    (self.of_units.state(unit, num_versions=versions, gradient_buffers=buffers), 1),
                )
        return StateBytes(
            sum(each.weights * count for each, count in states),
            sum(each.master * count for each, count in states),
            sum(each.gradients * count for each, count in states),
            sum(each.moments * count for each, count in states),
        )

    def _buffers(self, present: tuple[int, ...]) -> int:
        """Whole weights and gradients of sharded units, and what their sums need."""
        config = self.of_units.config
        if self.of_units.shards == 1:
            return 0
        found = 0
        if config.zero.stage >= 3:
            sizes = _descending(self._sharded_elements(3), present)
            weight: Precision = config.training.precision  # type: ignore[assignment]
            found += sum(sizes[: config.zero.weight_buffers]) * ELEMENT_BYTES[weight]
        if config.zero.stage >= 2:
            sizes = _descending(self._sharded_elements(2), present)
            found += sum(sizes[: config.zero.gradient_buffers]) * FULL_BYTES
        return found + self._summands(present)

    def _sharded_elements(self, stage: int) -> tuple[int, ...]:
        """By kind, elements of a unit that ZeRO shards from `stage` on; 0 of a unit that it does not."""
        pairs = zip(self.units, self.elements, strict=True)
        return tuple(size if self.of_units.sharded(unit, stage) else 0 for unit, size in pairs)

    def _summands(self, present: tuple[int, ...]) -> int:
        """Of sums under way: as many as there are gradient buffers, or all of the step where gradients are whole."""
        units, zero = self.of_units, self.of_units.config.zero
        each = _descending(self.summands, present)
        if units.shards != units.replicas:
            return each[0]
        return sum(each[: zero.gradient_buffers] if zero.stage >= 2 else each)


def _descending(sizes: Sequence[int], present: Sequence[int]) -> list[int]:
    """As many of each size as there are."""
    return sorted((size for size, count in zip(sizes, present, strict=True) for _ in range(count)), reverse=True)


def rank_memories(
    run: RunLayout, layers: LayerSizes | None = None, states: StateSizes | None = None
) -> tuple[RankMemory, ...]:
    """Of every pipeline coordinate, ascending. layers, states: of the run, where they are known."""
    layers, states = layers or LayerSizes.of(run), states or StateSizes.of(run)
    held = held_by_ranks(
        run.config.schedule.name,
        run.pipeline,
        run.num_microbatches,
        tuple(sorted(schedule_options(run.config).items())),
        run.ranks,
        run.stages.ranges,
        run.classes,
    )
    spans, ranges = run.recomputed, run.stages.ranges
    kept, pending, working, temporaries = np.array(
        [
            layers.of_stage(
                run.classes[ranges[stage].start : ranges[stage].stop],
                tuple(spans[stage]) if spans else (),
                arrives,
                held.splits,
            )
            for stage, arrives in held.shown
        ]
    ).T
    # Whole numbers of bytes, far below 2^53: sums are exact in any order.
    waiting = np.concatenate([kept[held.like], pending[held.like]], axis=1)
    fullest = np.maximum.reduceat((held.moments * waiting[held.rank_of_moment]).sum(axis=1), held.first_moments)
    again = working[held.like].max(axis=1)
    activations = (fullest + again + layers.stream).round().tolist()
    moments = ((working + temporaries)[held.like].max(axis=1) - again).round().tolist()
    sent = _sent(run)
    found = []
    for rank, present in enumerate(held.layers):
        state, buffers = states.of_rank(present, held.policy.versions_by_rank[rank], held.policy.gradient_buffers)
        parts = state.weights, state.master, state.gradients, state.moments
        messages = (held.slots[rank] + sent[rank]) * layers.stream
        found.append(RankMemory(*parts, int(activations[rank]), buffers, messages, int(moments[rank])))
    return tuple(found)


def _sent(run: RunLayout) -> list[int]:
    """By pipeline rank, messages to other ranks that may not have left, whose tensors are kept on a GPU."""
    found = [0] * run.pipeline
    if run.costs.device != "cpu":
        for sender, receiver in pairwise(run.ranks):
            if sender != receiver:
                for rank in (sender, receiver):  # the one sends activations, the other gradients
                    found[rank] += min(MESSAGES_IN_FLIGHT, run.num_microbatches)
    return found
