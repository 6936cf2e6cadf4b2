"""Launches that the PTX interpreter runs: one for each specimen, with the same machine code at a small size, and
others at odd sizes. Each has its results in float64 and the bytes that it has to move."""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernel_speed_contest.case import Size
from benchmarks.kernel_speed_contest.cases import CASES as RACES
from megapipe.kernels.reference import attention as reference_attention
from megapipe.kernels.reference import dropout as reference_dropout
from megapipe.kernels.reference import optimizer as reference_optimizer
from megapipe.kernels.reference.optimizer import BLOCK, Buffers, Coefficients, Elements
from megapipe.kernels.triton_backend import activations as triton_activations
from megapipe.kernels.triton_backend import attention as triton_attention
from megapipe.kernels.triton_backend import cross_entropy as triton_cross_entropy
from megapipe.kernels.triton_backend import dropout as triton_dropout
from megapipe.kernels.triton_backend import norms as triton_norms
from megapipe.kernels.triton_backend import norms_backward as triton_norms_backward
from megapipe.kernels.triton_backend import optimizer as triton_optimizer
from megapipe.kernels.triton_backend.launch import (
    RESIDENT,
    RESIDENT_UNALIGNED,
    Launch,
    ceiling_division,
    stays_on_chip,
)
from megapipe.kernels.triton_backend.norms_backward import Operands
from megapipe.kernels.triton_backend.tiles import tile_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

Pairs = dict[str, tuple[Tensor, Tensor]]
Results = Callable[[SimpleNamespace, SimpleNamespace], Pairs]


@dataclass(frozen=True)
class Bytes:
    """Bytes of its large tensors that a launch must move.

    distinct: bytes read or written, each once. requested: by lanes, as often as they ask. declared: what the op's
    entry in the kernel benchmark says; None for a kernel that is only a part of an op. beyond: distinct bytes that no
    declaration counts, because reads end at multiples of 16 elements.
    """

    distinct: int
    requested: int
    declared: int | None
    beyond: int = 0


@dataclass(frozen=True)
class Case:
    """launch: makes it, with the same numbers each time. outputs: arguments without content before. results: arguments
    before, floats as float64, and after -> name -> (what was found, exact in float64). large: names of the tensors
    that count. slack: of the error beyond the rounding of the result, relative to its largest number."""

    name: str
    launch: Callable[[], Launch]
    outputs: tuple[str, ...]
    results: Results
    large: tuple[str, ...]
    moved: Bytes
    slack: float = 2e-6


