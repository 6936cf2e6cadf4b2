"""Launches that the PTX interpreter runs: one for each specimen, with the same machine code at a small size, and
others at odd sizes. Each has its results in float64 and the bytes that it has to move."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernel_speed_contest.case import Size
from benchmarks.kernel_speed_contest.cases import CASES as RACES
from megapipe.kernels.reference import attention as reference_attention
from megapipe.kernels.reference import dropout as reference_dropout
from megapipe.kernels.reference import optimizer as reference_optimizer
from megapipe.kernels.reference.optimizer import BLOCK, Elements
from megapipe.kernels.triton_backend import cross_entropy as triton_cross_entropy
from megapipe.kernels.triton_backend import norms_backward as triton_norms_backward
from megapipe.kernels.triton_backend.launch import RESIDENT, RESIDENT_UNALIGNED, Launch, stays_on_chip
from megapipe.kernels.triton_backend.tiles import tile_of
from tests.kernels import specimens
from tests.kernels.specimens import BF16, FP32, UPDATE

FP16 = torch.float16
ROWS = 16

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
    launch = partial(specimens.norm, rows, width, center, add, dtype, parameters)
    return Case(name, launch, ("y", "total", "mean", "rstd"), results, large, moved)


def _norm_backward(
    name: str,
    rows: int,
    width: int,
    center: bool,
    residual: bool,
    kind: str,
    dtype: torch.dtype,
    group: int | None = None,
) -> Case:
    """kind, group: as in `specimens.norm_gradients`."""

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
    launch = partial(specimens.norm_gradients, rows, width, center, residual, kind, dtype, group)
    return Case(name, launch, ("dx", "weight_parts", "bias_parts"), results, large, moved)


def _sum_of_parts(name: str, num_parts: int, width: int, dtype: torch.dtype) -> Case:
    def results(before: SimpleNamespace, after: SimpleNamespace) -> Pairs:
        exact = before.parts.sum(1)
        return {"weight": (after.weight_gradient, exact[0]), "bias": (after.bias_gradient, exact[1])}

    moved = _tensors(2 * num_parts, width, FP32, 1)
    launch = partial(specimens.sum_of_parts, num_parts, width, dtype)
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
    launch = partial(specimens.softmax, rows, keys, causal, masked, dtype, window, queries, heads)
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
    def results(before: SimpleNamespace, after: SimpleNamespace) -> Pairs:
        y, dy = before.y, before.dy
        return {"dx": (after.dx, 0.125 * y * (dy - (y * dy).sum(-1, keepdim=True)))}

    resident = stays_on_chip(keys, RESIDENT, RESIDENT_UNALIGNED)
    work = declared("softmax, plain", rows, keys, dtype, backward=True)
    moved = _tensors(rows, keys, dtype, 3, work, 0 if resident else 2)
    launch = partial(specimens.softmax_gradient, rows, keys, dtype)
    return Case(name, launch, ("dx",), results, ("dy", "y", "dx"), moved)


# Cross entropy


def _cross_entropy(name: str, kind: str, rows: int, width: int, dtype: torch.dtype, stored: int = 16) -> Case:
    """The first `rows` of `stored` rows. kind: `statistics`, `whole rows`, or `gradient`."""

    def launch() -> Launch:
        grid = tile_of(width, dtype).grid(rows, width) if kind == "gradient" else (rows,)
        return replace(specimens.loss(kind, stored, width, dtype), grid=grid)

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
    launch = partial(specimens.dropout_residual, rows, width, form, dtype)
    return Case(name, launch, ("y",), results, large, moved)


def _dropout(name: str, shape: tuple[int, ...], dtype: torch.dtype, programs: int | None = None) -> Case:
    """[b, s, h] like hidden states, or [b, heads, q, k] like attention weights; `programs` of it."""

    def launch() -> Launch:
        made = specimens.dropouts(shape, dtype)
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
    launch = partial(specimens.gelu, rows, width, approximate, bias, backward, dtype)
    return Case(name, launch, ("y", "dx"), results, ("dy", "x", "dx") if backward else ("x", "y"), moved)


def _swiglu(name: str, rows: int, width: int, backward: bool, dtype: torch.dtype) -> Case:
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
    launch = partial(specimens.swiglu, rows, width, backward, dtype)
    return Case(name, launch, ("y", "dgate_up"), results, large, moved)


def _rotary(name: str, tokens: int, heads: int, width: int, forward: bool, dtype: torch.dtype) -> Case:
    """Queries as a view of a joint tensor of half as many heads more."""

    def results(before: SimpleNamespace, after: SimpleNamespace) -> Pairs:
        sine = before.sine * (1 if forward else -1)
        cosine = before.cosine.unsqueeze(-2)
        exact = reference_attention._rotate(before.x, cosine, sine.unsqueeze(-2))
        return {"y": (after.y, exact)}

    rows = 2 * tokens
    work = declared("rotary", rows, heads * width, dtype, backward=not forward)
    moved = _tensors(rows, heads * width, dtype, 2, work)
    launch = partial(specimens.rotary, tokens, heads, width, forward, dtype)
    return Case(name, launch, ("y",), results, ("x", "y"), moved)


# Flat buffers


def _adamw(name: str, count: int, moments: torch.dtype, parameter: torch.dtype | None, flags: bool) -> Case:
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
    launch = partial(specimens.adamw, count, moments, parameter, flags)
    return Case(name, launch, ("parameter",), results, large, Bytes(size, size, work))


def _gradient_norm(name: str, count: int, dtype: torch.dtype) -> Case:
    def results(before: SimpleNamespace, after: SimpleNamespace) -> Pairs:
        squares = before.values.square()
        return {"sums": (after.sums, torch.stack([part.sum() for part in squares.split(BLOCK)]))}

    work = declared("gradient_norm, fp32", 1, count, FP32) * dtype.itemsize // FP32.itemsize
    moved = _tensors(1, count, dtype, 1, work)
    launch = partial(specimens.gradient_norm, count, dtype)
    return Case(name, launch, ("sums",), results, ("values",), moved, slack=1e-14)


def _rounding(name: str, count: int, key: int, elements: Elements) -> Case:
    def results(before: SimpleNamespace, after: SimpleNamespace) -> Pairs:
        exact = torch.empty(count, dtype=BF16)
        reference_optimizer.stochastic_rounding(exact, before.source.float(), key, elements)
        return {"target": (after.target.view(BF16), exact.double())}

    work = declared("stochastic_rounding, fp32 to bf16", 1, count, FP32)
    launch = partial(specimens.rounding, count, key, elements)
    return Case(name, launch, ("target",), results, ("source", "target"), Bytes(6 * count, 6 * count, work), slack=0.0)


def _specimen_cases() -> list[Case]:
    """Return cases of each specimen's machine code at a small size."""
    cases = []
    for name, (width, center, add) in specimens.NORMS.items():
        cases.append(_norm_forward(name, ROWS, width, center, add, BF16, FP32))
    for name, (width, center, residual) in specimens.WHOLE_GRADIENTS.items():
        cases.append(_norm_backward(name, 2 * ROWS, width, center, residual, "whole", BF16, group=16))
    for name, (width, kind) in specimens.PARTIAL_GRADIENTS.items():
        cases.append(_norm_backward(name, 2 * ROWS, width, True, True, kind, BF16, group=16))
    cases.append(_sum_of_parts("layer norm, sum of parts, 4096", 80, 4096, BF16))
    for keys, causal, masked in specimens.SOFTMAXES:
        rows = ROWS if keys <= 16384 else 3
        cases.append(_softmax_forward(specimens.softmax_name(keys, causal, masked), rows, keys, causal, masked, BF16))
        cases.append(_softmax_backward(f"softmax, backward, bf16 {keys}", rows, keys, BF16))
    for name, (kind, width, dtype) in specimens.LOSSES.items():
        cases.append(_cross_entropy(name, kind, 3, width, dtype))
    return [*cases, *_elementwise_cases(), *_flat_cases()]


