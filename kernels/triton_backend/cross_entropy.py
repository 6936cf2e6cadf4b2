"""Vocabulary-parallel cross entropy in Triton: the functions of `megapipe.kernels.reference.cross_entropy`.

Alone, a rank reads and writes its logits once where a row stays on chip: in registers up to `RESIDENT` columns, in
the cache above. With others, it reads them, the ranks exchange 12 bytes a row, and it reads and writes them once more.
"""

import torch
from torch import Tensor

from megapipe.kernels.opaque import opaque
from megapipe.kernels.reference.cross_entropy import logit_gradient as logit_gradient
from megapipe.kernels.triton_backend.cross_entropy_kernels import gradient_kernel, statistics_kernel, whole_row_kernel
from megapipe.kernels.triton_backend.launch import Launch, ceiling_division, power_of_two
from megapipe.kernels.triton_backend.launch import refusal as refusal
from megapipe.kernels.triton_backend.specimens import Specimen, meta
from megapipe.kernels.triton_backend.tiles import NUM_WARPS, tile_of

RESIDENT = 16384
"""Columns up to which a row stays in registers: 16 of each of 1024 threads."""

_STREAMED, _WHOLE = 8192, 32768
# Longer rows that become gradients are read in blocks so large that one program fills a multiprocessor: the rows under
# way at a time, 34 MB of 128k bf16 columns on 132 multiprocessors, then fit the cache until they are read again.

_ELEMENTS_PER_WARP = 512


