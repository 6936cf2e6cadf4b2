"""The kernels of `row_norms_backward`."""

import triton
import triton.language as tl

from megapipe.kernels.triton_backend.tiles import product


@triton.jit
def resident_kernel(
    dy,
    x,
    dx_beside,
    weight,
    mean,
    rstd,
    dx,
    weight_parts,
    bias_parts,
    num_rows,
    width,
    group,
    CENTER: tl.constexpr,
    BESIDE: tl.constexpr,
    INPUT: tl.constexpr,
    WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Input gradients of a group of rows, and the group's sums for the weight and the bias, from one read of each row.

    Each program works on `group` rows in tiles of ROWS x BLOCK. CENTER: a layer norm, whose rows have a mean and
    whose bias has a gradient; otherwise an RMS norm. BESIDE: `dx_beside` [num_rows, width] is added to the input
    gradient. INPUT, WEIGHT: which of the two gradients are computed. weight_parts, bias_parts: fp32
    [programs, width], one row per program, which `add_parts_kernel` sums.
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    within = column < width
    if INPUT:
        factor = tl.load(weight + column, mask=within, other=0.0).to(tl.float32)[None, :]
    weight_sum = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    bias_sum = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    last = tl.minimum((program + 1) * group, num_rows)
    # Two stages: the next tile is on its way to shared memory while this one is worked on.
    for start in tl.range(0, group, ROWS, num_stages=2):
        row = program * group + start + tl.arange(0, ROWS)
        inside = row < last
        mask = inside[:, None] & within[None, :]
        offset = row[:, None] * width + column[None, :]
        gradient = tl.load(dy + offset, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row, mask=inside, other=0.0)[:, None]
        if CENTER:
            value -= tl.load(mean + row, mask=inside, other=0.0)[:, None]
        value *= scale
        if WEIGHT:
            weight_sum = tl.fma(gradient, value, weight_sum)
            bias_sum += gradient
        if INPUT:
            gradient = product(gradient, factor + tl.zeros_like(gradient))
            along = (tl.sum(product(gradient, value), axis=1) / width)[:, None]
            if CENTER:
                gradient -= (tl.sum(gradient, axis=1) / width)[:, None]
            result = gradient - value * along
            result *= scale
            if BESIDE:
                result += tl.load(dx_beside + offset, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx + offset, result.to(dx.dtype.element_ty), mask=mask)
    if WEIGHT:
        part = program * width + column
        tl.store(weight_parts + part, tl.sum(weight_sum, axis=0), mask=within)
        if CENTER:
            tl.store(bias_parts + part, tl.sum(bias_sum, axis=0), mask=within)


@triton.jit
def chunked_input_kernel(
    dy,
    x,
    dx_beside,
    weight,
    mean,
    rstd,
    dx,
    width,
    CENTER: tl.constexpr,
    BESIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Input gradient of one row that is too wide for registers: one pass for its sums, another for the result.

    CENTER and BESIDE: as in `resident_kernel`. BLOCK: columns at once.
    """
    row = tl.program_id(0).to(tl.int64)
    first = row * width
    scale = tl.load(rstd + row)
    center = 0.0
    if CENTER:
        center = tl.load(mean + row)
    products = tl.zeros([BLOCK], dtype=tl.float32)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < width
        gradient = tl.load(dy + first + column, mask=mask, other=0.0).to(tl.float32)
        gradient *= tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
        value = (tl.load(x + first + column, mask=mask, other=0.0).to(tl.float32) - center) * scale
        products = tl.fma(gradient, value, products)
        sums += gradient
    along = tl.sum(products, axis=0) / width
    shift = 0.0
    if CENTER:
        shift = tl.sum(sums, axis=0) / width
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < width
        gradient = tl.load(dy + first + column, mask=mask, other=0.0).to(tl.float32)
        gradient *= tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
        value = (tl.load(x + first + column, mask=mask, other=0.0).to(tl.float32) - center) * scale
        result = (gradient - value * along - shift) * scale
        if BESIDE:
            result += tl.load(dx_beside + first + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + first + column, result.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def chunked_weight_kernel(
    dy,
    x,
    mean,
    rstd,
    weight_parts,
    bias_parts,
    num_rows,
    width,
    group,
    CENTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums for the weight and the bias over a group of rows, for BLOCK columns.

    Programs of axis 0 take groups of rows, those of axis 1 take blocks of columns. weight_parts, bias_parts, CENTER:
    as in `resident_kernel`.
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    weight_sum = tl.zeros([BLOCK], dtype=tl.float32)
    bias_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(program * group, tl.minimum((program + 1) * group, num_rows)):
        gradient = tl.load(dy + row * width + column, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + row * width + column, mask=mask, other=0.0).to(tl.float32)
        if CENTER:
            value -= tl.load(mean + row)
        weight_sum = tl.fma(gradient, value * tl.load(rstd + row), weight_sum)
        bias_sum += gradient
    tl.store(weight_parts + program * width + column, weight_sum, mask=mask)
    if CENTER:
        tl.store(bias_parts + program * width + column, bias_sum, mask=mask)


@triton.jit
def add_parts_kernel(
    parts,
    weight_gradient,
    bias_gradient,
    num_parts,
    width,
    CENTER: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The programs at 0 of axis 1 add up the weight's parts, those at 1 the bias's, which lie behind."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    parts += tl.program_id(1).to(tl.int64) * num_parts * width
    sums = tl.zeros([PARTS, COLUMNS], dtype=tl.float32)
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        mask = (part < num_parts)[:, None] & (column < width)[None, :]
        sums += tl.load(parts + part.to(tl.int64)[:, None] * width + column[None, :], mask=mask, other=0.0)
    total = tl.sum(sums, axis=0).to(weight_gradient.dtype.element_ty)
    if tl.program_id(1) == 0:
        tl.store(weight_gradient + column, total, mask=column < width)
    else:
        if CENTER:
            tl.store(bias_gradient + column, total, mask=column < width)
