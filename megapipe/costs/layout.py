"""What a layer holds and sends on one rank of a layout: the formulas of this package, with every feature in its place.

Tensor, sequence and context parallelism, recomputation, isolated documents and the precision change what a layer keeps
of a micro-batch; ZeRO and the optimizer what is kept of its parameters. `LayoutCosts` asks each formula with what a
configuration says of the others.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from megapipe.config.bert import BertModelConfig, BertPretrainConfig
from megapipe.config.recompute import RecomputedPart
from megapipe.config.run import PretrainConfig
from megapipe.costs.bert_memory import bert_activation_bytes
from megapipe.costs.communication import Exchange, tensor_exchanges
from megapipe.costs.context import context_activation_bytes, context_exchanges
from megapipe.costs.memory import (
    ELEMENT_BYTES,
    FULL_BYTES,
    AttentionPath,
    Precision,
    StateBytes,
    activation_bytes,
    boundary_bytes,
    isolation_bytes,
    num_moments,
)
from megapipe.costs.parameters import LayerSpec, ParameterSpec, tied_names
from megapipe.costs.sequence import partial_elements, sequence_exchanges
from megapipe.costs.weight_halves import weight_half_bytes
from megapipe.costs.zero import flat_elements


@dataclass(frozen=True)
class Unit:
    """Parameters that lie in one flat buffer: a layer's own, or one tied weight, with the number of its uses here."""

    specs: tuple[ParameterSpec, ...]
    tied: bool = False
    uses: int = 1


