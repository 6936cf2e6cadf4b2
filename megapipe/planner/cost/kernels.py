"""The kernels of a layer on one rank, each by the device's roofline: matrix products, attention, and those that only
read and write.

Letters: b samples of a micro-batch, s tokens of a sample on this context rank, h hidden size, t tensor ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, cast

from megapipe.config.bert import BertPretrainConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.hardware.description import Device
from megapipe.layout.hardware.device_type import device_type
from megapipe.layout.hardware.roofline import KernelTime, matrix_product_time, memory_bound_time
from megapipe.layout.stages import VOCABULARY_ALIGNMENT
from megapipe.spec.attention_path import attention_path
from megapipe.spec.compute import ONCE_A_SAMPLE
from megapipe.spec.experts import EXPERT_MATRICES, has_experts, rows_of_rank
from megapipe.spec.gpt import ROUTER
from megapipe.spec.memory import ELEMENT_BYTES, FULL_BYTES, Precision
from megapipe.spec.parameters import LayerSpec, ParameterSpec

Phase = Literal["forward", "backward_input", "backward_weight", "again"]
CAUSAL_SHARE = 0.5
"""Of all pairs of tokens, those that a causal mask leaves and a fused kernel computes."""
ACCUMULATED_BYTES = 2 * FULL_BYTES
"""Of an element of a weight's gradient, which a product reads and writes as it adds to the fp32 sum."""

UNFUSED_LOSS_BYTES = 52
"""Of a logit that the steps of a loss in fp32 read and write: a copy in fp32 (6), maximum (4), difference (8),
exponential (8), sum (4), quotient (8), product with the outer gradient (8), a copy in 16 bits (6). As in Megatron-LM's
megatron/core/tensor_parallel/cross_entropy.py."""


@dataclass(frozen=True)
class Kernel:
    """One kernel of a micro-batch: in which phase it runs, and its time. `again`: a forward's, run once more in the
    backward because recompute.method selective or recompute.logits asks for it."""

    name: str
    phase: Phase
    time: KernelTime


