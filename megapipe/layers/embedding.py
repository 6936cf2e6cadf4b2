"""Word embedding sharded by vocabulary (1909.08053, section 3) and learned positions."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megapipe.kernels.opaque import constant_when_compiled, opaque
from megapipe.layers.linear import OnShards, Shapes, empty_parameter, own_tokens
from megapipe.layers.split import SplitModule, SplitTape
from megapipe.parallel.collectives import reduce_from_group, scatter_sum
from megapipe.parallel.groups import Group


@opaque(
    "row_gradient(Tensor rows, Tensor dy, SymInt num_rows) -> Tensor",
    lambda rows, dy, num_rows: dy.new_empty(num_rows, dy.shape[-1]),
)
def row_gradient(rows: Tensor, dy: Tensor, num_rows: int) -> Tensor:
    """Return the gradient [num_rows, h] of a table whose `rows` [...] were looked up, for dy [..., h].

    Summed in fp32 (fp64 for fp64): a frequent token gets thousands of small contributions, which bf16 would lose.
    """
    wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
    gradient = torch.zeros(num_rows, dy.shape[-1], dtype=wide, device=dy.device)
    return gradient.index_add_(0, rows.flatten(), dy.flatten(0, -2).to(wide)).to(dy.dtype)


class _Rows(NamedTuple):
    """The rows of a table on this rank. first: the number that looks up the first row; below 0 if the first rows are
    unused. number: how many rows. shards: whether other ranks have the remaining rows."""

    first: int
    number: int
    shards: bool

    def of(self, numbers: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the indices of the rows [...] for numbers [...] that count from `starts`, and which of them other
        ranks have.

        A backward recomputes this, so that only the micro-batch's own numbers are saved for it.
        """
        rows = numbers if starts is None else numbers - starts
        if self.first:
            rows = rows - self.first
        if not self.shards:
            return rows, None
        absent = (rows < 0) | (rows >= self.number)
        return rows.masked_fill(absent, 0), absent

    def look_up(self, table: Tensor, numbers: Tensor, starts: Tensor | None) -> Tensor:
        """Return the rows [..., h] of the table [number, h]; zeros for rows on other ranks."""
        rows, absent = self.of(numbers, starts)
        looked_up = nn.functional.embedding(rows, table)
        return looked_up if absent is None else looked_up.masked_fill_(absent.unsqueeze(-1), 0.0)

    def gradient(self, numbers: Tensor, starts: Tensor | None, dy: Tensor) -> Tensor:
        """Return the table's gradient [number, h] for dy [..., h]."""
        rows, absent = self.of(numbers, starts)
        if absent is not None:
            dy = dy.masked_fill(absent.unsqueeze(-1), 0.0)
        return row_gradient(rows, dy, self.number)


