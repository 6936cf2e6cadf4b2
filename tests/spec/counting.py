"""Bytes, FLOPs and traffic of single layers, counted while the layers run."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megapipe.config.bert import BertModelConfig
from megapipe.config.memory import Part
from megapipe.config.model import ModelConfig
from megapipe.layers.context import BertContext, MicrobatchContext
from megapipe.layers.context_parallel import share_samples
from megapipe.layers.linear import shard_sequence
from megapipe.layers.sequence_parallel import SequenceProducts
from megapipe.layers.split import SplitTape, gradient_edge
from megapipe.models import build_layer
from megapipe.models.gpt import Block, Head
from megapipe.parallel.groups import SoloGroup
from megapipe.parallel.mesh import Mesh
from megapipe.spec.ops import ContextAttention
from megapipe.spec.parameters import LayerSpec
from megapipe.spec.token_order import Share, order_of

SEQUENCE = 32
PREDICTIONS = 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Subject:
    """One layer of a model with drawn weights, and a micro-batch for it.

    mesh: tensor ranks that shard the tokens too, or context ranks with attention of the given kind. documents: whether
    attention is isolated to two documents per sample.
    """

    def __init__(
        self,
        model: ModelConfig,
        layer: LayerSpec,
        micro_size: int = 3,
        dtype: torch.dtype = torch.float32,
        *,
        recompute: Collection[Part] = (),
        recompute_logits: bool = False,
        mesh: Mesh | None = None,
        kind: ContextAttention = "ring",
        documents: bool = False,
    ) -> None:
        self.model, self.layer = model, layer
        self.tensor, self.context = (mesh.size(name) if mesh else 1 for name in ("tensor", "context"))
        self.is_bert = isinstance(model, BertModelConfig)
        attends = layer.kind == "block" or (layer.kind == "head" and model.mtp_layers > 0 and "block" not in recompute)
        self.shares_tables = attends and model.positions == "rotary" and not documents
        ranks = mesh.group("tensor") if mesh and self.tensor > 1 else SoloGroup("tensor")
        self.module = build_layer(layer, model, ranks, recompute_logits=recompute_logits)
        for number, (path, spec) in enumerate(layer.parameters.items()):
            owner, _, leaf = path.rpartition(".")
            drawn = torch.randn(spec.local_shape(ranks.size), generator=torch.Generator().manual_seed(number)) * 0.2
            setattr(self.module.get_submodule(owner), leaf, nn.Parameter(drawn.to(dtype)))
        if isinstance(self.module, Block | Head):
            self.module.recompute(recompute)
        if self.tensor > 1:
            shard_sequence(self.module, SequenceProducts(ranks))
        share = None
        if mesh and self.context > 1:
            group = mesh.group("context")
            share = Share(order_of(kind, not self.is_bert), group.rank, group.size)
            if isinstance(self.module, Block):
                share_samples(self.module.attention, group, kind)
        self.inputs: list[Tensor] = []
        if layer.kind != "embedding":
            length = SEQUENCE // self.tensor // self.context
            self.inputs = [torch.randn(micro_size, length, model.hidden_size, dtype=dtype, requires_grad=True)]
        self.batch = self._batch(micro_size, share, documents)

    def _batch(self, micro_size: int, share: Share | None, documents: bool) -> MicrobatchContext:
        tokens = torch.zeros(micro_size, SEQUENCE // self.context, dtype=torch.int64)
        common: dict[str, Any] = {"tokens": tokens, "ordinals": torch.arange(micro_size)}
        if share is not None:
            common["token_numbers"] = torch.from_numpy(share.numbers(SEQUENCE))
        if not self.is_bert:
            starts = torch.arange(SEQUENCE).expand(micro_size, SEQUENCE) // (SEQUENCE // 2) * (SEQUENCE // 2)
            return MicrobatchContext(labels=tokens, document_starts=starts if documents else None, **common)
        hidden = torch.zeros(micro_size, PREDICTIONS, dtype=torch.int64)
        return BertContext(
            token_types=tokens,
            lengths=torch.full((micro_size,), SEQUENCE),
            positions=hidden,
            labels=hidden,
            loss_mask=torch.ones(micro_size, PREDICTIONS),
            sentence_labels=torch.zeros(micro_size, dtype=torch.int64),
            sentence_weights=torch.ones(micro_size),
            **common,
        )

    def run(self, tape: SplitTape | None = None) -> Tensor:
        output: Tensor = self.module(*self.inputs, context=replace(self.batch, tape=tape))[0]
        return output

    def saved(self) -> int:
        """Return the bytes that a forward leaves for its backward.

        Parameters, the micro-batch and tables, which all micro-batches share, do not count; int64 tensors count in a
        mixture of experts (numbers of rows) and in a head (labels of further tokens) only.
        """
        known = {each.untyped_storage().data_ptr() for each in self.module.parameters()} | self._batch_addresses()
        kept: dict[int, Tensor] = {}
        if self.shares_tables:
            with torch.no_grad():  # ranks are threads, which at their first forward may make a table each
                self.run()

        def pack(tensor: Tensor) -> Tensor:
            if self._keeps_integers or tensor.dtype not in (torch.int64, torch.int32):
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.run()
        num_bytes = sum(each.untyped_storage().nbytes() for address, each in kept.items() if address not in known)
        tables = 2 * SEQUENCE // self.context * (self.model.rotary_dim // 2) * 4
        return num_bytes - tables * self.shares_tables

    def handed_over(self) -> int:
        """Return the bytes that the input half of a split backward leaves for the weight half."""
        tape = SplitTape()
        output = self.run(tape)
        tape.backward_input([gradient_edge(output)], [torch.ones_like(output)], self.inputs)
        labels = self.layer.kind == "head" and self._keeps_integers
        kept = {each.untyped_storage().data_ptr(): each for each in tape.kept if labels or each.is_floating_point()}
        own = self._batch_addresses()
        return sum(each.untyped_storage().nbytes() for address, each in kept.items() if address not in own)

    @property
    def _keeps_integers(self) -> bool:
        return self.model.num_experts is not None if self.layer.kind == "block" else self.layer.kind == "head"

    def _batch_addresses(self) -> set[int]:
        return {each.untyped_storage().data_ptr() for each in vars(self.batch).values() if isinstance(each, Tensor)}

    def flops(self) -> tuple[int, int]:
        """Return the FLOPs that torch counts in forward and backward."""
        with FlopCounterMode(display=False) as forward:
            output = self.run()
        with FlopCounterMode(display=False) as backward:
            output.sum().backward()
        return forward.get_total_flops(), backward.get_total_flops()
