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
from megapipe.layout.units import UnitCosts
from megapipe.spec.attention_path import why_a_mask
from megapipe.spec.bert_memory import bert_activation_bytes
from megapipe.spec.communication import Exchange, fp8_exchange, tensor_exchanges
from megapipe.spec.context import context_activation_bytes, context_exchanges
from megapipe.spec.memory import (
    FULL_BYTES,
    AttentionPath,
    Precision,
    activation_bytes,
    boundary_bytes,
    isolation_bytes,
    repeated_keys_bytes,
)
from megapipe.spec.parameters import LayerSpec, tied_names
from megapipe.spec.sequence import partial_elements, sequence_exchanges
from megapipe.spec.temporaries import Phase, Temporaries
from megapipe.spec.weight_halves import weight_half_bytes


@dataclass(frozen=True)
class LayoutCosts:
    """Sizes of one rank's layers. Ranks of one pipeline coordinate are alike, but for what the data decides and
    Muon's shards.

    config: of the run; its parallel.data may be open. layers: the model's, in order. data: data-parallel replicas.
    attention: the path that attention takes. alignment: rows of a padded vocabulary shard come in its multiples.
    shard: as in `UnitCosts`. device: type of the ranks' devices. On a GPU the backward of a dropout computes its mask
    again, and attention within documents takes lists of blocks in place of a mask.
    """

    config: PretrainConfig
    layers: tuple[LayerSpec, ...]
    data: int
    attention: AttentionPath
    alignment: int = 1
    shard: int = 0
    device: str = "cpu"

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

    @cached_property
    def of_units(self) -> UnitCosts:
        """What is kept and sent for the parameters of units."""
        return UnitCosts(self.config, self.replicas, self.alignment, self.shard)

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

    @cached_property
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
            "mask_bytes": int(self.device == "cpu"),
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
        return found + self._isolation(layer) + self._repeated_keys(layer)

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
            blocks=why_a_mask(config.model, self.device) is None,
        )

    def _repeated_keys(self, layer: LayerSpec) -> int:
        """On a GPU only flash attention shares keys among heads, which takes neither fp32 nor a mask."""
        config, model = self.config, self.config.model
        if layer.kind != "block" or self.device == "cpu" or self.attention != "sdpa" or self.context > 1:
            return 0
        blocks = config.data.isolate_documents and why_a_mask(model, self.device) is None
        masked = config.data.isolate_documents or (model.sliding_window or self.tokens) < self.tokens
        if model.num_heads == model.kv_heads or blocks or not (masked or self.precision == "fp32"):
            return 0
        return repeated_keys_bytes(model, config.batch.micro_size, self.tokens, self.precision, self.tensor)

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

    def temporaries(self, layer: LayerSpec, phase: Phase, predictions: int | None = None) -> int:
        """Bytes that a layer's backward, or half of it, needs for a moment beyond what there was before it."""
        config = self.config
        return Temporaries(
            config.model,
            layer,
            config.batch.micro_size,
            self.tokens,
            self.precision,
            self.attention,
            predictions=self.predictions if predictions is None else predictions,
            tensor_size=self.tensor,
            alignment=self.alignment,
            recompute_logits=config.recompute.logits,
            recompute=self._remade,
            sequence_parallel=config.parallel.sequence,
        ).of(phase)

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
        if self.tensor > 1 and self._scales_operands(layer):
            chunks = config.parallel.sequence_chunks if config.parallel.sequence else 1
            found["tensor"].append(fp8_exchange(forwards, chunks))
        if self.context > 1:
            kind, length = config.parallel.context_attention, config.data.sequence_length
            sizes = {"tensor_size": self.tensor, "forwards": forwards}
            found["context"] = context_exchanges(
                model, layer, micro, length, self.precision, kind, self.context, **sizes
            )
        return found

    def _scales_operands(self, layer: LayerSpec) -> bool:
        """Whether a layer multiplies in fp8 with scales that tensor ranks agree on."""
        training = self.config.training
        chosen = range(training.fp8_first_kept, self.config.model.num_layers - training.fp8_last_kept)
        return training.fp8 == "tensorwise" and layer.kind == "block" and layer.index in chosen

    def partial_reduction(self, layer: LayerSpec) -> dict[str, list[Exchange]]:
        """What tensor ranks that share the tokens sum ahead of every reduction of a layer's gradient."""
        elements = partial_elements(self.config.model, layer) if self.config.parallel.sequence else 0
        return {"tensor": [Exchange("all_reduce", elements, FULL_BYTES)]} if elements else {}