def draw(*shape: int, dtype: torch.dtype = FP32, seed: str = "") -> Tensor:
    """Normal numbers, the same ones for the same shape and seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{shape}{seed}".encode()))
    return torch.randn(shape, generator=generator, dtype=FP32).to(dtype)


def declared(race: str, rows: int, width: int, dtype: torch.dtype, backward: bool = False) -> int:
    """Bytes of an op by the kernel benchmark: of its forward, or of what the backward adds."""
    (case,) = (case for case in RACES if case.name == race)
    forward, both = case.work(Size(rows, width), dtype.itemsize)
    return round(both.bytes - forward.bytes if backward and both else forward.bytes)


def _tensors(
    rows: int, width: int, dtype: torch.dtype, count: int, declares: int | None = None, again: int = 0
) -> Bytes:
    """`count` tensors of this size, `again` of which lanes ask for once more."""
    size = rows * width * dtype.itemsize
    return Bytes(count * size, (count + again) * size, declares)


# Norms


def _norm_forward(
    name: str, rows: int, width: int, center: bool, add: bool, dtype: torch.dtype, parameters: torch.dtype
) -> Case:
    def launch() -> Launch:
        x, residual = (draw(rows, width, dtype=dtype, seed=seed) for seed in "xr")
        weight, bias = (draw(width, dtype=parameters, seed=seed) for seed in "wb")
        y, total = torch.empty_like(x), torch.empty_like(x)
        mean, rstd = torch.empty(rows, 1), torch.empty(rows, 1)
        operands = x, residual if add else None, weight, bias if center else None
        results = y, total if add else None, mean if center else None, rstd
        return triton_norms.forward_launch(*operands, *results, 1e-5)

    def results(before: SimpleNamespace, after: SimpleNamespace) -> Pairs:
        x = before.x
        pairs: Pairs = {}
        if add:
            pairs["total"] = after.total, x + before.residual
            x = (before.x.float() + before.residual.float()).to(dtype).double()
        centered = x - x.mean(1, keepdim=True) if center else x
        rstd = (centered.square().mean(1, keepdim=True) + 1e-5).rsqrt()
        y = centered * rstd * before.weight
        if center:
            y += before.bias
            pairs["mean"] = after.mean, x.mean(1, keepdim=True)
        return pairs | {"y": (after.y, y), "rstd": (after.rstd, rstd)}

    kernel = "layer_norm" if center else "rms_norm"
    race = f"{kernel}, after a sum" if add else kernel
    again = 0 if stays_on_chip(width, RESIDENT, RESIDENT_UNALIGNED) else 1 + center
    work = declared(race, rows, width, dtype)
    moved = _tensors(rows, width, dtype, 2 * (1 + add), work, again * (1 + add))
    large = ("x", "residual", "y", "total") if add else ("x", "y")
    return Case(name, launch, ("y", "total", "mean", "rstd"), results, large, moved)


def _norm_operands(rows: int, width: int, center: bool, residual: bool, dtype: torch.dtype) -> Operands:
    dy, x, other = (draw(rows, width, dtype=dtype, seed=seed) for seed in ("dy", "x", "residual"))
    mean = x.float().mean(1, keepdim=True)
    spread = x.float() - mean if center else x.float()
    rstd = (spread.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    weight = draw(width, seed="w")
    return Operands(dy, x, other if residual else None, weight, mean if center else None, rstd)


def _norm_backward(
    name: str, rows: int, width: int, center: bool, residual: bool, kind: str, dtype: torch.dtype, **numbers: int
) -> Case:
    """kind: which gradients, of `whole`, `dx`, `weights`. numbers: arguments that a small tensor cannot have."""

    def launch() -> Launch:
        operands = _norm_operands(rows, width, center, residual, dtype)
        dx = torch.empty_like(operands.x)
        group = numbers.get("group", triton_norms_backward.RowTiling.of(operands.x).group)
        groups = ceiling_division(rows, group)
        # The bias's parts start at a multiple of 16 bytes, as they do after the weight's of a large tensor.
        parts = torch.empty(1 + center, 4 * groups, width)[:, :groups]
        wanted = None if kind == "weights" else dx, None if kind == "dx" else parts
        (made,) = triton_norms_backward.launches(operands, *wanted)
        if "group" not in made.arguments:
            return made
        values = tuple({**made.arguments, **numbers}.values())
        return replace(made, values=values, grid=(parts.shape[1], *made.grid[1:]))

    def results(before: SimpleNamespace, after: SimpleNamespace) -> Pairs:
        dy, x = before.dy, before.x
        normal = (x - before.mean if center else x) * before.rstd
        pairs: Pairs = {}
        if kind != "dx":
            parts = [slice(first, first + before.group) for first in range(0, rows, before.group)]
            pairs["weight_parts"] = after.weight_parts, torch.stack([(dy * normal)[part].sum(0) for part in parts])
            if center:
                pairs["bias_parts"] = after.bias_parts, torch.stack([dy[part].sum(0) for part in parts])
        if kind != "weights":
            scaled = dy * before.weight
            dx = scaled - normal * (scaled * normal).mean(1, keepdim=True)
            if center:
                dx -= scaled.mean(1, keepdim=True)
            dx *= before.rstd
            pairs["dx"] = after.dx, dx + (before.dx_residual if residual else 0)
        return pairs

    kernel = "layer_norm" if center else "rms_norm"
    limits = triton_norms_backward.RESIDENT, triton_norms_backward.RESIDENT_UNALIGNED
    resident = stays_on_chip(width, *limits)
    # A gradient added to the norm's is one tensor more: what the benchmark declares for a norm after a sum.
    race = f"{kernel}, after a sum" if residual else kernel
    count = 2 + (kind != "weights") * (1 + residual)
    again = 2 * (kind == "dx" and not resident)
    work = declared(race, rows, width, dtype, backward=True) if kind == "whole" else None
    moved = _tensors(rows, width, dtype, count, work, again)
    large = ("dy", "x") + (("dx",) + ("dx_residual",) * residual) * (kind != "weights")
    return Case(name, launch, ("dx", "weight_parts", "bias_parts"), results, large, moved)


def _sum_of_parts(name: str, num_parts: int, width: int, dtype: torch.dtype) -> Case:
    def launch() -> Launch:
        gradients = [torch.empty(width, dtype=dtype) for _ in range(2)]
        return triton_norms_backward.add_parts_launch(draw(2, num_parts, width), gradients)

    def results(before: SimpleNamespace, after: SimpleNamespace) -> Pairs:
        exact = before.parts.sum(1)
        return {"weight": (after.weight_gradient, exact[0]), "bias": (after.bias_gradient, exact[1])}

    moved = _tensors(2 * num_parts, width, FP32, 1)
    return Case(name, launch, ("weight_gradient", "bias_gradient"), results, ("parts",), moved)


# Softmax


def _softmax_forward(
    name: str,
    rows: int,
    keys: int,
    causal: bool,
    masked: bool,
    dtype: torch.dtype,
    window: int | None = None,
    queries: int | None = None,
    heads: int = 16,
) -> Case:
    """The first rows of heads with half as many queries as keys."""
    queries = queries or keys // 2

    def launch() -> Launch:
        shape = (1, heads, queries, keys)
        mask = (torch.arange(keys) % 7 != 3).view(1, 1, 1, keys) if masked else None
        # The launch reads shapes and strides alone.
        scores = torch.empty(1, dtype=dtype).expand(shape)
        made = triton_attention.softmax_launch(scores, mask, scores, 0.125, causal, window)
        scores, y = draw(rows, keys, dtype=dtype) * 8, torch.empty(rows, keys, dtype=dtype)
        # The first rows of a launch over more rows than there is memory for.
        numbers = {"num_rows": rows} if "num_rows" in made.arguments else {}
        values = tuple({**made.arguments, "scores": scores, "y": y, **numbers}.values())
        return replace(made, grid=(ceiling_division(rows, made.constants.get("ROWS", 1)),), values=values)

    def results(before: SimpleNamespace, after: SimpleNamespace) -> Pairs:
        visible = seen & (before.mask[0, 0, 0] != 0) if masked else seen
        scores = (before.scores * 0.125).masked_fill(~visible, -torch.inf)
        return {"y": (after.y, torch.softmax(scores, 1).nan_to_num())}

    seen = _seen(rows, queries, keys, causal, window)
    near = seen.clone()
    # Reads end at multiples of 16 keys.
    for row in range(rows):
        (places,) = torch.nonzero(seen[row], as_tuple=True)
        near[row, int(places[0]) // 16 * 16 : int(places[-1]) // 16 * 16 + 16] = True
    read, written = int(near.sum()) * dtype.itemsize, rows * keys * dtype.itemsize
    resident = stays_on_chip(keys, RESIDENT, RESIDENT_UNALIGNED)
    work, beyond = None, 0
    if not causal:
        work = declared("softmax, plain", rows, keys, dtype)
    elif queries == keys:
        # Half of the scores; on the diagonal, 16 keys at a time.
        work, beyond = declared("softmax, causal", rows, keys, dtype), rows * 16 // 2 * dtype.itemsize
    moved = Bytes(read + written, (1 if resident else 2) * read + written, work, beyond)
    return Case(name, launch, ("y",), results, ("scores", "y"), moved)


def _seen(rows: int, queries: int, keys: int, causal: bool, window: int | None) -> Tensor:
    """bool [rows, keys]: the keys of rows that are queries 0, 1, ... of a head, and the next."""
    last = (torch.arange(rows) % queries + (keys - queries)).unsqueeze(1)
    key = torch.arange(keys)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if causal:
        seen = key <= last
        if window:
            seen &= key > last - window
    return seen


def _softmax_backward(name: str, rows: int, keys: int, dtype: torch.dtype) -> Case:
    def launch() -> Launch:
        y = torch.softmax(draw(1, 1, rows, keys, seed="y") * 2, -1).to(dtype)
        return triton_attention.softmax_gradient_launch(
            draw(1, 1, rows, keys, dtype=dtype, seed="dy"), y, torch.empty_like(y), 0.125
        )

    def results(before: SimpleNamespace, after: SimpleNamespace) -> Pairs:
        y, dy = before.y, before.dy
        return {"dx": (after.dx, 0.125 * y * (dy - (y * dy).sum(-1, keepdim=True)))}

    resident = stays_on_chip(keys, RESIDENT, RESIDENT_UNALIGNED)
    work = declared("softmax, plain", rows, keys, dtype, backward=True)
    moved = _tensors(rows, keys, dtype, 3, work, 0 if resident else 2)
    return Case(name, launch, ("dx",), results, ("dy", "y", "dx"), moved)


# Cross entropy


def _cross_entropy(name: str, kind: str, rows: int, width: int, dtype: torch.dtype, stored: int = 16) -> Case:
    """The first `rows` of `stored` rows. kind: `statistics`, `whole rows`, or `gradient`."""

    def launch() -> Launch:
        logits = (draw(stored, ceiling_division(width, 64) * 64) * 3).to(dtype)[:, :width]
        columns = torch.arange(stored) * 7919 % width
        columns[1] = width - 1
        owned = torch.arange(stored) % 3 != 2
        result = torch.empty(3, stored)
        if kind == "gradient":
            total = torch.logsumexp(logits.float(), 1)
            scale = draw(stored, seed="scale")
            made = triton_cross_entropy._gradient_launch(logits, columns, owned, total, scale, logits)
            return replace(made, grid=tile_of(width, dtype).grid(rows, width))
        whole = kind == "whole rows"
        function = triton_cross_entropy._whole_row_launch if whole else triton_cross_entropy._statistics_launch
        return replace(function(logits, columns, owned, result), grid=(rows,))

    def results(before: SimpleNamespace, after: SimpleNamespace) -> Pairs:
        logits = before.logits[:rows]
        labels, own = before.columns[:rows, None], before.owned[:rows, None]
        hit = torch.zeros_like(logits).scatter_(1, labels, own.double())
        pairs: Pairs = {}
        if kind == "gradient":
            gradient = torch.exp(logits - before.log_sum_exp[:rows, None]) - hit
            return {"logits": (after.logits[:rows], gradient * before.scale[:rows, None])}
        if kind == "whole rows":
            pairs["logits"] = after.logits[:rows], torch.softmax(logits, 1) - hit
        largest = logits.max(1).values
        statistics = after.statistics[:, :rows]
        pairs["largest"] = statistics[0], largest
        pairs["total"] = statistics[1], torch.exp(logits - largest[:, None]).sum(1)
        pairs["target"] = statistics[2], (logits * hit).sum(1)
        return pairs

    size = rows * width * dtype.itemsize
    resident = width <= triton_cross_entropy.RESIDENT
    passes = {"statistics": 1, "whole rows": 2 if resident else 3, "gradient": 2}[kind]
    # Every lane of a program reads the label's logit, where the rank has it. The last columns are read by as many
    # lanes as 16 columns, or 16 of each row of a tile, leave to each.
    threads, tail = 32 * launch().num_warps, width % 16
    repeats = threads // min(threads, 16 * (tile_of(width, dtype).rows if kind == "gradient" else 1)) - 1
    labels = 0 if kind == "gradient" else threads * sum(row % 3 != 2 for row in range(rows))
    tails = 1 if kind != "whole rows" or resident else 2
    lanes = (labels + tails * rows * tail * repeats) * dtype.itemsize
    forward = declared("cross_entropy", rows, width, dtype)
    work = {"statistics": forward, "whole rows": 2 * forward, "gradient": None}[kind]
    moved = Bytes(size * (1 if kind == "statistics" else 2), passes * size + lanes, work)
    return Case(name, launch, ("statistics",), results, ("logits",), moved)


# Elementwise


def _dropout_residual(name: str, rows: int, width: int, form: str, dtype: torch.dtype) -> Case:
    """form: `plain`, `bias`, or `backward`."""

    def launch() -> Launch:
        x, residual = (draw(rows, width, dtype=dtype, seed=seed) for seed in "xr")
        bias = draw(width, dtype=dtype, seed="b") if form == "bias" else None
        keys = torch.arange(rows, dtype=torch.int32) * 77_777_777
        y = torch.empty_like(x)
        other = None if form == "backward" else residual
        return triton_dropout._bias_dropout_residual_launch(x, bias, other, keys, y, 0.1)

    def results(before: SimpleNamespace, after: SimpleNamespace) -> Pairs:
        channels = torch.arange(width, dtype=torch.int32)
        keep = reference_dropout.keep_mask(before.keys[:, None], channels, 0.1)
        x = before.x + (before.bias if form == "bias" else 0)
        exact = x * keep / 0.9
        return {"y": (after.y, exact if form == "backward" else exact + before.residual)}

    backward = form == "backward"
    work = declared("bias_dropout_residual", rows, width, dtype, backward=backward)
    moved = _tensors(rows, width, dtype, 2 if backward else 3, work)
    large = ("x", "y") if backward else ("x", "residual", "y")
    return Case(name, launch, ("y",), results, large, moved)


def _dropout(name: str, shape: tuple[int, ...], dtype: torch.dtype, programs: int | None = None) -> Case:
    """[b, s, h] like hidden states, or [b, heads, q, k] like attention weights; `programs` of it."""

    def launch() -> Launch:
        x = draw(*shape, dtype=dtype)
        batch, heads, tokens, width = shape if len(shape) == 4 else (shape[0], 1, *shape[1:])
        keys = torch.arange(batch * tokens, dtype=torch.int32).view(batch, 1, tokens, 1) * 7_654_321
        channels = torch.arange(heads * width, dtype=torch.int32).view(heads, 1, width)
        if len(shape) == 3:
            keys, channels = keys[:, 0], channels[0, 0]
        made = triton_dropout._dropout_launch(x, keys, channels, torch.empty_like(x), 0.1)
        return made if programs is None else replace(made, grid=(programs,))

    width = shape[-1]
    rows = math.prod(shape[:-1]) if programs is None else programs * tile_of(width, dtype).rows

    def results(before: SimpleNamespace, after: SimpleNamespace) -> Pairs:
        keep = reference_dropout.keep_mask(before.keys, before.channels, 0.1).reshape(-1, width)[:rows]
        x = before.x.reshape(-1, width)[:rows]
        return {"y": (after.y.reshape(-1, width)[:rows], x * keep / 0.9)}

    moved = _tensors(rows, width, dtype, 2, declared("dropout", rows, width, dtype))
    return Case(name, launch, ("y",), results, ("x", "y"), moved)


def _gelu(name: str, rows: int, width: int, approximate: str, bias: bool, backward: bool, dtype: torch.dtype) -> Case:
    def launch() -> Launch:
        x, dy = (draw(rows, width, dtype=dtype, seed=seed) * 2 for seed in ("x", "dy"))
        added = draw(width, dtype=dtype, seed="b") if bias else None
        if backward:
            return triton_activations._gelu_backward_launch(dy, x, added, torch.empty_like(x), approximate)
        return triton_activations._gelu_forward_launch(x, added, torch.empty_like(x), approximate)

    def results(before: SimpleNamespace, after: SimpleNamespace) -> Pairs:
        x = before.x + (before.bias if bias else 0)
        x.requires_grad_()
        y = functional.gelu(x, approximate=approximate)
        if not backward:
            return {"y": (after.y, y.detach())}
        (dx,) = torch.autograd.grad(y, x, before.dy)
        return {"dx": (after.dx, dx)}

    race = "bias_gelu" if bias else "gelu"
    work = declared(race, rows, width, dtype, backward=backward)
    moved = _tensors(rows, width, dtype, 2 + backward, work)
    return Case(name, launch, ("y", "dx"), results, ("dy", "x", "dx") if backward else ("x", "y"), moved)


def _swiglu(name: str, rows: int, width: int, backward: bool, dtype: torch.dtype) -> Case:
    def launch() -> Launch:
        gate_up, dy = draw(rows, 2 * width, dtype=dtype), draw(rows, width, dtype=dtype, seed="dy")
        if backward:
            return triton_activations._swiglu_backward_launch(dy, gate_up, torch.empty_like(gate_up))
        return triton_activations._swiglu_forward_launch(gate_up, torch.empty_like(dy))

    def results(before: SimpleNamespace, after: SimpleNamespace) -> Pairs:
        both = before.gate_up.requires_grad_()
        gate, up = both.chunk(2, -1)
        y = functional.silu(gate) * up
        if not backward:
            return {"y": (after.y, y.detach())}
        (exact,) = torch.autograd.grad(y, both, before.dy)
        return {"dgate_up": (after.dgate_up, exact)}

    work = declared("swiglu", rows, width, dtype, backward=backward)
    moved = _tensors(rows, width, dtype, 5 if backward else 3, work)
    large = ("dy", "gate_up", "dgate_up") if backward else ("gate_up", "y")
    return Case(name, launch, ("y", "dgate_up"), results, large, moved)


def _rotary(name: str, tokens: int, heads: int, width: int, forward: bool, dtype: torch.dtype) -> Case:
    """Queries as a view of a joint tensor of half as many heads more."""

    def launch() -> Launch:
        x = draw(2, tokens, heads * 3 // 2, width, dtype=dtype)[:, :, :heads]
        angles = draw(tokens, width // 2, seed="angles") * 3
        y = torch.empty(2, tokens, heads, width, dtype=dtype)
        return triton_attention._rotary_launch(x, angles.cos(), angles.sin(), y, forward)

    def results(before: SimpleNamespace, after: SimpleNamespace) -> Pairs:
        sine = before.sine * (1 if forward else -1)
        cosine = before.cosine.unsqueeze(-2)
        exact = reference_attention._rotate(before.x, cosine, sine.unsqueeze(-2))
        return {"y": (after.y, exact)}

    rows = 2 * tokens
    work = declared("rotary", rows, heads * width, dtype, backward=not forward)
    moved = _tensors(rows, heads * width, dtype, 2, work)
    return Case(name, launch, ("y",), results, ("x", "y"), moved)


# Flat buffers

UPDATE = Coefficients(step=2, learning_rate=1e-3, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1)


def _adamw(name: str, count: int, moments: torch.dtype, parameter: torch.dtype | None, flags: bool) -> Case:
    def launch() -> Launch:
        tensors: dict[str, Tensor | None] = {
            "master": draw(count),
            "gradient": draw(count, seed="g"),
            "parameter": None if parameter is None else torch.empty(count, dtype=parameter),
            "first": draw(count, seed="m").to(moments) * 0.1,
            "second": draw(count, seed="v").abs().to(moments) * 0.1,
            "gradient_scale": torch.tensor([0.5]) if flags else None,
            "skip": torch.zeros(1) if flags else None,
        }
        return triton_optimizer._adamw_launch(Buffers(**tensors), UPDATE)

    def results(before: SimpleNamespace, after: SimpleNamespace) -> Pairs:
        # The kernel gets its numbers in fp32.
        factors = [UPDATE.decay, UPDATE.beta2, 1 - UPDATE.beta1, 1 - UPDATE.beta2]
        factors += [UPDATE.step_size, UPDATE.root_correction, UPDATE.epsilon]
        decay, beta2, take_first, take_second, step_size, root, epsilon = torch.tensor(factors, dtype=FP32).double()
        gradient = before.gradient * (0.5 if flags else 1)
        first = before.first + take_first * (gradient - before.first)
        second = beta2 * before.second + take_second * gradient * gradient
        master = before.master * decay - step_size * first / (second.sqrt() / root + epsilon)
        pairs = {"master": (after.master, master), "first": (after.first, first), "second": (after.second, second)}
        if parameter is not None:
            pairs["parameter"] = after.parameter, master
        return pairs

    copy = 0 if parameter is None else parameter.itemsize
    size = count * (4 * 3 + 2 * 2 * moments.itemsize + copy)
    # The benchmark's update has moments in fp32, each read and written, and a copy in bf16.
    work = declared("adamw, fp32, bf16 copy", 1, count, FP32) - count * (2 * 2 * (4 - moments.itemsize) + 2 - copy)
    large = ("master", "gradient", "first", "second", "parameter")
    return Case(name, launch, ("parameter",), results, large, Bytes(size, size, work))


def _gradient_norm(name: str, count: int, dtype: torch.dtype) -> Case:
    def launch() -> Launch:
        sums = torch.empty(ceiling_division(count, BLOCK), dtype=torch.float64)
        return triton_optimizer._gradient_norm_launch(draw(count, dtype=dtype), sums)

    def results(before: SimpleNamespace, after: SimpleNamespace) -> Pairs:
        squares = before.values.square()
        return {"sums": (after.sums, torch.stack([part.sum() for part in squares.split(BLOCK)]))}

    work = declared("gradient_norm, fp32", 1, count, FP32) * dtype.itemsize // FP32.itemsize
    moved = _tensors(1, count, dtype, 1, work)
    return Case(name, launch, ("sums",), results, ("values",), moved, slack=1e-14)


def _rounding(name: str, count: int, key: int, elements: Elements) -> Case:
    def launch() -> Launch:
        return triton_optimizer._stochastic_rounding_launch(torch.empty(count, dtype=BF16), draw(count), key, elements)

    def results(before: SimpleNamespace, after: SimpleNamespace) -> Pairs:
        exact = torch.empty(count, dtype=BF16)
        reference_optimizer.stochastic_rounding(exact, before.source.float(), key, elements)
        return {"target": (after.target.view(BF16), exact.double())}

    work = declared("stochastic_rounding, fp32 to bf16", 1, count, FP32)
    return Case(name, launch, ("target",), results, ("source", "target"), Bytes(6 * count, 6 * count, work), slack=0.0)


def _specimen_cases() -> list[Case]:
    """Return cases of each specimen's machine code at a small size."""
    rows = 16
    cases = []
    for width, center, add in triton_norms._SHAPES:
        name = f"{'add and ' if add else ''}{'layer' if center else 'rms'} norm, forward, bf16 {width}"
        cases.append(_norm_forward(name, rows, width, center, add, BF16, FP32))
    group = {"group": 16}
    norms = [(768, True, True), (4096, True, False), (4096, False, True), (8192, True, True), (2047, True, True)]
    for width, center, residual in norms:
        name = f"{'layer' if center else 'rms'} norm, backward, bf16 {width}"
        cases.append(_norm_backward(name, 2 * rows, width, center, residual, "whole", BF16, **group))
    for width in (4096, 16384):
        for kind in ("dx", "weights"):
            name = f"layer norm, {kind} alone, bf16 {width}"
            cases.append(_norm_backward(name, 2 * rows, width, True, True, kind, BF16, **group))
    cases.append(_sum_of_parts("layer norm, sum of parts, 4096", 80, 4096, BF16))
    lengths = [(512, False, True), (2048, True, False), (16384, True, True), (65536, True, True), (8191, True, True)]
    for keys, causal, masked in lengths:
        name = f"softmax, {'causal ' if causal else ''}{'masked ' if masked else ''}forward, bf16 {keys}"
        cases.append(_softmax_forward(name, rows if keys <= 16384 else 3, keys, causal, masked, BF16))
        cases.append(_softmax_backward(f"softmax, backward, bf16 {keys}", rows if keys <= 16384 else 3, keys, BF16))
    for width, dtype in ((50257, BF16), (12573, BF16), (12576, FP32), (16384, BF16), (128256, BF16)):
        for kind in ("statistics", "whole rows", "gradient"):
            label = "bf16" if dtype == BF16 else "fp32"
            cases.append(_cross_entropy(f"{kind} {label} {width}", kind, 3, width, dtype))
    cases += [
        _dropout_residual("dropout residual fp32 768", rows, 768, "plain", FP32),
        _dropout_residual("bias dropout residual bf16 8192", rows, 8192, "bias", BF16),
        _dropout_residual("dropout backward bf16 8192", rows, 8192, "backward", BF16),
        _dropout("dropout of hidden states fp32", (2, 16, 4096), FP32),
        _dropout("dropout of attention weights bf16", (1, 32, 16, 4096), BF16, programs=24),
        _gelu("gelu tanh fp32 3072", rows, 3072, "tanh", False, False, FP32),
        _gelu("bias gelu erf bf16 16384", rows, 16384, "none", True, False, BF16),
        _gelu("gelu erf backward fp32", rows, 3072, "none", False, True, FP32),
        _gelu("bias gelu tanh backward", rows, 16384, "tanh", True, True, BF16),
        _swiglu("swiglu fp32 2816", rows, 2816, False, FP32),
        _swiglu("swiglu bf16 14336", rows, 14336, False, BF16),
        _swiglu("swiglu backward fp32 2816", rows, 2816, True, FP32),
        _swiglu("swiglu backward bf16 14336", rows, 14336, True, BF16),
        _rotary("rotary torch.bfloat16 128", 16, 32, 128, True, BF16),
        _rotary("rotary torch.bfloat16 80", 16, 32, 80, False, BF16),
        _rotary("rotary torch.float32 64", 16, 32, 64, True, FP32),
        _adamw("adamw fp32", 5008, FP32, None, True),
        _adamw("adamw bf16 moments and parameters", 5008, BF16, BF16, True),
        _gradient_norm("squared norm torch.float32", 69_648, FP32),
        _gradient_norm("squared norm torch.bfloat16", 69_648, BF16),
        _rounding("stochastic rounding", 4144, 0x9E3779B9, Elements(0, 1 << 26, 1 << 26)),
        _rounding("stochastic rounding of columns", 12_304, 0x1E3779B9, Elements(1 << 12, 1 << 12, 1 << 15)),
    ]
    return cases


