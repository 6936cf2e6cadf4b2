"""The memory and traffic of one rank of a run in a step: a walk through the actions of its schedule.

Sizes come from `layout.costs.LayoutCosts`. The actions say how often and when: gathers, reductions, recomputations,
halves of backwards, moves to host memory. The covering array of tests/distributed compares all of it with counts.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import numpy as np

from megapipe.config.parallel import MeshShape
from megapipe.config.run import PretrainConfig
from megapipe.layout.costs import LayoutCosts, merged, repeated, scalar_exchanges
from megapipe.layout.stages import VOCABULARY_ALIGNMENT, StageLayout, slice_ranges, stage_layers
from megapipe.layout.table import LayoutTable
from megapipe.layout.units import StateBytes, Unit, UnitCosts, layer_units, tied_unit
from megapipe.layout.walk import NEEDED, Bytes, GradientBuffers, Held, Sizes, Tensor, Walk
from megapipe.schedules import Kind, Schedule
from megapipe.schedules.schedule import Header
from megapipe.spec.attention import attention_path
from megapipe.spec.ops import ELEMENT_BYTES, FULL_BYTES, BackwardPhase, Exchange, Precision
from megapipe.spec.parameters import LayerSpec

Traffic = dict[tuple[str, str], tuple[int, int, int]]
"""By group and operation: calls, elements and bytes (see `Exchange`)."""
PHASES: dict[Kind, BackwardPhase] = {
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input half",
    Kind.BACKWARD_WEIGHT: "weight half",
}


@dataclass(frozen=True)
class RankPrediction:
    """One rank of a run. Only its pipeline coordinate matters, and under Muon its shard of the state.

    costs: sizes. schedule: lowered, of the run. stages: layers of every stage. recomputed: per stage, spans of units
    that are recomputed together. pipeline_rank: the rank's coordinate. predictions: by micro-batch, the masked tokens
    of a sample on this rank that a BERT's head predicts. By default it is the maximum, which is too large under
    context parallelism, where the data decides how many are on which rank. over_gloo: whether gradients are summed
    over gloo and not over NCCL.
    """

    costs: LayoutCosts
    schedule: Schedule
    stages: tuple[range, ...]
    recomputed: Sequence[Sequence[range]]
    pipeline_rank: int
    predictions: Sequence[int] | None = None
    over_gloo: bool = True

    @property
    def own_stages(self) -> tuple[int, ...]:
        """Stages of this rank."""
        return self.schedule.header.stages_on(self.pipeline_rank)

    @property
    def _routed_stages(self) -> list[int]:
        return [stage for stage in self.own_stages if stage < self.schedule.header.num_routed]

    def _on_other_rank(self, stage: int) -> bool:
        """Return whether a stage exists on routes, and is on another rank."""
        return 0 <= stage < self.schedule.header.num_routed and stage not in self.own_stages

    @cached_property
    def layers(self) -> dict[tuple[int, int], LayerSpec]:
        """Layers of this rank by (stage, unit)."""
        return {
            (stage, unit): self.costs.layers[index]
            for stage in self.own_stages
            for unit, index in enumerate(self.stages[stage])
        }

    @cached_property
    def units(self) -> dict[tuple[int, int], Unit]:
        """Parameters by (stage, state unit): layers without tied weights, then tied weights, as in `Header`."""
        header, tied, zero = self.schedule.header, self.costs.tied, self.costs.config.zero
        units = {
            (stage, state): unit
            for (stage, index), layer in self.layers.items()
            for state, unit in zip(header.states_of(stage, index), layer_units(layer, tied, zero), strict=True)
        }
        for group, names in enumerate(tied):
            for stage in header.tied_owners(group):
                if stage in self.own_stages:
                    units[stage, header.tied_unit(stage, group)] = tied_unit(names, self.layers.values())
        return units

    def state_of(self, place: tuple[int, int]) -> StateBytes:
        """Return the state of a unit between steps."""
        header = self.schedule.header
        versions = max(header.versions_per_stage[stage] for stage in self.own_stages)
        return self.costs.of_units.state(
            self.units[place], num_versions=versions, gradient_buffers=header.gradient_buffers
        )

    def state(self) -> StateBytes:
        """Return the state of all units between steps, in device and host memory."""
        return StateBytes(*map(sum, zip(*map(self.state_of, self.units), strict=True)))

    def in_host(self) -> int:
        """Return the bytes of `state` that are in host memory."""
        return sum(map(self.in_host_of, self.units))

    def in_host_of(self, place: tuple[int, int]) -> int:
        """Return the bytes that an update of a unit copies from host memory and back; not those of tied weights."""
        offload, state = self.costs.config.offload, self.state_of(place)
        if not offload.optimizer:
            return 0
        return state.master + state.moments + (state.weights if self.weights_in_host(place) else 0)

    def weights_in_host(self, place: tuple[int, int]) -> bool:
        """Return whether a unit's weights are in host memory between their uses."""
        return self.costs.config.offload.weights and not self.units[place].tied

    def peak(self) -> Held[int]:
        """Return the peak bytes after any action of each part of a step's memory, without `state`."""
        return Held(*[round(float(part.max(initial=0.0))) for part in self.timeline])

    @property
    def messages(self) -> int:
        """Bytes of the slots that receive messages of other ranks, which stay there until their backward. They are
        allocated with the engine, for all steps."""
        header, slots = self.schedule.header, 0
        for stage in self._routed_stages:
            slots += header.activation_slots[stage] * self._on_other_rank(stage - 1)
            slots += header.gradient_slots[stage] * self._on_other_rank(stage + 1)
        return slots * max(costs.stream for costs in self._of_slices)

    @cached_property
    def timeline(self) -> Held[Bytes]:
        """Bytes that the rank holds after each action of a step, in order."""
        return self._walk.held(self._sizes)

    @cached_property
    def _walk(self) -> Walk:
        sections = ("body",) if self.schedule.flushes else ("prologue", "epilogue")
        rows = np.concatenate([self.schedule.sections[name][self.pipeline_rank] for name in sections])  # type: ignore[index]
        header, units = self.schedule.header, self.costs.of_units
        known = sorted(set(self.predictions or ()))
        variants = list(map(known.index, self.predictions or ())) or range(header.slices)
        return Walk(header, [rows], self.recomputed, variants, gradient_buffers(header, units, self.units))

    @cached_property
    def _sizes(self) -> Sizes:
        """Bytes of the tensors that the walk counts. A message from another rank stays in its slot, and does not count
        as an activation."""
        walk, units, routed = self._walk, self.costs.of_units, self.schedule.header.num_routed
        streams = [costs.stream for costs in self._of_slices]
        sizes = Sizes(walk.num_places, walk.num_variants, streams, 0 if self.over_gloo else max(streams))
        for variant, (costs, _) in enumerate(self._microbatches):
            for (stage, unit), layer in self.layers.items():
                place, stream = walk.place(stage, unit), costs.stream
                split = walk.calls[Kind.BACKWARD_INPUT, stage, unit] > 0
                held = costs.kept(layer, split=split), costs.pending(layer), stream
                arrives = unit == 0 and stage < routed and self._on_other_rank(stage - 1)
                sizes.of[: Tensor.BACKWARD, place, variant] = [
                    each - min(stream, each) if arrives else each for each in held
                ]
                last = unit == len(self.stages[stage]) - 1
                if last and self._on_other_rank(stage + 1) and costs.reads_output_gradient(layer):
                    sizes.of[Tensor.PENDING, place, variant] -= stream
                for kind, phase in PHASES.items():
                    received = stream if layer.kind == "words" and 0 not in self.own_stages else 0
                    sizes.of[NEEDED[kind], place, variant] = costs.temporaries(layer, phase) + received
                sizes.of[[Tensor.HANDED, Tensor.HANDED_GRADIENTS], place, variant] = costs.handed(layer)
                sizes.of[Tensor.ALONE, place, variant] = costs.kept(layer, split=split, alone=True)
        for (stage, unit), own in self.units.items():
            elements = units.elements(own)
            sizes.of[Tensor.WEIGHTS : Tensor.HANDED, walk.place(stage, unit), 0] = (
                elements * ELEMENT_BYTES[self.costs.precision],
                elements * FULL_BYTES,
                units.summand_bytes(own, self.over_gloo),
                self.in_host_of((stage, unit)),
            )
        return sizes

    def temporaries(self) -> int:
        """Return by how many bytes the peak within an action exceeds the peak after any action: for all parts of
        memory, or only for activations and sends if that is less. In both cases the peaks of all parts add up to at
        least the peak."""
        held = self.timeline
        each = np.stack([np.sum(held[:-1], axis=0), held.activations + held.sent])
        return round(float(((each + held.temporaries).max(axis=1) - each.max(axis=1)).min()))

    def device_bytes(self) -> int:
        """Return the peak bytes on the device during a step: persistent state, message slots, other tensors."""
        peak = round(float(np.sum(self.timeline, axis=0).max()))
        return self.state().total - self.in_host() + self.messages + peak

    def traffic(self) -> Traffic:
        """Return the exchanges of this rank in one step."""
        all_exchanges: defaultdict[str, list[Exchange]] = defaultdict(list)
        others = {"tied": self._tied(), "link": self._links(), **self._scalars()}
        for by_group in (*self._within_layers(), *self._of_states(), others):
            for group, exchanges in by_group.items():
                all_exchanges[group] += exchanges
        return {
            (group, operation): counts
            for group, exchanges in all_exchanges.items()
            for operation, counts in merged(each for each in exchanges if each.calls).items()
        }

    def kernel_calls(self) -> Counter[tuple[str, str]]:
        """Return how often the layers of this rank call each op of the kernel registry in one step, by the name of the
        op and the phase: forward (recomputed ones included), backward, input half, weight half."""
        calls, counts, count = self._walk.calls, Counter[tuple[str, str]](), self.schedule.header.num_microbatches
        for place, layer in self.layers.items():
            forwards = calls[Kind.FORWARD, *place] + calls[Kind.RECOMPUTE, *place]
            backwards = {phase: calls[kind, *place] for kind, phase in PHASES.items()}
            repeated_parts = self.costs.shape(layer).recompute
            for costs, times in self._microbatches:
                for use in (use for op in costs.ops(layer) for use in op.uses):
                    again = use.part in repeated_parts
                    all_forwards = forwards + again * (backwards["backward"] + backwards["input half"])
                    counts[use.op, "forward"] += use.calls * all_forwards * times // count
                    for phase, each in backwards.items():
                        counts[use.op, phase] += use.backward_calls * each * times // count
        return +counts

    @cached_property
    def _of_slices(self) -> tuple[LayoutCosts, ...]:
        """Costs of each slice of a sample; of whole samples if the schedule does not use slices."""
        if self.schedule.header.vocabulary:
            return (replace(self.costs, pipeline_rank=self.pipeline_rank),)
        if self.schedule.header.slices == 1:
            return (self.costs,)
        ranges = slice_ranges(self.costs.config)
        return tuple(replace(self.costs, slices=ranges, slice=at) for at in range(len(ranges)))

    @cached_property
    def _microbatches(self) -> list[tuple[LayoutCosts, int]]:
        """Micro-batches of a step that cost the same: their costs and number."""
        if self.predictions is None:
            return [(costs, self.schedule.header.whole_microbatches) for costs in self._of_slices]
        counts = sorted(Counter(self.predictions).items())
        return [(replace(self.costs, predictions=each), times) for each, times in counts]

    def _within_layers(self) -> Iterator[Mapping[str, list[Exchange]]]:
        calls = self._walk.calls
        for (stage, unit), layer in self.layers.items():
            again = calls[Kind.RECOMPUTE, stage, unit] > 0
            halves = calls[Kind.BACKWARD_WEIGHT, stage, unit] > 0
            for costs, times in self._microbatches:
                yield _times(costs.within_layer(layer, forwards=2 if again else 1, halves=halves), times)

    def _of_states(self) -> Iterator[Mapping[str, list[Exchange]]]:
        """Yield the exchanges of reductions, gathers and updates; for tied weights, all of these except reductions."""
        costs, calls = self.costs.of_units, self._walk.calls
        for place, unit in self.units.items():
            if not costs.elements(unit):
                continue
            reductions, updates = calls[Kind.REDUCE_GRADIENTS, *place], calls[Kind.UPDATE, *place]
            if unit.tied:
                user = next(each for each in self.layers.values() if unit.specs[0] in each.parameters.values())
                yield _times(self.costs.partial_reduction(user, unit), self.schedule.header.updates_per_step)
            else:
                yield _times(costs.reduction(unit), reductions)
                yield _times(costs.copies_reduction(unit), 1 if costs.sharded(unit, 2) else reductions)
                # Tensor ranks hold different experts, whose gradients are whole.
                if unit.state_unit == "layer":
                    layer = self.layers[place[0], self.schedule.header.stage_states[place[0]][place[1]].layer]
                    yield _times(self.costs.partial_reduction(layer, unit), reductions)
            if costs.sharded(unit, 1):
                gathers = calls[Kind.GATHER_WEIGHTS, *place] if costs.sharded(unit, 3) else updates
                yield _times(costs.gather(unit), gathers)
            yield _times(costs.update(unit), updates)

    def _tied(self) -> list[Exchange]:
        """Return the sums of tied gradients, once per update, over all replicas of the ranks that use the weight."""
        header, exchanges = self.schedule.header, []
        for place, unit in self.units.items():
            if unit.tied and len(header.summing_ranks(*place)) * self.costs.replicas > 1:
                exchanges.append(Exchange("all_reduce", self.costs.of_units.elements(unit), FULL_BYTES))
        return repeated(exchanges, header.updates_per_step)

    def _links(self) -> list[Exchange]:
        neighbours = (each for stage in self._routed_stages for each in (stage - 1, stage + 1))
        sends = sum(map(self._on_other_rank, neighbours))
        width = ELEMENT_BYTES[self.costs.precision]
        messages = [Exchange("send", costs.stream // width, width, sends) for costs in self._of_slices]
        return repeated(messages, self.schedule.header.whole_microbatches)

    def _scalars(self) -> dict[str, list[Exchange]]:
        """Return the exchanges of numbers. Schedules that never flush reduce norms in a separate group."""
        if self.costs.replicas * self.costs.tensor * self.schedule.header.num_ranks == 1:
            return {}
        names = {spec.name for layer in self.costs.layers for spec in layer.parameters.values()}
        terms = len(self.costs.config.loss_terms)
        counts, norms = scalar_exchanges(len(names), terms, self.schedule.header.updates_per_step)
        if self.schedule.flushes:
            return {"world": [counts, norms]}
        return {"world": [counts], "second world": [norms]}


def _times(by_group: Mapping[str, list[Exchange]], times: int) -> dict[str, list[Exchange]]:
    return {group: repeated(exchanges, times) for group, exchanges in by_group.items()}


def gradient_buffers(
    header: Header, costs: UnitCosts, units: Mapping[tuple[int, int], Unit]
) -> GradientBuffers | None:
    """Return how gradients of these units (by stage and unit) are summed; None if no sum needs memory."""
    shards = {costs.shards_of(unit) for unit in units.values()}
    if shards <= {1}:
        return None
    width = header.most_states + len(header.tied_groups)
    sharded, filled = np.zeros((2, len(header.stages) * width), dtype=np.bool_)
    for (stage, unit), each in units.items():
        sharded[stage * width + unit] = costs.sharded(each, 2)
        filled[stage * width + unit] = costs.elements(each) > 0
    return GradientBuffers(sharded, filled, not shards <= {1, costs.replicas})


def layout_costs(
    config: PretrainConfig,
    *,
    device: str = "cpu",
    amx: bool = False,
    shard: int = 0,
    layers: tuple[LayerSpec, ...] | None = None,
) -> LayoutCosts:
    """Return the sizes of a run's layers on one rank. Arguments as in `predict_rank`; shard: as in `LayoutCosts`.

    parallel.data may be open; the state of units then counts one replica. layers: those of interest, by default all.
    """
    precision, data = cast(Precision, config.training.precision), config.parallel.data or 1
    path = attention_path(config.model, precision, device, config.data.sequence_length, amx)
    chosen = stage_layers(config) if layers is None else layers
    return LayoutCosts(config, chosen, data, path, VOCABULARY_ALIGNMENT, shard=shard, device=device)


def predict_rank(
    config: PretrainConfig,
    schedule: Schedule,
    rank: int,
    *,
    device: str = "cpu",
    amx: bool = False,
    predictions: Sequence[int] | None = None,
) -> RankPrediction:
    """Return the prediction of a rank of a run.

    config: with parallel.data filled in. schedule: lowered, of this run. rank: global number. device: type of the
    ranks' devices, on which attention's path and sums of gradients depend. amx: as in `faster_path`. predictions: as
    in `RankPrediction`.
    """
    shape = MeshShape.of(config.parallel)
    layout = StageLayout.of(config)
    replicas = shape.group_of(rank, "data", "context")
    shard = replicas.index(rank) % config.zero.num_shards(len(replicas))
    costs = layout_costs(config, device=device, amx=amx, shard=shard)
    place, again = shape.coordinates(rank), LayoutTable.of(config, layout).recomputed
    costs = replace(costs, tensor_rank=place["tensor"], context_rank=place["context"])
    own = place["pipeline"]
    return RankPrediction(costs, schedule, layout.ranges, again, own, predictions, over_gloo=device == "cpu")
