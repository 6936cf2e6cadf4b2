"""What one rank of a layout will hold and send in a step: the formulas of spec/ along its schedule's own actions.

Sizes come from `layout.costs.LayoutCosts`; how often and when from the actions: gathers, reductions, recomputations,
halves of backwards, moves to host memory. The covering array of tests/distributed holds all of it to counted runs.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megapipe.layout.costs import LayoutCosts
from megapipe.layout.timeline import Held, timeline
from megapipe.layout.traffic import merged, repeated, scalar_exchanges
from megapipe.layout.units import StateBytes, Unit
from megapipe.schedules import Kind, Schedule
from megapipe.schedules.actions import Action
from megapipe.spec.dtypes import ELEMENT_BYTES, FULL_BYTES
from megapipe.spec.ops import Exchange
from megapipe.spec.parameters import LayerSpec

Traffic = dict[tuple[str, str], tuple[int, int, int]]
"""By group and operation: calls, elements and bytes (see `Exchange`)."""


@dataclass(frozen=True)
class RankPrediction:
    """One rank of a run. Of its coordinates only the pipeline's matters, and under Muon its shard of the state.

    costs: sizes. schedule: lowered, of the run. stages: layers of every stage. recomputed: per stage, runs of units
    that are computed again together. pipeline_rank: the rank's coordinate. predictions: of every micro-batch, how many
    hidden tokens of a sample a BERT's head works on here; by default as many as there may be, which under context
    parallelism is too many: the data says how many lie on which rank. over_gloo: gradients are summed over gloo, not
    over NCCL.
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
        """Those of this rank."""
        return self.schedule.header.stages_on(self.pipeline_rank)

    @cached_property
    def layers(self) -> dict[tuple[int, int], LayerSpec]:
        """(stage, unit) -> layer, of this rank."""
        return {
            (stage, unit): self.costs.layers[index]
            for stage in self.own_stages
            for unit, index in enumerate(self.stages[stage])
        }

    @cached_property
    def units(self) -> dict[tuple[int, int], Unit]:
        """(stage, state unit) -> parameters: layers without what is tied, then tied weights, as in `Header`."""
        header, tied = self.schedule.header, self.costs.tied
        found = {
            place: Unit(tuple(spec for spec in layer.parameters.values() if spec.name not in tied))
            for place, layer in self.layers.items()
        }
        uses = Counter(spec.name for layer in self.layers.values() for spec in layer.parameters.values())
        specs = {spec.name: spec for layer in self.layers.values() for spec in layer.parameters.values()}
        for group, name in enumerate(tied):
            for stage in header.tied_owners(group):
                if stage in self.own_stages:
                    unit = Unit((specs[name],), tied=True, uses=uses[name])
                    found[stage, header.units_per_stage[stage] + group] = unit
        return found

    @cached_property
    def actions(self) -> list[Action]:
        """A step's, the pipeline empty before and after."""
        sections = ("body",) if self.schedule.flushes else ("prologue", "epilogue")
        return [each for name in sections for each in self.schedule.actions(name, self.pipeline_rank)]  # type: ignore[arg-type]

    def state_of(self, place: tuple[int, int]) -> StateBytes:
        """What a unit keeps between steps."""
        header = self.schedule.header
        versions = header.weight_versions[self.pipeline_rank]
        return self.costs.of_units.state(
            self.units[place], num_versions=versions, gradient_buffers=header.gradient_buffers
        )

    def state(self) -> StateBytes:
        """What all units keep between steps, in host memory too."""
        found = [self.state_of(place) for place in self.units]
        return StateBytes(
            *(sum(getattr(each, name) for each in found) for name in ("weights", "master", "gradients", "moments"))
        )

    def in_host(self) -> int:
        """Of `state` the bytes in host memory."""
        return sum(self.in_host_of(place) for place in self.units)

    def in_host_of(self, place: tuple[int, int]) -> int:
        """What an update of a unit brings in from host memory, and takes there: of tied weights not the weights."""
        offload, state = self.costs.config.offload, self.state_of(place)
        if not offload.optimizer:
            return 0
        return state.master + state.moments + (state.weights if self.weights_in_host(place) else 0)

    def weights_in_host(self, place: tuple[int, int]) -> bool:
        """Whether a unit's weights lie there between their uses."""
        return self.costs.config.offload.weights and not self.units[place].tied

    def peak(self) -> Held:
        """Of each part of what a step holds beside `state` the most behind any action (not all at one time)."""
        return Held.largest(self._timeline)

    @property
    def messages(self) -> int:
        """Bytes of the slots in which what other ranks' stages send arrives, and stays until its backward. They are
        made with the engine, for all steps."""
        header, ranks, slots = self.schedule.header, self.schedule.header.stage_ranks, 0
        for stage in self.own_stages:
            if stage > 0 and ranks[stage - 1] != ranks[stage]:
                slots += header.activation_slots[stage]
            if stage < len(ranks) - 1 and ranks[stage + 1] != ranks[stage]:
                slots += header.gradient_slots[stage]
        return slots * self.costs.stream

    @cached_property
    def _timeline(self) -> list[Held]:
        return list(timeline(self))

    def temporaries(self) -> int:
        """Return the difference between a step's peak bytes and the peak bytes after any action."""
        return max(map(sum, self._timeline)) - max(sum(held._replace(temporaries=0)) for held in self._timeline)

    def device_bytes(self) -> int:
        """Return the peak bytes on the device during a step: persistent state, message slots, other tensors."""
        return self.state().total - self.in_host() + self.messages + max(map(sum, self._timeline))

    def traffic(self) -> Traffic:
        """What this rank exchanges in one step."""
        found: defaultdict[str, list[Exchange]] = defaultdict(list)

        others = {"tied": self._tied(), "link": self._links(), **self._scalars()}
        for by_group in (*self._within_layers(), *self._of_states(), others):
            for group, exchanges in by_group.items():
                found[group] += exchanges
        return {
            (group, operation): counts
            for group, exchanges in found.items()
            for operation, counts in merged(each for each in exchanges if each.calls).items()
        }

    def calls(self) -> Counter[tuple[Kind, int, int]]:
        """How often each kind of action comes for each unit of a stage."""
        return Counter((action.kind, action.stage, unit) for action in self.actions for unit in self.units_of(action))

    def units_of(self, action: Action) -> range:
        """Units that an action is about; none for messages and the like."""
        if action.stage < 0:
            return range(0)
        count = self.schedule.header.units_per_stage[action.stage]
        return range(count) if action.unit < 0 else range(action.unit, action.unit + 1)

    def _within_layers(self) -> Iterator[Mapping[str, list[Exchange]]]:
        calls, count = self.calls(), self.schedule.header.num_microbatches
        held = Counter([None] * count if self.predictions is None else self.predictions)
        for (stage, unit), layer in self.layers.items():
            again = calls[Kind.RECOMPUTE, stage, unit] > 0
            halves = calls[Kind.BACKWARD_WEIGHT, stage, unit] > 0
            for predictions, times in held.items():
                once = self.costs.within_layer(
                    layer, forwards=2 if again else 1, halves=halves, predictions=predictions
                )
                yield _times(once, times)

    def _of_states(self) -> Iterator[Mapping[str, list[Exchange]]]:
        """Reductions of gradients, gathers of weights, updates; of tied weights all but reductions."""
        costs, calls = self.costs.of_units, self.calls()
        for place, unit in self.units.items():
            if not costs.elements(unit):
                continue
            reductions, updates = calls[Kind.REDUCE_GRADIENTS, *place], calls[Kind.UPDATE, *place]
            if not unit.tied:
                yield _times(costs.reduction(unit), reductions)
                yield _times(costs.copies_reduction(unit), 1 if costs.sharded(unit, 2) else reductions)
                yield _times(self.costs.partial_reduction(self.layers[place]), reductions)
            if costs.sharded(unit, 1):
                gathers = calls[Kind.GATHER_WEIGHTS, *place] if costs.sharded(unit, 3) else updates
                yield _times(costs.gather(unit), gathers)
            yield _times(costs.update(unit), updates)

    def _tied(self) -> list[Exchange]:
        """All replicas of all ranks that hold a use sum its gradient once an update."""
        header, found = self.schedule.header, []
        for (stage, index), unit in self.units.items():
            if not unit.tied:
                continue
            group = index - header.units_per_stage[stage]
            ranks = {header.stages[user].rank for user in header.tied_groups[group]}
            if len(ranks) * self.costs.replicas > 1:
                found.append(Exchange("all_reduce", self.costs.of_units.elements(unit), FULL_BYTES))
        return repeated(found, header.updates_per_step)

    def _links(self) -> list[Exchange]:
        header, costs, mine = self.schedule.header, self.costs, self.own_stages
        last = len(header.stages) - 1
        sends = sum(stage < last and stage + 1 not in mine for stage in mine)
        sends += sum(stage > 0 and stage - 1 not in mine for stage in mine)
        width = ELEMENT_BYTES[costs.precision]
        message = Exchange("send", costs.stream // width, width, sends)
        return repeated([message], header.num_microbatches)

    def _scalars(self) -> dict[str, list[Exchange]]:
        """Schedules that never flush find norms in a group of their own."""
        if self.costs.replicas * self.costs.tensor * self.schedule.header.num_ranks == 1:
            return {}
        names = {spec.name for layer in self.costs.layers for spec in layer.parameters.values()}
        counts, norms = scalar_exchanges(len(names), self.costs.loss_terms, self.schedule.header.updates_per_step)
        if self.schedule.flushes:
            return {"world": [counts, norms]}
        return {"world": [counts], "second world": [norms]}


def _times(by_group: Mapping[str, list[Exchange]], times: int) -> dict[str, list[Exchange]]:
    return {group: repeated(exchanges, times) for group, exchanges in by_group.items()}