@dataclass(frozen=True)
class LayerKernels:
    """All kernels of one layer for one micro-batch. Iterating gives them in no particular order.

    config: with parallel.data filled in. megatron_kernels: as in `Assumptions`. Passes over memory are those of fused
    kernels: a norm reads and writes its rows once, bias and activation are one kernel, so are dropout and the residual
    sum.
    """

    config: PretrainConfig
    layer: LayerSpec
    device: Device
    megatron_kernels: bool = False

    def __iter__(self) -> Iterator[Kernel]:
        kinds = {"embedding": self._embedding, "block": self._block, "head": self._head}
        return kinds[self.layer.kind]()

    @cached_property
    def _precision(self) -> Precision:
        return cast(Precision, self.config.training.precision)

    @cached_property
    def _size(self) -> int:
        return ELEMENT_BYTES[self._precision]

    @cached_property
    def _tokens(self) -> int:
        """b s."""
        return self.config.batch.micro_size * self._length

    @cached_property
    def _length(self) -> int:
        return self.config.data.sequence_length // self.config.parallel.context

    @cached_property
    def _stream(self) -> int:
        """Bytes of the residual stream between the matrices, which tensor ranks may share."""
        shards = self.config.parallel.sequence_shards
        return self._tokens * self.config.model.hidden_size * self._size // shards

    @cached_property
    def _dtype(self) -> str:
        """Number format of the layer's matrix products."""
        training = self.config.training
        chosen = range(training.fp8_first_kept, self.config.model.num_layers - training.fp8_last_kept)
        in_fp8 = training.fp8 != "none" and self.layer.kind == "block" and self.layer.index in chosen
        return "fp8" if in_fp8 and "fp8" in self.device.peak_flops else self._precision

    def _made_again(self, part: str) -> bool:
        recompute = self.config.recompute
        return recompute.method == "selective" and part in recompute.parts

    def _stored_mask(self, elements: int) -> int:
        """Bytes of dropout's mask, which this project's kernels do not store: they recompute it from indices."""
        return elements if self.megatron_kernels else 0

    def _product(
        self, name: str, rows: int, inner: int, columns: int, dtype: str, again: bool = False
    ) -> Iterator[Kernel]:
        """A linear layer's three products, and the first once more where it is made again."""
        forward = matrix_product_time(self.device, rows, inner, columns, dtype, out_bytes=self._size)
        yield Kernel(name, "forward", forward)
        if again:
            yield Kernel(name, "again", forward)
        gradient = matrix_product_time(self.device, rows, columns, inner, dtype, out_bytes=self._size)
        yield Kernel(f"{name}, gradient of its input", "backward_input", gradient)
        weight = matrix_product_time(self.device, inner, rows, columns, dtype, out_bytes=ACCUMULATED_BYTES)
        yield Kernel(f"{name}, gradient of its weight", "backward_weight", weight)

    def _linear(self, path: str, spec: ParameterSpec, rows: int, again: bool = False) -> Iterator[Kernel]:
        local = spec.local_shape(self.config.parallel.tensor, VOCABULARY_ALIGNMENT)
        return self._product(path.removesuffix(".weight"), rows, local[-1], prod(local[:-1]), self._dtype, again)

    def _passes(self, name: str, forward: float, backward: float, again: bool = False) -> Iterator[Kernel]:
        """A kernel that only reads and writes so many bytes."""
        yield Kernel(name, "forward", memory_bound_time(self.device, forward))
        if again:
            yield Kernel(name, "again", memory_bound_time(self.device, forward))
        yield Kernel(name, "backward_input", memory_bound_time(self.device, backward))

    def _embedding(self) -> Iterator[Kernel]:
        """Rows looked up and summed; their gradients added to the fp32 sums of the table."""
        yield Kernel("embedding", "forward", memory_bound_time(self.device, 3 * self._stream))
        moved = self._stream + self._stream // self._size * ACCUMULATED_BYTES
        yield Kernel("embedding, gradient of its table", "backward_weight", memory_bound_time(self.device, moved))

    def _block(self) -> Iterator[Kernel]:
        model, tensor = self.config.model, self.config.parallel.tensor
        experts = has_experts(self.layer)
        for path, spec in self.layer.parameters.items():
            if spec.matrix and not (experts and path.startswith("mlp.")):
                yield from self._linear(path, spec, self._tokens)
        yield from self._attention()
        rows = self._tokens
        if experts:
            yield from self._experts()
            rows = rows_of_rank(model, self._tokens, 1)
        inner = rows * model.ffn_size * self._size // tensor
        inputs = 2 if model.activation == "swiglu" else 1
        yield from self._passes("activation", (inputs + 1) * inner, (2 * inputs + 1) * inner, self._made_again("mlp"))
        for name in ("attention_norm", "mlp_norm"):
            yield from self._norm(name, self._made_again("norms"))
        dropped = self._stored_mask(self._stream // self._size) if model.hidden_dropout else 0
        for name in ("attention residual", "mlp residual"):
            yield from self._passes(name, 3 * self._stream + dropped, 2 * self._stream + dropped)

    def _experts(self) -> Iterator[Kernel]:
        """A router, in fp32, and the products of one expert after the other, each with an even share of the rows; rows
        are picked, weighed and put together by passes over memory."""
        config, model = self.config, self.config.model
        tensor, router = config.parallel.tensor, self.layer.parameters[ROUTER]
        scores = "fp32" if "fp32" in self.device.peak_flops else self._precision
        number, hidden = router.shape
        scored = self._tokens // config.parallel.sequence_shards
        yield from self._product("mlp.router", scored, hidden, number, scores)
        experts = number // tensor
        for path in EXPERT_MATRICES:
            _, *shape = self.layer.parameters[path].shape
            each = max(1, rows_of_rank(model, self._tokens, number))
            for kernel in self._product(path.removesuffix(".weight"), each, shape[-1], prod(shape[:-1]), self._dtype):
                time = kernel.time
                yield Kernel(
                    kernel.name,
                    kernel.phase,
                    KernelTime(experts * time.compute, experts * time.memory, experts * time.launch),
                )
        row = model.hidden_size * self._size
        own, all_rows = rows_of_rank(model, self._tokens, tensor) * row, rows_of_rank(model, self._tokens, 1) * row
        stream = self._tokens * row
        picked, summed = 2 * own, 2 * own + 3 * all_rows + stream
        yield from self._passes("rows of experts", picked + 2 * own + summed, picked + 4 * own + summed)

    def _norm(self, name: str, again: bool = False) -> Iterator[Kernel]:
        """Forward reads and writes the stream; backward reads the input and two gradients and writes one."""
        return self._passes(name, 2 * self._stream, 4 * self._stream, again)

    def _attention(self) -> Iterator[Kernel]:
        config, model = self.config, self.config.model
        heads = model.num_heads // config.parallel.tensor
        query = self._tokens * heads * model.head_dim * self._size
        key = query * model.kv_heads // model.num_heads
        if model.positions == "rotary" or model.qk_norm:
            passes = 2 * (query + key) * ((model.positions == "rotary") + model.qk_norm)
            yield from self._passes("rotation and norms of heads", passes, passes)
        length = config.data.sequence_length
        keys = length if model.sliding_window is None else min(model.sliding_window, length)
        path = attention_path(model, self._precision, device_type(self.device), length)
        batch = config.batch.micro_size * heads
        forward = matrix_product_time(self.device, self._length, model.head_dim, keys, self._precision, batch)
        if path == "unfused" and config.parallel.context == 1:
            yield from self._unfused(batch, keys, forward)
            return
        causal = not isinstance(config, BertPretrainConfig) and keys == length
        share = CAUSAL_SHARE if causal else 1.0
        one = forward.compute * share
        moved = (query + 2 * key + query) / self.device.reached_bandwidth
        # Dao 2023, arXiv 2307.08691, section 2.3: two products forward, five backward, one of them the scores again.
        yield Kernel("fused attention", "forward", KernelTime(2 * one, moved, forward.launch))
        yield Kernel("fused attention", "backward_input", KernelTime(5 * one, 2 * moved, forward.launch))

    def _unfused(self, batch: int, keys: int, scores: KernelTime) -> Iterator[Kernel]:
        """Scores, softmax, dropout and the weighted sum of values, each by itself."""
        model = self.config.model
        again = self._made_again("attention")
        mixed = matrix_product_time(self.device, self._length, keys, model.head_dim, self._precision, batch)
        for name, time in (("attention scores", scores), ("attention values", mixed)):
            yield Kernel(name, "forward", time)
            if again and name == "attention scores":
                yield Kernel(name, "again", time)
            yield Kernel(name, "backward_input", KernelTime(2 * time.compute, 2 * time.memory, 2 * time.launch))
        weights = batch * self._length * keys
        yield from self._passes("softmax", 2 * weights * self._size, 3 * weights * self._size, again)
        if model.attention_dropout:
            moved = 2 * weights * self._size + self._stored_mask(weights)
            yield from self._passes("attention dropout", moved, moved, again)

    def _head(self) -> Iterator[Kernel]:
        config = self.config
        micro, length = config.batch.micro_size, self._length
        of_bert = isinstance(config, BertPretrainConfig)
        rows = micro * (config.data.max_predictions if isinstance(config, BertPretrainConfig) else length)
        for path, spec in self.layer.parameters.items():
            if path == "output.weight":
                yield from self._linear(path, spec, rows, config.recompute.logits)
            elif spec.matrix:
                yield from self._linear(path, spec, micro if path in ONCE_A_SAMPLE else rows)
        columns = self.layer.parameters["output.weight"].local_shape(config.parallel.tensor, VOCABULARY_ALIGNMENT)[0]
        if self.megatron_kernels:
            yield from self._passes("loss", rows * columns * UNFUSED_LOSS_BYTES, 0.0)
        else:
            # It reads its logits twice, for the sum and for the gradient that it leaves in their place.
            yield from self._passes("loss", 3 * rows * columns * self._size, 0.0, config.recompute.logits)
        if not of_bert or "norm.weight" in self.layer.parameters:
            yield from self._norm("norm")