def _odd_cases() -> list[Case]:
    """Sizes that end within a tile, and the dtypes that no specimen has."""
    return [
        _norm_forward("odd: layer norm bf16 5 x 1000", 5, 1000, True, False, BF16, BF16),
        _norm_forward("odd: add and rms norm fp16 3 x 333", 3, 333, False, True, FP16, FP16),
        _norm_forward("odd: layer norm fp16 5 x 99", 5, 99, True, False, FP16, FP32),
        _norm_forward("odd: layer norm fp32 2 x 9001", 2, 9001, True, False, FP32, FP32),
        _norm_backward("odd: layer norm, backward, fp16 7 x 333", 7, 333, True, False, "whole", FP16),
        _norm_backward("odd: rms norm, dx alone, fp32 3 x 9001", 3, 9001, False, True, "dx", FP32),
        _sum_of_parts("odd: sum of parts 3 x 77", 3, 77, FP32),
        _softmax_forward("odd: softmax fp16 5 x 77, window", 25, 77, True, True, FP16, window=9, queries=5, heads=5),
        _softmax_forward("odd: softmax fp32 9001, window", 3, 9001, True, False, FP32, window=999, queries=9, heads=1),
        _softmax_forward("odd: softmax fp32 9001, masked", 3, 9001, False, True, FP32, queries=3, heads=1),
        _softmax_forward("odd: softmax, causal, fp16 2 x 80 x 80", 160, 80, True, False, FP16, queries=80, heads=2),
        _softmax_backward("odd: softmax, backward, fp32 5 x 77", 5, 77, FP32),
        _softmax_backward("odd: softmax, backward, fp32 3 x 9001", 3, 9001, FP32),
        _cross_entropy("odd: statistics fp16 100", "statistics", 5, 100, FP16, stored=5),
        _cross_entropy("odd: whole rows fp32 333", "whole rows", 5, 333, FP32, stored=5),
        _cross_entropy("odd: gradient fp16 5001", "gradient", 5, 5001, FP16, stored=5),
        _cross_entropy("odd: gradient of short rows fp32 48", "gradient", 5, 48, FP32, stored=5),
        _dropout_residual("odd: bias dropout residual fp16 5 x 130", 5, 130, "bias", FP16),
        _dropout("odd: dropout of attention weights fp16", (2, 3, 5, 33), FP16),
        _gelu("odd: bias gelu erf backward fp16 3 x 999", 3, 999, "none", True, True, FP16),
        _swiglu("odd: swiglu backward fp16 5 x 77", 5, 77, True, FP16),
        _rotary("odd: rotary fp16 6", 3, 2, 6, True, FP16),
        _rotary("odd: rotary backward fp16 6", 3, 2, 6, False, FP16),
        _adamw("odd: adamw with a bf16 copy 1001", 1001, FP32, BF16, False),
        _gradient_norm("odd: squared norm fp16 1001", 1001, FP16),
        _rounding("odd: stochastic rounding of columns 1001", 1001, 7, Elements(3, 10, 25, 4)),
    ]


SPECIMEN_CASES = {case.name: case for case in _specimen_cases()}
ODD_CASES = {case.name: case for case in _odd_cases()}
CASES: Mapping[str, Case] = SPECIMEN_CASES | ODD_CASES