def _elementwise_cases() -> Iterator[Case]:
    for name, (width, form, dtype) in specimens.RESIDUALS.items():
        yield _dropout_residual(name, ROWS, width, form, dtype)
    yield _dropout("dropout of hidden states fp32", (2, 16, 4096), FP32)
    yield _dropout("dropout of attention weights bf16", (1, 32, 16, 4096), BF16, programs=24)
    for name, (width, approximate, bias, backward, dtype) in specimens.GELUS.items():
        yield _gelu(name, ROWS, width, approximate, bias, backward, dtype)
    for name, (width, backward, dtype) in specimens.SWIGLUS.items():
        yield _swiglu(name, ROWS, width, backward, dtype)
    for name, (width, forward, dtype) in specimens.ROTARIES.items():
        yield _rotary(name, 16, 32, width, forward, dtype)


def _flat_cases() -> Iterator[Case]:
    for name, (moments, parameter) in specimens.ADAMWS.items():
        yield _adamw(name, 5008, moments, parameter, True)
    for dtype in (FP32, BF16):
        yield _gradient_norm(f"squared norm {dtype}", 69_648, dtype)
    for (name, (key, elements)), count in zip(specimens.ROUNDINGS.items(), (4144, 12_304), strict=True):
        yield _rounding(name, count, key, elements)


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