@dataclass(frozen=True)
class LayoutCosts:
    """Sizes of one rank's layers. Ranks of one pipeline coordinate are alike, but for what the data decides.

    config: of the run; its parallel.data may be open. layers: the model's, in order. data: data-parallel replicas.
    attention: the path that attention takes. alignment: rows of a padded vocabulary shard come in its multiples.
    """

    config: PretrainConfig
    layers: tuple[LayerSpec, ...]
    data: int
    attention: AttentionPath
    alignment: int = 1

    @property
    def tensor(self) -> int:
        """Tensor ranks."""
        return self.config.parallel.tensor

    @property
    def context(self) -> int:
        """Ranks that share every sample."""
        return self.config.parallel.context

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights."""
        return self.data * self.context

    @property
    def shards(self) -> int:
        """Of these the ranks that share one copy of the state; 1 where each has its own."""
        return self.config.zero.num_shards(self.replicas)

    @property
    def precision(self) -> Precision:
        """In which layers compute."""
        return cast(Precision, self.config.training.precision)

    @property
    def tokens(self) -> int:
        """Of a sample, those that the tensor ranks of one context rank have together."""
        return self.config.data.sequence_length // self.context

    @property
    def predictions(self) -> int | None:
        """Hidden tokens of a sample that a BERT's head predicts at most; None for all tokens, a GPT's."""
        return self.config.data.max_predictions if isinstance(self.config, BertPretrainConfig) else None

    @property
    def loss_terms(self) -> int:
        """Numbers that the loss consists of."""
        pairs = isinstance(self.config, BertPretrainConfig) and self.config.data.pairs != "none"
        return 2 if pairs else 1

    @cached_property
    def tied(self) -> tuple[str, ...]:
        """Names of tied weights."""
        return tied_names(self.layers)

    @property
    def stream(self) -> int:
        """Bytes of a micro-batch's residual stream on one rank: the message between two stages."""
        shards = self.config.parallel.sequence_shards
        return boundary_bytes(
            self.config.model, self.config.batch.micro_size, self.tokens, self.precision, sequence_shards=shards
        )

    @property
    def _remade(self) -> Collection[RecomputedPart]:
        recompute = self.config.recompute
        return recompute.parts if recompute.method == "selective" else ()

    def kept(self, layer: LayerSpec, predictions: int | None = None) -> int:
        """Bytes of one micro-batch's activations from a layer's forward to its backward.

        predictions: hidden tokens of a sample that this rank holds at most, where context ranks share a BERT's; which
        these are the data decides.
        """
        config, model = self.config, self.config.model
        arguments = model, layer, config.batch.micro_size
        choices = {
            "tensor_size": self.tensor,
            "alignment": self.alignment,
            "recompute_logits": config.recompute.logits,
            "recompute": self._remade,
            "sequence_parallel": config.parallel.sequence,
        }
        most = predictions if predictions is not None else self.predictions or 0
        if self.context > 1:
            kind, length = config.parallel.context_attention, config.data.sequence_length
            found = context_activation_bytes(
                *arguments, length, self.precision, self.attention, kind, self.context, predictions=most, **choices  # type: ignore[arg-type]
            )  # fmt: skip
        elif isinstance(model, BertModelConfig):
            found = bert_activation_bytes(
                model, layer, config.batch.micro_size, self.tokens, most, self.precision, self.attention, **choices  # type: ignore[arg-type]
            )  # fmt: skip
        else:
            found = activation_bytes(*arguments, self.tokens, self.precision, self.attention, **choices)  # type: ignore[arg-type]
        return found + self._isolation(layer)

    def _isolation(self, layer: LayerSpec) -> int:
        config = self.config
        if layer.kind != "block" or not config.data.isolate_documents:
            return 0
        return isolation_bytes(
            config.model,
            config.batch.micro_size,
            self.tokens,
            self.precision,
            self.attention,
            recompute=self._remade,
            mask_length=self._mask_length,
        )

    @property
    def _mask_length(self) -> int:
        """Tokens that attention sees at once; a ring makes its masks again."""
        if self.context == 1:
            return self.tokens
        return 0 if self.config.parallel.context_attention == "ring" else self.config.data.sequence_length

    def pending(self, layer: LayerSpec, predictions: int | None = None) -> int:
        """Of `kept` what is left between the halves of a split backward, and the gradients that these hand over."""
        return weight_half_bytes(
            self.config.model,
            layer,
            self.config.batch.micro_size,
            self.tokens,
            self.precision,
            predictions=self.predictions if predictions is None else predictions,
            tensor_size=self.tensor,
            alignment=self.alignment,
            recompute=self._remade,
            sequence_parallel=self.config.parallel.sequence,
        )

    def within_layer(
        self, layer: LayerSpec, *, forwards: int, halves: bool, predictions: int | None = None
    ) -> dict[str, list[Exchange]]:
        """What the tensor and the context ranks exchange for one micro-batch, forward and backward.

        forwards: how often the layer runs forward. halves: its backward is split. predictions: as in `kept`.
        """
        config, found = self.config, {}
        model, micro = config.model, config.batch.micro_size
        predicted = self.predictions if predictions is None else predictions
        if self.tensor > 1 and config.parallel.sequence:
            found["tensor"] = sequence_exchanges(
                model,
                layer,
                micro,
                self.tokens,
                self.precision,
                tensor_size=self.tensor,
                predictions=predicted,
                forwards=forwards,
                halves=halves,
                chunks=config.parallel.sequence_chunks,
            )
        elif self.tensor > 1:
            found["tensor"] = tensor_exchanges(
                model,
                layer,
                micro,
                self.tokens,
                self.precision,
                tensor_size=self.tensor,
                predictions=predicted,
                forwards=forwards,
            )
        if self.context > 1:
            kind, length = config.parallel.context_attention, config.data.sequence_length
            sizes = {"tensor_size": self.tensor, "forwards": forwards}
            found["context"] = context_exchanges(
                model, layer, micro, length, self.precision, kind, self.context, **sizes
            )
        return found

    def unit_elements(self, unit: Unit) -> int:
        """Of a flat buffer of the unit, whole."""
        shards = self.shards if self.config.zero.stage else 1
        return flat_elements(
            unit.specs, tensor_size=self.tensor, alignment=self.alignment, num_shards=shards
        )

    def sharded(self, unit: Unit, stage: int) -> bool:
        """Whether what ZeRO shards from `stage` on is sharded of this unit: of tied weights stage 1 alone."""
        return self.shards > 1 and min(self.config.zero.stage, 1 if unit.tied else 3) >= stage

    def own_elements(self, unit: Unit, stage: int) -> int:
        """Of a buffer that ZeRO shards from `stage` on, the elements that a rank keeps between its uses."""
        return self.unit_elements(unit) // (self.shards if self.sharded(unit, stage) else 1)

    def unit_state(self, unit: Unit, *, num_versions: int = 1, gradient_buffers: int = 1) -> StateBytes:
        """What a rank keeps of a unit between steps, wherever: weights and gradients that are whole for a while not
        counted. num_versions, gradient_buffers: as in `schedules.Header`.

        Raises ValueError for muon beside sharded state, whose matrices have shards of their own.
        """
        training, optimizer = self.config.training, self.config.optimizer
        size = ELEMENT_BYTES[self.precision]
        part = self.own_elements(unit, 1)
        if optimizer.name == "muon" and self.shards > 1:
            raise ValueError(
                f"optimizer.name muon with {self.shards} ranks that share the state: its bytes are not predicted; "
                "set zero.stage 0, or predict for adamw"
            )
        matrices = flat_elements(
            [spec for spec in unit.specs if spec.matrix], tensor_size=self.tensor, alignment=self.alignment
        )
        kept = part * num_moments(optimizer)
        if optimizer.name == "muon":
            kept += matrices * (num_moments(optimizer, matrix=True) - num_moments(optimizer))
        master = self.precision != "fp32" and training.master_weights
        return StateBytes(
            weights=num_versions * self.own_elements(unit, 3) * size,
            master=part * FULL_BYTES if master else 0,
            gradients=gradient_buffers * unit.uses * self.own_elements(unit, 2) * FULL_BYTES,
            moments=kept * (2 if optimizer.moment_dtype == "bf16" else FULL_BYTES),
        )

    def unit_reduction(self, unit: Unit) -> dict[str, list[Exchange]]:
        """One sum of a unit's gradient over its replicas, by group; further copies of shards are summed behind the
        last one alone (`copies_reduction`). Of tied weights see `tied_reduction`."""
        elements = self.unit_elements(unit)
        if self.replicas == 1 or elements == 0:
            return {}
        if self.shards == 1:
            return {"data+context": [Exchange("all_reduce", elements, FULL_BYTES)]}
        size = 2 if self.config.zero.reduce_dtype == "bf16" else FULL_BYTES
        return {self.shard_group: [Exchange("reduce_scatter", elements, size)]}

    def copies_reduction(self, unit: Unit) -> dict[str, list[Exchange]]:
        """The sum of a shard over the copies of the state, where there are several (hybrid sharding)."""
        if self.shards in (1, self.replicas) or self.unit_elements(unit) == 0:
            return {}
        return {"shard copies": [Exchange("all_reduce", self.own_elements(unit, 1), FULL_BYTES)]}

    def unit_gather(self, unit: Unit) -> dict[str, list[Exchange]]:
        """One gather of a unit's weights from those that share them out."""
        elements = self.unit_elements(unit)
        if self.shards == 1 or elements == 0:
            return {}
        return {self.shard_group: [Exchange("all_gather", elements, ELEMENT_BYTES[self.precision])]}

    @property
    def shard_group(self) -> str:
        """The group that shares one copy of the state: all replicas, unless zero.shard_size is smaller."""
        return "data+context" if self.shards == self.replicas else "shards"

    def partial_reduction(self, layer: LayerSpec) -> dict[str, list[Exchange]]:
        """What tensor ranks that share the tokens sum ahead of every reduction of a layer's gradient."""
        elements = partial_elements(self.config.model, layer) if self.config.parallel.sequence else 0
        return {"tensor": [Exchange("all_reduce", elements, FULL_BYTES)]} if elements else {}
