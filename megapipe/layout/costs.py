"""Sizes and traffic of a layer on one rank of a layout: sums over its ops for the shape that a configuration gives.
Also the exchanges outside of layers: between stages, and once per step.

Tensor, sequence and context parallelism, recomputation, isolated documents and the precision change what a layer keeps
of a micro-batch; ZeRO and the optimizer change what is kept of its parameters.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import cast

from megapipe.config.memory import Part
from megapipe.config.parallel import layer_is_fp8, recompute_method
from megapipe.config.run import PretrainConfig
from megapipe.layout.stages import cached_method
from megapipe.layout.units import Unit, UnitCosts
from megapipe.spec.attention import why_a_mask
from megapipe.spec.layers import layer_ops
from megapipe.spec.linear import OUTPUT_GRADIENT
from megapipe.spec.ops import (
    FULL_BYTES,
    AttentionPath,
    BackwardPhase,
    Exchange,
    MicrobatchShape,
    Op,
    Operation,
    Precision,
    exchanges,
    partial_weights,
    saved_bytes,
    weight_half_bytes,
)
from megapipe.spec.parameters import LayerKind, LayerSpec, TiedNames, tied_names
from megapipe.spec.peaks import peaks_within

_ops = lru_cache(maxsize=4096)(layer_ops)


def own_parts(config: PretrainConfig, layer: LayerSpec) -> frozenset[Part]:
    """Return the parts of blocks that a layer's backward recomputes itself."""
    if layer.kind == "head" and config.model.mtp_layers:
        return config.recompute.parts_in_heads
    selective = layer.kind == "block" and recompute_method(config, layer.name) == "selective"
    return frozenset(config.recompute.parts if selective else ())


@lru_cache(maxsize=4096)
def _peaks(kind: LayerKind, shape: MicrobatchShape) -> dict[BackwardPhase, int]:
    return peaks_within(_ops(kind, shape), shape)


