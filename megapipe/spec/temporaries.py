"""Bytes that a layer's backward needs on a device for a moment, beyond what the rank held when it started.

A matrix's gradient is computed in the compute dtype, and a second copy of it in fp32 exists while it is added to its
accumulator; the gradients of the operation's inputs and the tensors that the forward saved are there at the same time.
So the peak of a step is within an action, not after it. `layout.timeline` adds these bytes to what each action starts
with. Forwards need less than the backward of the same layer, and are not counted.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from megapipe.spec.dtypes import FULL_BYTES
from megapipe.spec.layers import has_experts
from megapipe.spec.ops import MicrobatchShape
from megapipe.spec.parameters import LayerSpec

Phase = Literal["backward", "input half", "weight half"]
CHUNK_BYTES = 2**28
"""Bytes of the logits that are computed at a time where the backward recomputes them."""


def chunk_rows(num_columns: int, element_bytes: int) -> int:
    """Rows of logits that are computed at a time if none are saved: a power of two that takes at most 256 MB."""
    rows = CHUNK_BYTES // (max(num_columns, 1) * element_bytes)
    return 1 << max(rows.bit_length() - 1, 0)


@dataclass(frozen=True)
class Temporaries:
    """Sizes of one layer's backward on one tensor rank."""

    shape: MicrobatchShape
    layer: LayerSpec

    def of(self, phase: Phase) -> int:
        """Return the peak bytes of a backward, or of one half of it, beyond those held before it."""
        if phase == "weight half":
            return self._weight_half()
        if self.layer.kind == "embedding":
            return self._table() if phase == "backward" else 0
        if self.layer.kind == "head":
            return self._head(whole=phase == "backward")
        return self._block(whole=phase == "backward")

    @cached_property
    def _gathered(self) -> int:
        """Bytes of tokens that tensor ranks gather: what a matrix product reads while they share the tokens."""
        return self.shape.stream if self.shape.sequence_parallel and self.shape.tensor > 1 else 0

    def _elements(self, path: str) -> int:
        return prod(self.layer.parameters[path].local_shape(self.shape.tensor, self.shape.alignment))

    @cached_property
    def _largest(self) -> int:
        return max(self._elements(path) for path in self.layer.parameters)

    def _gradient(self, elements: int) -> int:
        """Bytes of a weight's gradient, and of its cast to fp32 if it has another dtype."""
        return elements * (FULL_BYTES if self.shape.width == FULL_BYTES else self.shape.width + FULL_BYTES)

    def _weight_half(self) -> int:
        """Gradients are added to their accumulators without a cast."""
        if self.layer.kind == "embedding":
            return self._table()
        scaled = (
            self.shape.rows * self.shape.model.hidden_size * self.shape.width + self._gathered
            if self.layer.kind == "head"
            else 0
        )
        return self._largest * self.shape.width + scaled

    def _table(self) -> int:
        """Rows of an embedding's gradient are summed in fp32; tensor ranks mask those of others' tokens in a copy."""
        rows = FULL_BYTES * self._largest + self._gathered + (self.shape.stream if self.shape.tensor > 1 else 0)
        if self.shape.width == FULL_BYTES:
            return rows
        wide = self.shape.tokens * self.shape.model.hidden_size * FULL_BYTES
        return rows + max(wide, self.shape.width * self._largest)

    def _head(self, *, whole: bool) -> int:
        """The gradients of the last hidden states and of the output matrix, which the logits' gradient makes."""
        rows, elements = self.shape.rows, self._elements("output.weight")
        hidden = rows * self.shape.model.hidden_size * self.shape.width
        if not whole:
            return hidden
        if self.shape.recompute_logits:
            columns = elements // self.shape.model.hidden_size
            logits = min(rows, chunk_rows(columns, self.shape.width)) * columns * self.shape.width
            return hidden + elements * (FULL_BYTES + self.shape.width) + logits
        if self.shape.width == FULL_BYTES:
            return 2 * hidden + self._gradient(elements)  # rows are scaled before the product
        return hidden + max(hidden + elements * self.shape.width, self._gradient(elements))

    def _block(self, *, whole: bool) -> int:
        """Return the largest need of the gradients of the second matrix, the activation and the first matrix.

        A product's output gradient is freed before its weight's gradient is cast, unless it is the residual stream's.
        Attention comes after them, when more has been freed; without a fused kernel its weights' gradients count.
        """
        model, shards = self.shape.model, self.shape.shards
        experts = has_experts(self.layer)
        rows = self.shape.expert_rows if experts else self.shape.tokens
        hidden = rows * model.hidden_size * self.shape.width // (1 if experts else shards)
        inner = rows * model.ffn_size * self.shape.width // (1 if experts else self.shape.tensor)
        outer = inner * (1 + model.activation_kind.gated)
        up, down = (self._elements(f"mlp.{name}.weight") if whole else 0 for name in ("up", "down"))
        again = inner if "mlp" in self.shape.recompute else 0
        # A whole backward has freed what operations before it saved; the input half leaves it to the other half.
        freed = hidden if experts and whole else 0
        activated = inner - again if whole else 0
        own = hidden if experts or model.hidden_dropout else 0
        moments = [
            inner + max(own + self._gathered + again + down * self.shape.width, self._gradient(down)) - freed,
            inner + outer - activated - freed,
            hidden
            + max(outer + 2 * self._gathered + up * self.shape.width, self._gradient(up))
            - activated
            - outer
            - freed,
        ]
        if self.shape.attention == "unfused":
            moments.append(self._attention_weights() - activated - outer - freed)
        return max(moments)

    def _attention_weights(self) -> int:
        """The weights and mixed values if recomputed, and the weights' gradients before and after the softmax."""
        weights = (
            self.shape.tokens
            * self.shape.local_length
            * self.shape.model.num_heads
            * self.shape.width
            // self.shape.tensor
        )
        if "attention" in self.shape.recompute:
            return 3 * weights + self.shape.stream // self.shape.tensor
        if self.shape.model.attention_dropout:  # the dropped weights have been freed
            return weights
        shards = self.shape.shards
        return 2 * (weights - self.shape.stream // shards)  # so have what the second norm and its product saved