class _FusedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: _Rows, numbers: Tensor, starts: Tensor | None) -> Tensor:
        ctx.save_for_backward(numbers, starts)
        ctx.rows = rows
        return rows.look_up(weight, numbers, starts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.rows.gradient(*ctx.saved_tensors, dy), None, None, None


class _ProbedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, probe: Tensor, weight: Tensor, rows: _Rows, numbers: Tensor, starts: Tensor | None
    ) -> Tensor:
        return rows.look_up(weight, numbers, starts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        return dy, None, None, None, None


class _Table(SplitModule):
    """A table of rows [num_rows, h], looked up by number. rank, shards: index of this rank's part of the rows, and
    number of parts. unused: number of rows before the row of number 0."""

    def __init__(self, shapes: Shapes, rank: int = 0, shards: int = 1, unused: int = 0) -> None:
        super().__init__()
        self.weight = empty_parameter(shapes["weight"])
        number = self.weight.shape[0]
        self._rows = _Rows(rank * number - unused, number, shards > 1)

    def look_up(self, numbers: Tensor, starts: Tensor | None, tape: SplitTape | None) -> Tensor:
        """Return rows [..., h] for numbers int64 [...], which count from `starts` unless it is None; zeros for rows on
        other ranks."""
        if tape is None:
            return _FusedEmbedding.apply(self.weight, self._rows, numbers, starts)
        shape = torch.broadcast_shapes(numbers.shape, () if starts is None else starts.shape)
        record = tape.record(self, (*shape, self.weight.shape[-1]), self.weight)
        record.saved = (numbers,) if starts is None else (numbers, starts)
        return _ProbedEmbedding.apply(record.probe, self.weight.detach(), self._rows, numbers, starts)

    def weight_half(self, saved: tuple[Tensor, ...], gradient: Tensor) -> Iterable[tuple[nn.Parameter, Tensor]]:
        starts = saved[1] if len(saved) == 2 else None
        yield self.weight, self._rows.gradient(saved[0], starts, gradient)


class VocabParallelEmbedding(_Table, OnShards):
    """Word embedding: each rank of the group has an equal part of the rows, with padding after the last.

    vocabulary_size: true number of tokens. scale: factor of the rows, which is rounded to their dtype first.
    """

    def __init__(self, shapes: Shapes, vocabulary_size: int, group: Group, scale: float = 1) -> None:
        super().__init__(shapes, group.rank, group.size)
        self.scale = scale
        self.vocabulary_size = vocabulary_size
        self.group = group

    def forward(self, tokens: Tensor, tape: SplitTape | None) -> Tensor:
        """Return embeddings [b, s, h] of tokens int64 [b, s], the same on every rank; under sequence parallelism this
        rank's [b, s / t, h].

        Raises ValueError as `own_rows`.
        """
        embeddings = self.own_rows(tokens, tape)
        if self.group.size > 1:
            embeddings = (
                reduce_from_group(embeddings, self.group)
                if self.sequence is None
                else scatter_sum(embeddings, self.group)
            )
        return scaled(embeddings, self.scale)

    def own_rows(self, tokens: Tensor, tape: SplitTape | None) -> Tensor:
        """Return embeddings [b, s, h] of tokens int64 [b, s]; zeros for rows on other ranks.

        Raises ValueError on the CPU for a token outside of the vocabulary; on a GPU, the check would stall the device.
        """
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
            lowest, highest = torch.aminmax(tokens)
            if lowest < 0 or highest >= self.vocabulary_size:
                raise ValueError(
                    f"tokens {lowest.item()} to {highest.item()} do not fit a vocabulary of {self.vocabulary_size}; "
                    "raise model.vocabulary_size to the tokenizer's"
                )
        return self.look_up(tokens, None, tape)


def scaled(rows: Tensor, scale: float) -> Tensor:
    """Return the rows times a factor that is first rounded to their dtype."""
    return rows if scale == 1 else rows * _rounded(scale, rows.dtype)


@constant_when_compiled
def _rounded(number: float, dtype: torch.dtype) -> float:
    return torch.tensor(number, dtype=dtype).item()


class LearnedPositions(_Table, OnShards):
    """One learned vector per position."""

    partial = ("weight",)

    def forward(self, positions: Tensor, document_starts: Tensor | None, tape: SplitTape | None) -> Tensor:
        """Return vectors [s, h] for `positions` int64 [s]; [b, s, h] if positions count from `document_starts`.

        Under sequence parallelism, only the vectors of this rank's tokens.
        """
        starts = None if document_starts is None else own_tokens(document_starts, self.sequence)
        return self.look_up(own_tokens(positions, self.sequence), starts, tape)


class TokenTypes(_Table, OnShards):
    """One learned vector per token type, which says to which of a sample's two parts a token belongs."""

    partial = ("weight",)

    def forward(self, types: Tensor, tape: SplitTape | None) -> Tensor:
        """Return vectors [b, s, h] for types int64 [b, s]; under sequence parallelism [b, s / t, h]."""
        return self.look_up(own_tokens(types, self.sequence), None, tape)