@dataclass(frozen=True)
class LayoutCosts:
    """Sizes of one rank's layers. They are the same for all ranks of one pipeline coordinate, except sizes that depend
    on the data, and Muon's shards.

    config: of the run; its parallel.data may be open. layers: the model's, in order. data: data-parallel replicas.
    attention: the path that attention takes. alignment: rows of a padded vocabulary shard are multiples of it.
    shard: as in `UnitCosts`. device: type of the ranks' devices. On a GPU the backward of a dropout recomputes its
    mask, and attention within documents takes lists of blocks in place of a mask. tensor_rank, context_rank,
    pipeline_rank: this rank's coordinates, on which only kernel calls depend. slices, slice: as in `MicrobatchShape`.
    predictions: masked tokens per sample on this rank, by default the maximum; if context ranks shard a BERT's
    samples, the data decides which these are.
    """

    config: PretrainConfig
    layers: tuple[LayerSpec, ...]
    data: int
    attention: AttentionPath
    alignment: int = 1
    shard: int = 0
    device: str = "cpu"
    tensor_rank: int = 0
    context_rank: int = 0
    pipeline_rank: int = 0
    slices: tuple[range, ...] = ()
    slice: int = 0
    predictions: int | None = None

    @property
    def tensor(self) -> int:
        """Tensor ranks."""
        return self.config.parallel.tensor

    @property
    def context(self) -> int:
        """Ranks that shard every sample."""
        return self.config.parallel.context

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights."""
        return self.data * self.context

    @cached_property
    def of_units(self) -> UnitCosts:
        """Bytes and exchanges of the parameters of units."""
        return UnitCosts(self.config, self.replicas, self.alignment, self.shard)

    @property
    def precision(self) -> Precision:
        """Precision in which layers compute."""
        return cast(Precision, self.config.training.precision)

    @cached_property
    def tied(self) -> tuple[TiedNames, ...]:
        """Names of each tied weight."""
        return tied_names(self.layers)

    @cached_property
    def stream(self) -> int:
        """Bytes of a micro-batch's residual stream on one rank: the message between two stages."""
        return self.shape(self.layers[0]).own_stream

    def shape(self, layer: LayerSpec) -> MicrobatchShape:
        """Return the shape that determines the ops of a layer."""
        base, config = self._plain_shape(layer.variant, own_parts(self.config, layer)), self.config
        if layer.kind in ("output", "words"):
            rank = self.pipeline_rank * self.tensor + self.tensor_rank
            splits = config.parallel.vocabulary_variant == 2
            return replace(base, tensor=self.tensor * config.parallel.pipeline, tensor_rank=rank, splits_loss=splits)
        if not layer_is_fp8(config, layer.kind, layer.index):
            return base
        return replace(base, fp8=True, tensorwise_fp8=config.training.fp8 == "tensorwise")

    def ops(self, layer: LayerSpec) -> tuple[Op, ...]:
        """Return the ops of a layer on this rank."""
        return _ops(layer.kind, self.shape(layer))

    @cached_method
    def _plain_shape(self, variant: str, recompute: frozenset[Part]) -> MicrobatchShape:
        """Return the shape for a layer of a variant without products in fp8."""
        config, model = self.config, self.config.model.of_kind(variant)
        parallel = config.parallel
        isolates, in_slices = config.data.isolate_documents, bool(self.slices)
        blocks = isolates and not in_slices and why_a_mask(config.model, self.device) is None
        # On a GPU, only flash attention supports keys that are shared by heads, but neither fp32 nor a mask.
        tokens = config.data.sequence_length // self.context
        masked = isolates or (model.sliding_window or tokens) < tokens
        in_pieces = model.why_pieces is not None or in_slices
        grouped = model.num_heads > model.kv_heads and self.attention == "sdpa" and self.context == 1 and not in_pieces
        return MicrobatchShape(
            copy(model),  # ops are cached by shape, and a configuration may change
            config.batch.micro_size,
            config.data.sequence_length,
            self.precision,
            "sdpa" if in_pieces else self.attention,
            tensor=self.tensor,
            alignment=self.alignment,
            sequence_parallel=parallel.sequence,
            sequence_chunks=parallel.sequence_chunks,
            context=self.context,
            context_attention=parallel.context_attention,
            recompute=recompute,
            predictions=config.predictions if self.predictions is None else self.predictions,
            recompute_logits=config.recompute.logits,
            isolate_documents=isolates,
            document_blocks=blocks,
            stored_masks=self.device == "cpu",
            repeats_keys=self.device != "cpu" and grouped and not blocks and (masked or self.precision == "fp32"),
            slices=self.slices,
            slice=self.slice,
            tensor_rank=self.tensor_rank,
            context_rank=self.context_rank,
        )

    def kept(self, layer: LayerSpec, *, split: bool = False, alone: bool = False) -> int:
        """Return the bytes of one micro-batch's activations from a layer's forward to its backward, which may be split
        in two halves. alone: no other layer holds the layer's input."""
        shape = self.shape(layer)
        saved = saved_bytes(_ops(layer.kind, shape), shape.recompute, split=split)
        # The engine keeps a unit's input until it returns the input's gradient, whereas a block would save the sum of
        # words itself.
        return max(saved, shape.own_stream) if alone and layer.kind == "positions" else saved

    def handed(self, layer: LayerSpec) -> tuple[int, int]:
        """Return the bytes of a layer's tensors that later slices of a sample read, and of their gradients."""
        ops = self.ops(layer)
        return sum(op.handed for op in ops), sum(op.handed_gradient for op in ops)

    def pending(self, layer: LayerSpec) -> int:
        """Return the bytes that remain of `kept` between the halves of a split backward, including gradients that the
        input half leaves for the weight half."""
        shape = self.shape(layer)
        return weight_half_bytes(_ops(layer.kind, shape), shape.recompute)

    def reads_output_gradient(self, layer: LayerSpec) -> bool:
        """Return whether a layer's weight half reads the gradient of its output from the output gradient's own
        storage."""
        return OUTPUT_GRADIENT in {value.name for op in self.ops(layer) for value in op.weight_needs}

    def temporaries(self, layer: LayerSpec, phase: BackwardPhase) -> int:
        """Return the peak bytes within a layer's backward, or one half of it, beyond those held before it."""
        return _peaks(layer.kind, self.shape(layer))[phase]

    def within_layer(self, layer: LayerSpec, *, forwards: int, halves: bool) -> dict[str, list[Exchange]]:
        """Return, by group, the exchanges of tensor and context ranks for one micro-batch, forward and backward.

        forwards: number of forwards of a block; other layers run once. halves: whether its backward is split.
        """
        return exchanges(self.ops(layer), forwards=forwards if layer.kind == "block" else 1, split=halves)

    def partial_reduction(self, layer: LayerSpec, unit: Unit) -> dict[str, list[Exchange]]:
        """Return the sums over tensor ranks, if they shard the tokens, before every reduction of the gradient of a
        layer's unit."""
        weights = partial_weights(self.ops(layer)) if self.config.parallel.sequence else []
        names = {spec.name for spec in unit.specs}
        elements = sum(spec.num_elements for spec in weights if layer.parameters[spec.name].name in names)
        return {"tensor": [Exchange("all_reduce", elements, FULL_BYTES)]} if elements else {}


DOUBLE_BYTES = 8
"""Bytes of a float64: counts, norms and losses of a step."""
MESSAGES_IN_FLIGHT = 4
"""Maximum number of messages, per stage boundary and direction, that a rank sends before a receive has ended: over
NCCL their tensors are kept until then."""


def scalar_exchanges(num_parameters: int, loss_terms: int = 1, updates: int = 1) -> list[Exchange]:
    """Return the exchanges of scalars over all ranks in one step, in float64.

    The first one has a count of tokens for each term of the loss and update, with flags for stop, save and a failed
    save. The second one has every parameter's squared norm (0 if this rank does not count it) and the terms of the
    loss.
    """
    return [
        Exchange("all_reduce", loss_terms * updates + 3, DOUBLE_BYTES),
        Exchange("all_reduce", num_parameters + loss_terms, DOUBLE_BYTES),
    ]


def merged(exchanges: Iterable[Exchange]) -> dict[Operation, tuple[int, int, int]]:
    """Return the calls, elements and bytes of all exchanges, by operation."""
    totals: dict[Operation, tuple[int, int, int]] = {}
    for each in exchanges:
        calls, elements, total = totals.get(each.operation, (0, 0, 0))
        totals[each.operation] = (calls + each.calls, elements + each.calls * each.elements, total + each.bytes)
    return totals


def repeated(exchanges: Sequence[Exchange], times: int) -> list[Exchange]:
    """Return each exchange with `times` times the calls."""
    return [each._replace(calls=each.calls * times) for each in exchanges]