def _warps(block: int) -> int:
    return min(32, max(4, block // _ELEMENTS_PER_WARP))


def _has_tail(logits: Tensor) -> bool:
    return logits.shape[1] % 16 != 0


def _arguments(logits: Tensor, columns: Tensor, owned: Tensor, result: Tensor) -> dict[str, Tensor | int]:
    return {
        "logits": logits,
        "columns": columns,
        "owned": owned,
        "statistics": result,
        "num_rows": logits.shape[0],
        "width": logits.shape[1],
        "row_stride": logits.stride(0),
    }


def _statistics_launch(logits: Tensor, columns: Tensor, owned: Tensor, result: Tensor) -> Launch:
    block = min(power_of_two(max(logits.shape[1], 1)), _STREAMED)
    arguments = _arguments(logits, columns, owned, result)
    return Launch(
        statistics_kernel, (logits.shape[0],), arguments, {"BLOCK": block, "TAIL": _has_tail(logits)}, _warps(block)
    )


def _whole_row_launch(logits: Tensor, columns: Tensor, owned: Tensor, result: Tensor) -> Launch:
    resident = logits.shape[1] <= RESIDENT
    block = power_of_two(max(logits.shape[1], 1)) if resident else _WHOLE
    arguments = _arguments(logits, columns, owned, result)
    constants = {"RESIDENT": resident, "BLOCK": block, "TAIL": _has_tail(logits)}
    return Launch(whole_row_kernel, (logits.shape[0],), arguments, constants, _warps(block))


def _gradient_launch(
    logits: Tensor,
    columns: Tensor | None,
    owned: Tensor | None,
    log_sum_exp: Tensor,
    scale: Tensor | None,
    result: Tensor,
) -> Launch:
    num_rows, width = logits.shape
    tile = tile_of(max(width, 1), logits.dtype)
    arguments = {
        "logits": logits,
        "columns": columns,
        "owned": owned,
        "log_sum_exp": log_sum_exp,
        "scale": scale,
        "result": result,
        "num_rows": num_rows,
        "width": width,
        "row_stride": logits.stride(0),
        "result_stride": result.stride(0),
    }
    constants = {**tile.constants(), "TAIL": _has_tail(logits)}
    return Launch(gradient_kernel, tile.grid(num_rows, width), arguments, constants, NUM_WARPS)


def _rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def _fake_statistics(logits: Tensor, columns: Tensor, owned: Tensor) -> Tensor:
    return logits.new_empty(3, logits.shape[0], dtype=torch.float32)


@opaque("cross_entropy_statistics_triton(Tensor logits, Tensor columns, Tensor owned) -> Tensor", _fake_statistics)
def statistics(logits: Tensor, columns: Tensor, owned: Tensor) -> Tensor:
    """[3, n] in fp32 for logits [n, v]: the largest, the sum of exp(logit - largest), the target's logit or 0.

    columns: int64 [n], each row's label. owned: bool [n], whether that is a column here.
    """
    result = _fake_statistics(logits, columns, owned)
    _statistics_launch(_rows(logits), columns.contiguous(), owned.contiguous(), result).run()
    return result


@opaque("cross_entropy_whole_rows_triton(Tensor(a!) logits, Tensor columns, Tensor owned) -> Tensor", _fake_statistics)
def statistics_and_gradient(logits: Tensor, columns: Tensor, owned: Tensor) -> Tensor:
    """`statistics` of a rank that has the whole vocabulary; the logits become the gradient of each row's loss."""
    rows = _rows(logits)
    result = _fake_statistics(logits, columns, owned)
    _whole_row_launch(rows, columns.contiguous(), owned.contiguous(), result).run()
    if rows is not logits:
        logits.copy_(rows)
    return result


@opaque(
    "cross_entropy_gradient_triton(Tensor(a!) logits, Tensor columns, Tensor owned, Tensor log_sum_exp, "
    "Tensor? scale) -> ()",
    lambda logits, columns, owned, log_sum_exp, scale: None,
)
def gradient(logits: Tensor, columns: Tensor, owned: Tensor, log_sum_exp: Tensor, scale: Tensor | None) -> None:
    """Turn logits [n, v] in place into the gradient of each row's loss, times the row's scale (fp32 [n]) if given.

    log_sum_exp: fp32 [n], over the columns of all ranks.
    """
    rows = _rows(logits)
    scale = None if scale is None else scale.contiguous()
    _gradient_launch(rows, columns.contiguous(), owned.contiguous(), log_sum_exp.contiguous(), scale, rows).run()
    if rows is not logits:
        logits.copy_(rows)


@opaque(
    "cross_entropy_softmax_triton(Tensor logits, Tensor log_sum_exp, Tensor(a!) softmax) -> ()",
    lambda logits, log_sum_exp, softmax: None,
)
def _softmax(logits: Tensor, log_sum_exp: Tensor, softmax: Tensor) -> None:
    result = softmax if softmax.stride(-1) == 1 else torch.empty_like(logits)
    _gradient_launch(_rows(logits), None, None, log_sum_exp, None, result).run()
    if result is not softmax:
        softmax.copy_(result)


def row_statistics(logits: Tensor, targets: Tensor, owned: Tensor, softmax: Tensor | None) -> tuple[Tensor, Tensor]:
    """(log-sum-exp [n], target logit [n]) in fp32; softmax, if given, receives exp(logits - log-sum-exp)."""
    largest, total, target = statistics(logits, targets, owned).unbind()
    log_sum_exp = largest + total.log()
    if softmax is not None:
        _softmax(logits, log_sum_exp, softmax)
    return log_sum_exp, target


def specimens() -> list[Specimen]:
    """A share of GPT-2's vocabulary, the longest resident row, Llama 3's whole vocabulary, and GPT-2's, which is no
    multiple of 16 and lies in rows that are."""
    return [
        *_specimens(50257, torch.bfloat16, "bf16", resident=False),
        *_specimens(12573, torch.bfloat16, "bf16", resident=True),
        *_specimens(12576, torch.float32, "fp32", resident=True),
        *_specimens(RESIDENT, torch.bfloat16, "bf16", resident=True),
        *_specimens(128256, torch.bfloat16, "bf16", resident=False),
    ]


def _specimens(width: int, dtype: torch.dtype, name: str, resident: bool) -> list[Specimen]:
    logits, rows = meta(8192, ceiling_division(width, 64) * 64, dtype=dtype)[:, :width], meta(8192)
    columns, owned, result = meta(8192, dtype=torch.int64), meta(8192, dtype=torch.bool), meta(3, 8192)
    gradient = _gradient_launch(logits, columns, owned, rows, rows, logits)
    whole = _whole_row_launch(logits, columns, owned, result)
    return [
        Specimen(f"statistics {name} {width}", _statistics_launch(logits, columns, owned, result), loads=1, stores=0),
        Specimen(f"whole rows {name} {width}", whole, loads=1 if resident else 2, stores=1),
        Specimen(f"gradient {name} {width}", gradient, loads=1, stores=1),
    ]
