"""Embeddings of tokens, and their positions in samples: learned positions and rotary ones.

The table of words is sharded by vocabulary (1909.08053, section 3). Learned positions and token types are tables too,
whose rows are added.

Rotary positions are tables of angles, by which the kernel op `rotary` rotates queries and keys; the frequencies of
channel pairs may be stretched for long contexts. Scalings whose frequencies depend on the length of the sequence
(dynamic, longrope) use the length of the whole sample, even if a rank has a part of it or documents count their
positions from 0: one table serves all layers and samples of a micro-batch. In generation the length is the capacity of
the caches, so that all keys in a cache have the same frequencies.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megapipe.config.model import ModelConfig
from megapipe.config.rope import RopeScaling
from megapipe.kernels.reference.norms import wide, wide_dtype
from megapipe.kernels.registry import Registry, constant_when_compiled, opaque
from megapipe.layers.linear import OnShards, Shapes, empty_parameter, own_tokens
from megapipe.layers.split import SplitModule, SplitTape, Tensors, WeightGradients
from megapipe.parallel.groups import Group
from megapipe.spec.token_order import Share


@opaque(
    "row_gradient(Tensor rows, Tensor dy, SymInt num_rows) -> Tensor",
    lambda rows, dy, num_rows: dy.new_empty(num_rows, dy.shape[-1]),
)
def row_gradient(rows: Tensor, dy: Tensor, num_rows: int) -> Tensor:
    """Return the gradient [num_rows, h] of a table whose `rows` [...] were looked up, for dy [..., h].

    Summed in fp32 (fp64 for fp64): a frequent token gets thousands of small contributions, which bf16 would lose.
    """
    gradient = torch.zeros(num_rows, dy.shape[-1], dtype=wide_dtype(dy), device=dy.device)
    return gradient.index_add_(0, rows.flatten(), wide(dy.flatten(0, -2))).to(dy.dtype)


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

    def weight_half(self, saved: Tensors, gradient: Tensor) -> WeightGradients:
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
            embeddings = self.summed_over(embeddings, self.group)
        return scaled(embeddings, self.scale)

    def own_rows(self, tokens: Tensor, tape: SplitTape | None) -> Tensor:
        """Return embeddings [b, s, h] of tokens int64 [b, s]; zeros for rows on other ranks.

        Raises ValueError on the CPU for a token outside of the vocabulary; on a GPU, the check would stall the device.
        """
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
            lowest, highest = torch.aminmax(tokens)
            if lowest < 0 or highest >= self.vocabulary_size:
                raise ValueError(
                    f"tokens {lowest.item()} to {highest.item()} do not fit a vocabulary of "
                    f"{self.vocabulary_size}; raise model.vocabulary_size to the tokenizer's"
                )
        return self.look_up(tokens, None, tape)


def scaled(rows: Tensor, scale: float) -> Tensor:
    """Return the rows times a factor that is first rounded to their dtype."""
    return rows if scale == 1 else rows * _rounded(scale, rows.dtype)


@constant_when_compiled
def _rounded(number: float, dtype: torch.dtype) -> float:
    return torch.tensor(number, dtype=dtype).item()


class LearnedVectors(_Table, OnShards):
    """One learned vector per position, or per token type, which says to which of a sample's two parts a token
    belongs."""

    partial = ("weight",)

    def forward(self, positions: Tensor, document_starts: Tensor | None, tape: SplitTape | None) -> Tensor:
        """Return vectors [..., s, h] for `positions` int64 [..., s]; [b, s, h] if positions count from
        `document_starts`.

        Under sequence parallelism, only the vectors of this rank's tokens.
        """
        starts = None if document_starts is None else own_tokens(document_starts, self.sequence)
        return self.look_up(own_tokens(positions, self.sequence), starts, tape)


def inverse_frequencies(channels: int, theta: float, scaling: RopeScaling, num_tokens: int) -> Tensor:
    """Return the radians per position of each channel pair, float64 [channels / 2], in sequences of num_tokens tokens.

    Pair i has theta^(-2i/d) (2104.09864, section 3.2.2). `linear` divides all frequencies by the factor (Chen et al.
    2023, 2306.15595). `llama3` divides the frequencies of wavelengths above original_length / low_frequency_factor,
    keeps those of wavelengths below original_length / high_frequency_factor and interpolates between (Llama 3.1's
    published configuration). `dynamic` (NTK-aware) and `yarn` (Peng et al. 2023, 2309.00071, sections 3.1 to 3.3) and
    `longrope` (Ding et al. 2024, 2402.13753) have the formulas of transformers' ROPE_INIT_FUNCTIONS.
    """
    if scaling.kind == "dynamic":
        longer = max(num_tokens, scaling.original_length) / scaling.original_length
        theta *= (scaling.factor * longer - (scaling.factor - 1)) ** (channels / (channels - 2))
    frequencies = theta ** (-torch.arange(0, channels, 2, dtype=torch.float64, device="cpu") / channels)
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "longrope":
        factors = scaling.long_factor if num_tokens > scaling.original_length else scaling.short_factor
        return frequencies / torch.tensor(factors, dtype=torch.float64, device="cpu")
    if scaling.kind == "llama3":
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        turns = scaling.original_length * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    elif scaling.kind == "yarn":
        kept = _kept_by_yarn(channels, theta, scaling)
    else:
        return frequencies
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def _kept_by_yarn(channels: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Return the fraction of each pair's frequency that is not stretched, float64 [channels / 2]: it falls linearly
    from the pair that rotates beta_fast times within original_length to the pair that rotates beta_slow times."""

    def pair(turns: float) -> float:
        return channels * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, channels - 1)
    length = 0.001 if first == last else last - first
    pairs = torch.arange(channels // 2, dtype=torch.float64, device="cpu")
    return 1.0 - ((pairs - first) / length).clamp(0.0, 1.0)


def attention_factor(scaling: RopeScaling) -> float:
    """Return the factor of cosines and sines, by default the one that transformers' ROPE_INIT_FUNCTIONS infer from the
    scaling's factor (YaRN, section 3.4; LongRoPE, section 3.3)."""
    if scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    growth = math.log(scaling.factor)
    if scaling.kind == "longrope":
        return math.sqrt(1 + growth / math.log(scaling.original_length))
    if scaling.mscale and scaling.mscale_all_dim:
        return (0.1 * scaling.mscale * growth + 1) / (0.1 * scaling.mscale_all_dim * growth + 1)
    return 0.1 * growth + 1


class RotaryAngles:
    """Cosines and sines of a model's rotary positions, which its layers may share."""

    def __init__(self, model: ModelConfig) -> None:
        fields = vars(model.rope_scaling).items()
        scaling = ((name, tuple(value) if isinstance(value, list) else value) for name, value in fields)
        self._key = (model.rotary_dim, model.rope_theta, *scaling)

    def tables(self, num_tokens: int, like: Tensor, share: Share | None = None) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [s, rotary_dim / 2] of s = num_tokens tokens, or of this rank's part of them, times
        the attention factor.

        On the device of `like`, in fp32 (fp64 for fp64).
        """
        held = () if share is None else (share.order, share.rank, share.size)
        return _tables(self._key, num_tokens, wide_dtype(like), like.device, *held)


@constant_when_compiled
def _tables(
    key: tuple, num_tokens: int, dtype: torch.dtype, device: torch.device, *share: Any
) -> tuple[Tensor, Tensor]:
    return _cached_tables(key, num_tokens, dtype, device, *share)


@functools.lru_cache(maxsize=16)
def _cached_tables(
    key: tuple, num_tokens: int, dtype: torch.dtype, device: torch.device, *share: Any
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of all tokens, or of those that a rank holds. share: the fields of a `Share`, or none."""
    # Tensors that are created in inference mode cannot be used in training.
    with torch.inference_mode(False):
        if share:
            numbers = torch.from_numpy(Share(*share).numbers(num_tokens)).to(device)
            cosine, sine = _cached_tables(key, num_tokens, dtype, device)
            return cosine[numbers], sine[numbers]
        channels, theta, *fields = key
        scaling = RopeScaling(**dict(fields))
        positions = torch.arange(num_tokens, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, inverse_frequencies(channels, theta, scaling, num_tokens))
        factor = attention_factor(scaling)
        return (angles.cos() * factor).to(device, dtype), (angles.sin() * factor).to(device, dtype)


def rotated(x: Tensor, cosine: Tensor, sine: Tensor, kernels: Registry, *, own_positions: bool = False) -> Tensor:
    """Rotate the first 2 r channels of x [b, s, kv groups, heads, d] by the angles of cosine and sine [s, r].

    own_positions: every token of every sample has its own angles, [b x s, r].
    """
    batch, length, groups, heads, width = x.shape
    channels = 2 * cosine.shape[-1]
    turned = x if channels == width else x[..., :channels]
    # The op supports one table of angles for all samples, so samples with their own angles are passed as one long
    # sample.
    rows = turned.reshape(1 if own_positions else batch, -1, groups * heads, channels)
    turned = kernels.pick("rotary", rows).apply(rows, cosine, sine).view(batch, length, groups, heads, channels)
    return turned if channels == width else torch.cat([turned, x[..., channels:]], dim=-1)
