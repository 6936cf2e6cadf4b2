"""Forward-only passes of a model over texts that grow: the model's stages, their caches, and an engine per width."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from megapipe.config.run import PretrainConfig
from megapipe.config.schedule import ScheduleConfig
from megapipe.engine.engine import Engine
from megapipe.engine.reductions import Communicators, Reductions
from megapipe.engine.stage import Stage, TensorSpec
from megapipe.engine.step import StepInput
from megapipe.engine.wiring import LinkPool, connect
from megapipe.layout.stages import StageLayout, lay_out
from megapipe.models.gpt_decoding import DecodingContext, decoding_layer
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.schedules import Schedule, build
from megapipe.training.assemble import DTYPES, Assembly
from megapipe.training.families import family_of

Restore = Callable[[Sequence[UnitState]], object]
"""Fills this rank's unit states with trained weights."""


FULL_TOKENS = 256
"""Tokens that a micro-batch should have: with fewer, the time goes into reading the weights, once a micro-batch."""


@dataclass(frozen=True)
class Split:
    """How the texts of a pass fall into micro-batches: `num_microbatches` of `rows` texts each, the last filled up."""

    num_microbatches: int
    rows: int

    @classmethod
    def of(cls, num_texts: int, width: int) -> "Split":
        """For texts with `width` new tokens each. No layout enters, so that pipelines give one process's bits."""
        num_microbatches = -(-num_texts // -(-FULL_TOKENS // width))
        return cls(num_microbatches, -(-num_texts // num_microbatches))

    @property
    def total(self) -> int:
        """Rows of all micro-batches."""
        return self.num_microbatches * self.rows


class LoadedModel:
    """This rank's stages of a trained model, with weights alone: what training keeps beside them is given up.

    config: of the training run, with the pipeline and tensor sizes of `mesh`.
    """

    def __init__(self, config: PretrainConfig, mesh: Mesh, restore: Restore) -> None:
        self.config = config
        self.mesh = mesh
        layers = family_of(config).layers
        num_stages = config.parallel.pipeline
        self.layout: StageLayout = lay_out(layers, config.model, num_stages, config.data.sequence_length)
        self.layers = self._restored_layers(restore)

    @cached_property
    def last_rank(self) -> int:
        """World rank that holds the last stage, the first of its tensor group."""
        place = {
            "data": 0,
            "context": 0,
            "tensor": 0,
            "pipeline": self.schedule(1).rank_of(len(self.layout.ranges) - 1),
        }
        return self.mesh.shape.rank_of(place)

    def schedule(self, num_microbatches: int) -> Schedule:
        """Forwards of that many micro-batches through the stages, which are in the same order in every schedule."""
        return build(
            ScheduleConfig.name,
            self.config.parallel.pipeline,
            num_microbatches,
            mode="forward",
            units_per_stage=self.layout.units_per_stage,
            tied_groups=self.layout.tied,
        )

    def _restored_layers(self, restore: Restore) -> dict[int, list[nn.Module]]:
        assembly = Assembly(self.config, self.mesh, self.layout, self.schedule(1).header)
        stages = assembly.stages()
        states = {id(state): state for stage in stages.values() for state in stage.states.values()}
        restore(list(states.values()))
        layers: dict[int, list[nn.Module]] = {}
        for stage_id, stage in stages.items():
            layers[stage_id] = [twins[0] for twins in stage.units if isinstance(twins[0], nn.Module)]
            for layer in layers[stage_id]:
                layer.requires_grad_(False)
                for parameter in layer.parameters():
                    parameter.grad = None
        return layers


class Passes:
    """Passes of `num_texts` texts of up to `capacity` tokens. Every rank makes the same calls in the same order.

    widths: numbers of new tokens a text that passes may have.
    """

    def __init__(self, model: LoadedModel, num_texts: int, capacity: int, widths: Collection[int]) -> None:
        self._model = model
        self._splits = {width: Split.of(num_texts, width) for width in widths}
        rows = max(split.total for split in self._splits.values())
        self._units = {
            stage: [[decoding_layer(layer, rows=rows, capacity=capacity)] for layer in layers]
            for stage, layers in model.layers.items()
        }
        parallel = model.config.parallel
        self._links = LinkPool(model.mesh, parallel.links, parallel.timeout_seconds)
        self._engines: dict[int, Engine] = {}

    def run(self, tokens: Tensor, positions: Tensor, last: Tensor) -> Tensor | None:
        """Logits [n, v] behind one token of each text; None where the last stage is elsewhere.

        tokens, positions: int64 [n, s], s new tokens of each of the n texts and where they stand; a text's earlier
        tokens have passed before. last: int64 [n], index of the wanted token within s.
        """
        num_texts, width = tokens.shape
        split = self._splits[width]
        window = self._model.config.model.sliding_window
        length = int(positions.max()) + 1
        # Texts fill the last micro-batch up a second time, in rows of the caches that are nobody's.
        source = torch.arange(split.total).clamp(max=num_texts - 1)
        tokens, positions, last = (each[source].to(self._model.mesh.device) for each in (tokens, positions, last))
        contexts = []
        for first in range(0, split.total, split.rows):
            rows = slice(first, first + split.rows)
            contexts.append(
                DecodingContext.of(rows, tokens[rows], positions[rows], last[rows], length=length, window=window)
            )
        result = self._engine(width).run(StepInput(0, contexts, token_counts=()))
        return torch.cat([logits for (logits,) in result.outputs])[:num_texts] if result.outputs else None

    def _engine(self, width: int) -> Engine:
        """The engine for `width` new tokens of every text, connected at its first use."""
        if width not in self._engines:
            mesh = self._model.mesh
            schedule = self._model.schedule(self._splits[width].num_microbatches)
            stages = self._stages(width)
            transfers = connect(schedule, mesh, stages, self._links)
            groups = Communicators(world=mesh.world, data=mesh.group("data"), tied={})
            reductions = Reductions([], [], groups, torch.ones_like, None, mesh.device)
            rank = mesh.coordinate("pipeline")
            self._engines[width] = Engine(schedule, rank, stages, transfers, reductions)
        return self._engines[width]

    def _stages(self, width: int) -> Mapping[int, Stage]:
        config = self._model.config
        shape = (self._splits[width].rows, width, config.model.hidden_size)
        boundary = (TensorSpec(shape, DTYPES[config.training.precision], requires_grad=False),)
        last = len(self._model.layout.ranges) - 1
        return {
            stage: Stage(units, {}, () if stage == 0 else boundary, () if stage == last else boundary)
            for stage, units in self._units.items()
        }
