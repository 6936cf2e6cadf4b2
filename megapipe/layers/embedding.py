"""Word embedding shared out by vocabulary (1909.08053, section 3) and learned positions."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.kernels.opaque import opaque
from megapipe.layers.linear import Shapes, empty_parameter
from megapipe.layers.sequence_shard import OnShards, own_tokens
from megapipe.layers.split import SplitModule, SplitTape
from megapipe.parallel.collectives import reduce_from_group
from megapipe.parallel.groups import Group
from megapipe.parallel.sequence_collectives import scatter_sum


@opaque(
    "row_gradient(Tensor rows, Tensor dy, SymInt num_rows) -> Tensor",
    lambda rows, dy, num_rows: dy.new_empty(num_rows, dy.shape[-1]),
)
def row_gradient(rows: Tensor, dy: Tensor, num_rows: int) -> Tensor:
    """Gradient [num_rows, h] of a table whose `rows` [...] were looked up, for dy [..., h].

    Summed in fp32 (fp64 for fp64): a frequent token gets thousands of small contributions, which bf16 would lose.
    """
    wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
    gradient = torch.zeros(num_rows, dy.shape[-1], dtype=wide, device=dy.device)
    return gradient.index_add_(0, rows.flatten(), dy.flatten(0, -2).to(wide)).to(dy.dtype)


class _FusedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, absent: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, absent)
        ctx.num_rows = weight.shape[0]
        return _look_up(weight, rows, absent)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        rows, absent = ctx.saved_tensors
        return _table_gradient(rows, absent, dy, ctx.num_rows), None, None


class _ProbedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probe: Tensor, weight: Tensor, rows: Tensor, absent: Tensor | None) -> Tensor:
        return _look_up(weight, rows, absent)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return dy, None, None, None


def _look_up(weight: Tensor, rows: Tensor, absent: Tensor | None) -> Tensor:
    found = nn.functional.embedding(rows, weight)
    return found if absent is None else found.masked_fill_(absent.unsqueeze(-1), 0.0)


def _table_gradient(rows: Tensor, absent: Tensor | None, dy: Tensor, num_rows: int) -> Tensor:
    return row_gradient(rows, dy if absent is None else dy.masked_fill(absent.unsqueeze(-1), 0.0), num_rows)


class _Table(SplitModule):
    """A table of rows [num_rows, h], looked up by number."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.weight = empty_parameter(shapes["weight"])

    def look_up(self, rows: Tensor, absent: Tensor | None, tape: SplitTape | None) -> Tensor:
        """Rows [...] to [..., h]; zero where `absent` (bool [...])."""
        if tape is None:
            return _FusedEmbedding.apply(self.weight, rows, absent)
        record = tape.record(self, (*rows.shape, self.weight.shape[-1]), self.weight)
        record.saved = (rows,) if absent is None else (rows, absent)
        return _ProbedEmbedding.apply(record.probe, self.weight.detach(), rows, absent)

    def weight_half(self, saved: tuple[Tensor, ...], gradient: Tensor) -> Iterable[tuple[nn.Parameter, Tensor]]:
        absent = saved[1] if len(saved) == 2 else None
        yield self.weight, _table_gradient(saved[0], absent, gradient, self.weight.shape[0])


class VocabParallelEmbedding(_Table, OnShards):
    """Word embedding: each rank of the group holds an equal share of the rows, padded ones behind the last.

    vocabulary_size: true number of tokens.
    """

    def __init__(self, shapes: Shapes, vocabulary_size: int, group: Group) -> None:
        super().__init__(shapes)
        self.vocabulary_size = vocabulary_size
        self.group = group

    def forward(self, tokens: Tensor, tape: SplitTape | None) -> Tensor:
        """Tokens int64 [b, s] to [b, s, h], the same on every rank; where tokens are sharded to its own [b, s / t, h].

        Raises ValueError on the CPU for a token outside of the vocabulary; on a GPU, looking would stall the device.
        """
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
            lowest, highest = torch.aminmax(tokens)
            if lowest < 0 or highest >= self.vocabulary_size:
                raise ValueError(
                    f"tokens {lowest.item()} to {highest.item()} do not fit a vocabulary of {self.vocabulary_size}; "
                    "raise model.vocabulary_size to the tokenizer's"
                )
        if self.group.size == 1:
            return self.look_up(tokens, None, tape)
        share = self.weight.shape[0]
        rows = tokens - self.group.rank * share
        absent = (rows < 0) | (rows >= share)
        found = self.look_up(rows.masked_fill(absent, 0), absent, tape)
        return reduce_from_group(found, self.group) if self.sequence is None else scatter_sum(found, self.group)


class LearnedPositions(_Table, OnShards):
    """One learned vector per position."""

    partial = ("weight",)

    def forward(self, positions: Tensor, document_starts: Tensor | None, tape: SplitTape | None) -> Tensor:
        """[s, h] for `positions` int64 [s]; [b, s, h] for those in documents that begin at `document_starts`.

        Of these the rank's own tokens, where they are sharded.
        """
        positions = positions if document_starts is None else positions - document_starts
        return self.look_up(own_tokens(positions, self.sequence), None, tape)


class TokenTypes(_Table, OnShards):
    """One learned vector per type of token: which of a sample's two parts it belongs to."""

    partial = ("weight",)

    def forward(self, types: Tensor, tape: SplitTape | None) -> Tensor:
        """Types int64 [b, s] to [b, s, h], where tokens are sharded to [b, s / t, h]."""
        return self.look_up(own_tokens(types, self.sequence), None, tape)
