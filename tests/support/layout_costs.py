"""What a layout should hold and exchange on each rank: the formulas of costs/ along the schedule's own actions."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megapipe.config.bert import BertPretrainConfig
from megapipe.config.run import PretrainConfig
from megapipe.costs.bert_memory import bert_activation_bytes
from megapipe.costs.communication import (
    Exchange,
    merged,
    pipeline_exchange,
    repeated,
    replica_exchanges,
    scalar_exchanges,
    tensor_exchanges,
)
from megapipe.costs.memory import (
    StateBytes,
    activation_bytes,
    boundary_bytes,
    isolation_bytes,
    num_moments,
    state_bytes,
    stored_elements,
)
from megapipe.costs.parameters import LayerSpec, ParameterSpec, tied_names
from megapipe.costs.weight_halves import weight_half_bytes
from megapipe.parallel.mesh import DIMENSIONS, MeshShape
from megapipe.parallel.segments import SEGMENT_ALIGNMENT
from megapipe.schedules import Kind, Schedule
from megapipe.schedules.actions import Action
from megapipe.training.assemble import VOCABULARY_ALIGNMENT, StageLayout, lay_out
from megapipe.training.families import family_of
from megapipe.training.scheduling import num_stages
from tests.support.counting_groups import Counts

WHOLE = -1
COMPUTE = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Predicted:
    """One rank of one layout. Attention, precision and sizes are those of the configuration.

    schedule: what the rank runs: how often it gathers, reduces and recomputes.
    """

    config: PretrainConfig
    rank: int
    schedule: Schedule

    @cached_property
    def shape(self) -> MeshShape:
        return MeshShape({name: getattr(self.config.parallel, name, 1) or 1 for name in DIMENSIONS})

    @cached_property
    def layout(self) -> StageLayout:
        config, family = self.config, family_of(self.config)
        by_hand, predictions = config.parallel.layers_per_stage, family.predictions
        length, again = config.data.sequence_length, config.recompute.logits
        return lay_out(family.layers, config.model, num_stages(config), length, by_hand, predictions, again)

    @property
    def stages(self) -> tuple[int, ...]:
        """Those of this rank."""
        return self.schedule.header.stages_on(self.shape.coordinates(self.rank)["pipeline"])

    @property
    def tensor(self) -> int:
        return self.shape.sizes["tensor"]

    def layers(self) -> Iterator[tuple[int, int, LayerSpec]]:
        """(stage, unit, layer) of this rank."""
        for stage in self.stages:
            for unit, index in enumerate(self.layout.ranges[stage]):
                yield stage, unit, self.layout.layers[index]

    def actions(self) -> Iterator[Action]:
        """A step's, the pipeline empty before and after."""
        rank = self.shape.coordinates(self.rank)["pipeline"]
        for section in ("body",) if self.schedule.flushes else ("prologue", "epilogue"):
            yield from self.schedule.actions(section, rank)  # type: ignore[arg-type]

    def state(self) -> StateBytes:
        """What all units of this rank hold between steps."""
        header, config = self.schedule.header, self.config
        found = [0, 0, 0, 0]
        for specs, uses in self._units().values():
            state = state_bytes(
                specs,
                config.training.precision,  # type: ignore[arg-type]
                tensor_size=self.tensor,
                alignment=VOCABULARY_ALIGNMENT,
                segment_alignment=SEGMENT_ALIGNMENT,
                num_versions=max(header.versions_per_stage[stage] for stage in self.stages),
                num_gradients=header.gradient_buffers * uses,
                moments=num_moments(config.optimizer),
            )
            parts = (state.weights, state.master, state.gradients, state.moments)
            found = [total + part for total, part in zip(found, parts, strict=True)]
        return StateBytes(*found)

    def _units(self) -> dict[str, tuple[list[ParameterSpec], int]]:
        """Name -> parameters and their uses: layers without what is tied, and each tied weight once."""
        tied = tied_names(self.layout.layers)
        found: dict[str, tuple[list[ParameterSpec], int]] = {}
        for _, _, layer in self.layers():
            found[layer.name] = [spec for spec in layer.parameters.values() if spec.name not in tied], 1
            for spec in layer.parameters.values():
                if spec.name in tied:
                    found[spec.name] = [spec], found.get(spec.name, ([], 0))[1] + 1
        return found

    def traffic(self) -> Counts:
        """What this rank exchanges in one step."""
        by_group = {
            "tensor": self._tensor(),
            "data+context": self._replicas(),
            "tied": self._tied(),
            "link": self._links(),
            **self._scalars(),
        }
        for name in ("tensor", "data+context"):
            if all(self.shape.sizes[dimension] == 1 for dimension in name.split("+")):
                del by_group[name]
        return {
            (group, operation): counts
            for group, exchanges in by_group.items()
            for operation, counts in merged(exchanges).items()
        }

    def _microbatches(self, exchanges: list[Exchange]) -> list[Exchange]:
        return repeated(exchanges, self.schedule.header.num_microbatches)

    def _tensor(self) -> list[Exchange]:
        config = self.config
        again = self.layout.recomputed(config.recompute)
        found: list[Exchange] = []
        for stage, unit, layer in self.layers():
            twice = bool(again) and any(unit in span for span in again[stage])
            found += tensor_exchanges(
                config.model,
                layer,
                config.batch.micro_size,
                config.data.sequence_length,
                config.training.precision,  # type: ignore[arg-type]
                tensor_size=self.tensor,
                predictions=family_of(config).predictions,
                forwards=2 if twice else 1,
            )
        return self._microbatches(found)

    def _stored(self, specs: list[ParameterSpec]) -> int:
        return stored_elements(
            specs,
            tensor_size=self.tensor,
            alignment=VOCABULARY_ALIGNMENT,
            segment_alignment=SEGMENT_ALIGNMENT,
        )

    def _replicas(self) -> list[Exchange]:
        tied, found = tied_names(self.layout.layers), []
        stage = self.config.zero.stage
        calls = Counter((action.kind, action.stage, action.unit) for action in self.actions())
        for place, unit, layer in self.layers():
            specs = [spec for spec in layer.parameters.values() if spec.name not in tied]
            if not specs:  # nothing but a tied weight
                continue
            reductions, gathers = (calls[kind, place, unit] for kind in (Kind.REDUCE_GRADIENTS, Kind.GATHER_WEIGHTS))
            exchanges = replica_exchanges(
                self._stored(specs),
                self.config.training.precision,  # type: ignore[arg-type]
                stage=stage,
                gathers=gathers,
                reductions=reductions,
            )
            found += exchanges if stage else repeated(exchanges, reductions)
        return found

    def _tied(self) -> list[Exchange]:
        header, found = self.schedule.header, []
        for group, name in enumerate(tied_names(self.layout.layers)):
            ranks = {header.stages[stage].rank for stage in header.tied_groups[group]}
            if name in self._units() and len(ranks) * self.shape.sizes["data"] > 1:
                found += replica_exchanges(self._stored(self._units()[name][0]), "fp32")
        return repeated(found, header.updates_per_step)

    def _links(self) -> list[Exchange]:
        header, config = self.schedule.header, self.config
        last, mine = len(header.stages) - 1, self.stages
        sends = sum(stage < last and stage + 1 not in mine for stage in mine)
        sends += sum(stage > 0 and stage - 1 not in mine for stage in mine)
        if not sends:
            return []
        micro, length = config.batch.micro_size, config.data.sequence_length
        exchange = pipeline_exchange(config.model, micro, length, config.training.precision, sends)  # type: ignore[arg-type]
        return self._microbatches([exchange])

    def _scalars(self) -> dict[str, list[Exchange]]:
        """Schedules that never flush find norms in a group of their own."""
        if self.shape.world_size == 1:
            return {}
        names = {spec.name for layer in self.layout.layers for spec in layer.parameters.values()}
        terms, updates = len(family_of(self.config).loss_terms), self.schedule.header.updates_per_step
        counts, norms = scalar_exchanges(len(names), terms, updates)
        if self.schedule.flushes:
            return {"world": [counts, norms]}
        return {"world": [counts], "second world": [norms]}

    def kept(self, layer: LayerSpec) -> int:
        """Activations of one micro-batch of one layer, from forward to backward."""
        config = self.config
        attention = config.model.attention
        assert attention in ("sdpa", "unfused"), "the prediction is for one path"
        micro, length, precision = config.batch.micro_size, config.data.sequence_length, config.training.precision
        choices: dict[str, Any] = {
            "tensor_size": self.tensor,
            "alignment": VOCABULARY_ALIGNMENT,
            "recompute_logits": config.recompute.logits,
            "recompute": config.recompute.parts if config.recompute.method == "selective" else [],
        }
        if isinstance(config, BertPretrainConfig):
            hidden = config.data.max_predictions
            return bert_activation_bytes(config.model, layer, micro, length, hidden, precision, attention, **choices)  # type: ignore[arg-type]
        found = activation_bytes(config.model, layer, micro, length, precision, attention, **choices)  # type: ignore[arg-type]
        if config.data.isolate_documents and layer.kind == "block":
            found += isolation_bytes(
                config.model,
                micro,
                length,
                precision,
                attention,
                recompute=choices["recompute"],  # type: ignore[arg-type]
            )
        return found

    def pending(self, layer: LayerSpec) -> int:
        """Of these what is left between the halves of a split backward, and the gradients that these hand over."""
        config = self.config
        return weight_half_bytes(
            config.model,
            layer,
            config.batch.micro_size,
            config.data.sequence_length,
            config.training.precision,  # type: ignore[arg-type]
            predictions=family_of(config).predictions,
            tensor_size=self.tensor,
            alignment=VOCABULARY_ALIGNMENT,
            recompute=config.recompute.parts if config.recompute.method == "selective" else [],
        )

    def activations(self) -> int:
        """Bytes that a step holds at its peak between two actions, messages on their way left out."""
        layers = {(stage, unit): layer for stage, unit, layer in self.layers()}
        first_of_run = {
            (stage, unit): unit == span.start
            for stage, spans in enumerate(self.layout.recomputed(self.config.recompute))
            for span in spans
            for unit in span
        }
        alive: dict[tuple[int, int, int], int] = {}
        peak = 0
        for action in self.actions():
            for unit in self._units_of(action):
                place, layer = (action.stage, unit), layers[action.stage, unit]
                slot = self.stream if unit == 0 and action.stage - 1 not in (-1, *self.stages) else 0
                if action.kind == Kind.FORWARD and place in first_of_run:
                    held = self.stream if first_of_run[place] else 0
                elif action.kind in (Kind.FORWARD, Kind.RECOMPUTE):
                    held = self.kept(layer)
                elif action.kind == Kind.BACKWARD_INPUT:
                    held = self.pending(layer)
                else:
                    held, slot = 0, 0
                alive[(*place, action.microbatch)] = held - min(slot, held)
            peak = max(peak, sum(alive.values()))
        return peak

    def _units_of(self, action: Action) -> range:
        if action.kind not in COMPUTE:
            return range(0)
        units = self.schedule.header.units_per_stage[action.stage]
        return range(units) if action.unit == WHOLE else range(action.unit, action.unit + 1)

    @property
    def stream(self) -> int:
        """Bytes of a micro-batch's residual stream, the message between two stages."""
        config = self.config
        sizes = config.batch.micro_size, config.data.sequence_length
        return boundary_bytes(config.model, *sizes, config.training.precision)  # type: ignore[arg-type]
