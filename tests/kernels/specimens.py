"""Launches of every Triton kernel.

Specimens are launches at real sizes, compiled without a GPU to inspect their machine code. Their tensors are on the
meta device, so they may be as large as in training. tests/ptx executes the same machine code at small sizes.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megapipe.kernels.reference.optimizer import BLOCK, Buffers, Coefficients, Elements
from megapipe.kernels.triton_backend import activations, attention, cross_entropy, dropout, norms, optimizer
from megapipe.kernels.triton_backend import norms_backward as backwards
from megapipe.kernels.triton_backend.launch import RESIDENT, RESIDENT_UNALIGNED, Launch, ceiling_division
from tests.kernels.launches import arguments

BF16, FP32 = torch.bfloat16, torch.float32
ROWS, ELEMENTS = 8192, 1 << 26
"""Rows of a specimen's tensors, and elements of its flat buffers."""


@dataclass(frozen=True)
class Specimen:
    """A launch and the properties that its machine code must have.

    loads, stores: how many tensors are read and written by 128-bit instructions. Gathers, masks, statistics and
    other short tensors do not count.
    """

    name: str
    launch: Launch
    loads: int
    stores: int


def draw(*shape: int, dtype: torch.dtype = FP32, seed: str = "") -> Tensor:
    """Normal numbers, the same ones for the same shape and seed."""
    if torch.get_default_device().type == "meta":
        return torch.empty(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{shape}{seed}".encode()))
    return torch.randn(shape, generator=generator, dtype=FP32).to(dtype)


def specimens() -> list[Specimen]:
    """Return launches of every kernel, for sizes of small and large models."""
    with torch.device("meta"):
        return [*_norm_specimens(), *_softmax_specimens(), *_loss_specimens(), *_elementwise(), *_flat()]


def _norm_specimens() -> Iterator[Specimen]:
    for name, (width, center, add) in NORMS.items():
        yield _aligned(name, norm(ROWS, width, center, add), 2 + center + add, 1 + add)
    for name, (width, center, residual) in WHOLE_GRADIENTS.items():
        whole = norm_gradients(ROWS, width, center, residual)
        yield _aligned(name, whole, 3 + residual, 2 + center)
    for name, (width, kind) in PARTIAL_GRADIENTS.items():
        loads, stores = (4, 1) if kind == "dx" else (2, 2)
        yield Specimen(name, norm_gradients(ROWS, width, True, True, kind), loads, stores)
    yield Specimen("layer norm, sum of parts, 4096", sum_of_parts(256, 4096, BF16), loads=1, stores=0)


def _softmax_specimens() -> Iterator[Specimen]:
    for keys, causal, masked in SOFTMAXES:
        yield _aligned(softmax_name(keys, causal, masked), softmax(16 * keys, keys, causal, masked), 1 + masked, 1)
        yield _aligned(f"softmax, backward, bf16 {keys}", softmax_gradient(16 * keys, keys), 2, 1)


def _aligned(name: str, launch: Launch, loads: int, stores: int) -> Specimen:
    """Return a specimen whose rows are read and written in short pieces if their width is not a multiple of 16."""
    *_, width = launch.values[0].shape
    return Specimen(name, launch, loads, stores) if width % 16 == 0 else Specimen(name, launch, 0, 0)


def _loss_specimens() -> Iterator[Specimen]:
    for name, (kind, width, dtype) in LOSSES.items():
        loads = 2 if kind == "whole rows" and width > cross_entropy.RESIDENT else 1
        yield Specimen(name, loss(kind, ROWS, width, dtype), loads, stores=int(kind != "statistics"))


def _elementwise() -> Iterator[Specimen]:
    for name, (width, form, dtype) in RESIDUALS.items():
        loads = {"plain": 2, "bias": 3, "backward": 1}[form]
        yield Specimen(name, dropout_residual(ROWS, width, form, dtype), loads, stores=1)
    yield Specimen("dropout of hidden states fp32", dropouts((2, 4096, 4096), FP32), loads=2, stores=1)
    yield Specimen("dropout of attention weights bf16", dropouts((2, 32, 4096, 4096), BF16), loads=2, stores=1)
    for name, (width, approximate, bias, backward, dtype) in GELUS.items():
        yield Specimen(name, gelu(ROWS, width, approximate, bias, backward, dtype), 1 + bias + backward, stores=1)
    for name, (width, backward, dtype) in SWIGLUS.items():
        yield Specimen(name, swiglu(ROWS, width, backward, dtype), 2 + backward, 1 + backward)
    for name, (width, forward, dtype) in ROTARIES.items():
        yield Specimen(name, rotary(4096, 32, width, forward, dtype), loads=4, stores=2)


def _flat() -> Iterator[Specimen]:
    for name, (moments, parameter) in ADAMWS.items():
        yield Specimen(name, adamw(ELEMENTS, moments, parameter, True), loads=4, stores=3 + (parameter is not None))
    for dtype in (FP32, BF16):
        yield Specimen(f"squared norm {dtype}", gradient_norm(ELEMENTS, dtype), loads=1, stores=0)
    for name, (key, elements) in ROUNDINGS.items():
        yield Specimen(name, rounding(ELEMENTS, key, elements), loads=1, stores=1)


# Norms, at sizes of a small and a typical model, for the longest rows that stay in registers, and for chunks

NORMS = {
    f"{'add and ' if add else ''}{'layer' if center else 'rms'} norm, forward, bf16 {width}": (width, center, add)
    for width, center, add in (
        (768, True, True),
        (4096, True, False),
        (4096, False, True),
        (RESIDENT, True, True),
        (2 * RESIDENT, True, True),
        (RESIDENT_UNALIGNED - 1, True, True),
    )
}
WHOLE_GRADIENTS = {
    f"{'layer' if center else 'rms'} norm, backward, bf16 {width}": (width, center, residual)
    for width, center, residual in (
        (768, True, True),
        (4096, True, False),
        (4096, False, True),
        (backwards.RESIDENT, True, True),
        (backwards.RESIDENT_UNALIGNED - 1, True, True),
    )
}
PARTIAL_GRADIENTS = {
    f"layer norm, {kind} alone, bf16 {width}": (width, kind)
    for width in (4096, 2 * backwards.RESIDENT)
    for kind in ("dx", "weights")
}


def norm(
    rows: int, width: int, center: bool, add: bool, dtype: torch.dtype = BF16, parameters: torch.dtype = FP32
) -> Launch:
    x, residual = (draw(rows, width, dtype=dtype, seed=seed) for seed in "xr")
    weight, bias = (draw(width, dtype=parameters, seed=seed) for seed in "wb")
    y, total = torch.empty_like(x), torch.empty_like(x)
    mean, rstd = torch.empty(rows, 1), torch.empty(rows, 1)
    operands = x, residual if add else None, weight, bias if center else None
    results = y, total if add else None, mean if center else None, rstd
    return norms.forward_launch(*operands, *results, 1e-5)


def norm_gradients(
    rows: int,
    width: int,
    center: bool,
    residual: bool,
    kind: str = "whole",
    dtype: torch.dtype = BF16,
    group: int | None = None,
) -> Launch:
    """kind: which gradients, of `whole`, `dx`, `weights`. group: rows of a part, which a small tensor cannot have."""
    dy, x, other = (draw(rows, width, dtype=dtype, seed=seed) for seed in ("dy", "x", "residual"))
    mean = x.float().mean(1, keepdim=True)
    spread = x.float() - mean if center else x.float()
    rstd = (spread.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    weight = draw(width, seed="w")
    operands = backwards.Operands(dy, x, other if residual else None, weight, mean if center else None, rstd)
    groups = ceiling_division(rows, group or backwards.RowTiling.of(x).group)
    # The bias's parts start at a multiple of 16 bytes, as they do after the weight's of a large tensor.
    parts = torch.empty(1 + center, 4 * groups, width)[:, :groups]
    wanted = None if kind == "weights" else torch.empty_like(x), None if kind == "dx" else parts
    (made,) = backwards.launches(operands, *wanted)
    if group is None or "group" not in arguments(made):
        return made
    values = tuple({**arguments(made), "group": group}.values())
    return replace(made, values=values, grid=(groups, *made.grid[1:]))


def sum_of_parts(num_parts: int, width: int, dtype: torch.dtype) -> Launch:
    gradients = [torch.empty(width, dtype=dtype) for _ in range(2)]
    return backwards.add_parts_launch(draw(2, num_parts, width), gradients)


# Softmax

SOFTMAXES = [
    (512, False, True),
    (2048, True, False),
    (RESIDENT, True, True),
    (65536, True, True),
    (RESIDENT_UNALIGNED - 1, True, True),
]
"""(keys, causal, masked): programs with several rows, with one row, with the longest resident row, and with chunks."""


def softmax_name(keys: int, causal: bool, masked: bool) -> str:
    return f"softmax, {'causal ' if causal else ''}{'masked ' if masked else ''}forward, bf16 {keys}"


def softmax(
    rows: int,
    keys: int,
    causal: bool,
    masked: bool,
    dtype: torch.dtype = BF16,
    window: int | None = None,
    queries: int | None = None,
    heads: int = 16,
) -> Launch:
    """The first rows of heads with half as many queries as keys."""
    shape = (1, heads, queries or keys // 2, keys)
    mask = (torch.arange(keys) % 7 != 3).view(1, 1, 1, keys) if masked else None
    # The launch reads shapes and strides alone.
    scores = torch.empty(1, dtype=dtype).expand(shape)
    made = attention.softmax_launch(scores, mask, scores, 0.125, causal, window)
    scores, y = draw(rows, keys, dtype=dtype) * 8, torch.empty(rows, keys, dtype=dtype)
    # The first rows of a launch over more rows than there is memory for.
    numbers = {"num_rows": rows} if "num_rows" in arguments(made) else {}
    values = tuple({**arguments(made), "scores": scores, "y": y, **numbers}.values())
    return replace(made, grid=(ceiling_division(rows, made.constants.get("ROWS", 1)),), values=values)


def softmax_gradient(rows: int, keys: int, dtype: torch.dtype = BF16) -> Launch:
    y = torch.softmax(draw(1, 1, rows, keys, seed="y") * 2, -1).to(dtype)
    dy = draw(1, 1, rows, keys, dtype=dtype, seed="dy")
    return attention.softmax_gradient_launch(dy, y, torch.empty_like(y), 0.125)


# Cross entropy

LOSSES = {
    f"{kind} {'bf16' if dtype == BF16 else 'fp32'} {width}": (kind, width, dtype)
    for width, dtype in ((50257, BF16), (12573, BF16), (12576, FP32), (cross_entropy.RESIDENT, BF16), (128256, BF16))
    for kind in ("statistics", "whole rows", "gradient")
}
"""GPT-2's vocabulary, whose size is not a multiple of 16 although its row stride is; shards of it; the longest
resident row; and Llama 3's vocabulary."""


def loss(kind: str, rows: int, width: int, dtype: torch.dtype) -> Launch:
    """kind: `statistics`, `whole rows`, or `gradient`."""
    logits = (draw(rows, ceiling_division(width, 64) * 64) * 3).to(dtype)[:, :width]
    columns = torch.arange(rows) * 7919 % width
    columns[1] = width - 1
    owned = torch.arange(rows) % 3 != 2
    if kind == "gradient":
        total, scale = torch.logsumexp(logits.float(), 1), draw(rows, seed="scale")
        return cross_entropy._gradient_launch(logits, columns, owned, total, scale)
    launch = cross_entropy._whole_row_launch if kind == "whole rows" else cross_entropy._statistics_launch
    return launch(logits, columns, owned, torch.empty(3, rows))


# Elementwise

RESIDUALS = {
    "dropout residual fp32 768": (768, "plain", FP32),
    "bias dropout residual bf16 8192": (8192, "bias", BF16),
    "dropout backward bf16 8192": (8192, "backward", BF16),
}
GELUS = {
    "gelu tanh fp32 3072": (3072, "tanh", False, False, FP32),
    "bias gelu erf bf16 16384": (16384, "none", True, False, BF16),
    "gelu erf backward fp32": (3072, "none", False, True, FP32),
    "bias gelu tanh backward": (16384, "tanh", True, True, BF16),
}
SWIGLUS = {
    "swiglu fp32 2816": (2816, False, FP32),
    "swiglu bf16 14336": (14336, False, BF16),
    "swiglu backward fp32 2816": (2816, True, FP32),
    "swiglu backward bf16 14336": (14336, True, BF16),
}
ROTARIES = {
    f"rotary {dtype} {width}": (width, forward, dtype)
    for width, forward, dtype in ((128, True, BF16), (80, False, BF16), (64, True, FP32))
}


def dropout_residual(rows: int, width: int, form: str, dtype: torch.dtype) -> Launch:
    """form: `plain`, `bias`, or `backward`."""
    x, residual = (draw(rows, width, dtype=dtype, seed=seed) for seed in "xr")
    bias = draw(width, dtype=dtype, seed="b") if form == "bias" else None
    keys = torch.arange(rows, dtype=torch.int32) * 77_777_777
    other = None if form == "backward" else residual
    return dropout._bias_dropout_residual_launch(x, bias, other, keys, torch.empty_like(x), 0.1)


def dropouts(shape: tuple[int, ...], dtype: torch.dtype) -> Launch:
    """[b, s, h] like hidden states, or [b, heads, q, k] like attention weights."""
    x = draw(*shape, dtype=dtype)
    batch, heads, tokens, width = shape if len(shape) == 4 else (shape[0], 1, *shape[1:])
    keys = torch.arange(batch * tokens, dtype=torch.int32).view(batch, 1, tokens, 1) * 7_654_321
    channels = torch.arange(heads * width, dtype=torch.int32).view(heads, 1, width)
    if len(shape) == 3:
        keys, channels = keys[:, 0], channels[0, 0]
    return dropout._dropout_launch(x, keys, channels, torch.empty_like(x), 0.1)


def gelu(rows: int, width: int, approximate: str, bias: bool, backward: bool, dtype: torch.dtype) -> Launch:
    x, dy = (draw(rows, width, dtype=dtype, seed=seed) * 2 for seed in ("x", "dy"))
    added = draw(width, dtype=dtype, seed="b") if bias else None
    if backward:
        return activations._gelu_backward_launch(dy, x, added, torch.empty_like(x), approximate)
    return activations._gelu_forward_launch(x, added, torch.empty_like(x), approximate)


def swiglu(rows: int, width: int, backward: bool, dtype: torch.dtype) -> Launch:
    gate_up, dy = draw(rows, 2 * width, dtype=dtype), draw(rows, width, dtype=dtype, seed="dy")
    if backward:
        return activations._swiglu_backward_launch(dy, gate_up, torch.empty_like(gate_up))
    return activations._swiglu_forward_launch(gate_up, torch.empty_like(dy))


def rotary(tokens: int, heads: int, width: int, forward: bool, dtype: torch.dtype) -> Launch:
    """Queries as a view of a joint tensor of half as many heads more."""
    x = draw(2, tokens, heads * 3 // 2, width, dtype=dtype)[:, :, :heads]
    angles = draw(tokens, width // 2, seed="angles") * 3
    y = torch.empty(2, tokens, heads, width, dtype=dtype)
    return attention._rotary_launch(x, angles.cos(), angles.sin(), y, forward)


# Flat buffers

UPDATE = Coefficients(step=2, learning_rate=1e-3, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1)
ADAMWS = {"adamw fp32": (FP32, None), "adamw bf16 moments and parameters": (BF16, BF16)}
ROUNDINGS = {
    "stochastic rounding": (0x9E3779B9, Elements(0, 1 << 26, 1 << 26)),
    "stochastic rounding of columns": (0x1E3779B9, Elements(1 << 12, 1 << 12, 1 << 15)),
}
"""A large matrix, and a tensor rank's shard of its columns."""


def adamw(count: int, moments: torch.dtype, parameter: torch.dtype | None, flags: bool) -> Launch:
    tensors: dict[str, Tensor | None] = {
        "master": draw(count),
        "gradient": draw(count, seed="g"),
        "parameter": None if parameter is None else torch.empty(count, dtype=parameter),
        "first": draw(count, seed="m").to(moments) * 0.1,
        "second": draw(count, seed="v").abs().to(moments) * 0.1,
        "gradient_scale": torch.tensor([0.5]) if flags else None,
        "skip": torch.zeros(1) if flags else None,
    }
    return optimizer._adamw_launch(Buffers(**tensors), UPDATE)


def gradient_norm(count: int, dtype: torch.dtype) -> Launch:
    sums = torch.empty(ceiling_division(count, BLOCK), dtype=torch.float64)
    return optimizer._gradient_norm_launch(draw(count, dtype=dtype), sums)


def rounding(count: int, key: int, elements: Elements) -> Launch:
    return optimizer._stochastic_rounding_launch(torch.empty(count, dtype=BF16), draw(count), key, elements)
