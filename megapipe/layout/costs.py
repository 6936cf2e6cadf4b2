"""Sizes and traffic of a layer on one rank of a layout: sums over its ops for the shape that a configuration gives.

Tensor, sequence and context parallelism, recomputation, isolated documents and the precision change what a layer keeps
of a micro-batch; ZeRO and the optimizer what is kept of its parameters.
"""

from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import cast

from megapipe.config.bert import BertPretrainConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.units import UnitCosts
from megapipe.spec.attention_path import why_a_mask
from megapipe.spec.dtypes import FULL_BYTES, AttentionPath, Precision
from megapipe.spec.layers import layer_ops
from megapipe.spec.ops import (
    Exchange,
    MicrobatchShape,
    Op,
    exchanges,
    partial_elements,
    saved_bytes,
    weight_half_bytes,
)
from megapipe.spec.parameters import LayerSpec, tied_names
from megapipe.spec.temporaries import Phase, Temporaries

_ops = lru_cache(maxsize=4096)(layer_ops)


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
        return self.shape(self.layers[0]).own_stream

    def shape(self, layer: LayerSpec, predictions: int | None = None) -> MicrobatchShape:
        """Return what the ops of a layer depend on.

        predictions: hidden tokens of a sample that this rank holds at most, where context ranks share a BERT's; which
        these are the data decides.
        """
        base, tensorwise = self._shape, self.config.training.fp8 == "tensorwise"
        in_fp8 = layer.kind == "block" and layer.index in self._fp8_blocks
        held = base.predictions if predictions is None else predictions
        if not in_fp8 and held == base.predictions:
            return base
        return replace(base, fp8=in_fp8, tensorwise_fp8=in_fp8 and tensorwise, predictions=held)

    def ops(self, layer: LayerSpec, predictions: int | None = None) -> tuple[Op, ...]:
        """Return the ops of a layer on this rank."""
        return _ops(layer.kind, self.shape(layer, predictions))

    @cached_property
    def _fp8_blocks(self) -> range:
        training = self.config.training
        chosen = range(training.fp8_first_kept, self.config.model.num_layers - training.fp8_last_kept)
        return range(0) if training.fp8 == "none" else chosen

    @cached_property
    def _shape(self) -> MicrobatchShape:
        """The shape for a layer without products in fp8."""
        config, model = self.config, self.config.model
        parallel, recompute = config.parallel, config.recompute
        isolates = config.data.isolate_documents
        blocks = isolates and why_a_mask(model, self.device) is None
        # On a GPU only flash attention shares keys among heads, which takes neither fp32 nor a mask.
        masked = isolates or (model.sliding_window or self.tokens) < self.tokens
        grouped = model.num_heads > model.kv_heads and self.attention == "sdpa" and self.context == 1
        return MicrobatchShape(
            copy(model),  # of its own: ops are cached by shape, and a configuration may change
            config.batch.micro_size,
            config.data.sequence_length,
            self.precision,
            self.attention,
            tensor=self.tensor,
            alignment=self.alignment,
            sequence_parallel=parallel.sequence,
            sequence_chunks=parallel.sequence_chunks,
            context=self.context,
            context_attention=parallel.context_attention,
            recompute=frozenset(recompute.parts if recompute.method == "selective" else ()),
            predictions=self.predictions,
            recompute_logits=recompute.logits,
            isolate_documents=isolates,
            document_blocks=blocks,
            stored_masks=self.device == "cpu",
            repeats_keys=self.device != "cpu" and grouped and not blocks and (masked or self.precision == "fp32"),
        )

    def kept(self, layer: LayerSpec, predictions: int | None = None) -> int:
        """Return the bytes of one micro-batch's activations from a layer's forward to its backward."""
        shape = self.shape(layer, predictions)
        return saved_bytes(_ops(layer.kind, shape), shape.recompute)

    def pending(self, layer: LayerSpec, predictions: int | None = None) -> int:
        """Return what is left of `kept` between the halves of a split backward, with the gradients that the input half
        hands over."""
        shape = self.shape(layer, predictions)
        return weight_half_bytes(_ops(layer.kind, shape), shape.recompute)

    def temporaries(self, layer: LayerSpec, phase: Phase, predictions: int | None = None) -> int:
        """Return the bytes that a layer's backward, or half of it, needs for a moment beyond what there was before."""
        return Temporaries(self.shape(layer, predictions), layer).of(phase)

    def within_layer(
        self, layer: LayerSpec, *, forwards: int, halves: bool, predictions: int | None = None
    ) -> dict[str, list[Exchange]]:
        """Return by group what the tensor and the context ranks exchange for one micro-batch, forward and backward.

        forwards: how often a block runs forward; other layers run once. halves: its backward is split.
        """
        ops = self.ops(layer, predictions)
        return exchanges(ops, forwards=forwards if layer.kind == "block" else 1, split=halves)

    def partial_reduction(self, layer: LayerSpec) -> dict[str, list[Exchange]]:
        """Return what tensor ranks that share the tokens sum before every reduction of a layer's gradient."""
        elements = partial_elements(self.ops(layer)) if self.config.parallel.sequence else 0
        return {"tensor": [Exchange("all_reduce", elements, FULL_BYTES)]} if elements else {}
