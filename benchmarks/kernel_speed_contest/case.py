"""What one race is about: an op at a size, the bytes that it has to move, and who can run it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.kernels.registry import Implementation

Call = Callable[..., object]


@dataclass(frozen=True)
class Size:
    """Rows and the length of the last axis; a flat buffer is one row."""

    rows: int
    width: int

    @property
    def elements(self) -> int:
        """Of one tensor of this size."""
        return self.rows * self.width


@dataclass(frozen=True)
class Work:
    """What an op cannot do without, by its definition: bytes read and written once each, and matrix FLOPs."""

    bytes: float
    flops: float = 0.0


@dataclass(frozen=True)
class Traffic:
    """Bytes of an elementwise or row-wise op, in tensors of [rows, width].

    forward, backward: tensors read plus tensors written, without parameters and statistics, which are one row or one
    column. backward: None where there is none.
    """

    forward: float
    backward: float | None

    def work(self, size: Size, itemsize: int) -> tuple[Work, Work | None]:
        """(forward, forward and backward)."""
        tensor = size.elements * itemsize
        both = None if self.backward is None else Work((self.forward + self.backward) * tensor)
        return Work(self.forward * tensor), both


class Draw:
    """Makes inputs, the same ones for the same seed. leaf: whether gradients of them are wanted."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device = device
        self.dtype = dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, leaf: bool = True) -> Tensor:
        """Normal numbers in the contest's dtype, or the one given."""
        numbers = torch.empty(shape, dtype=dtype or self.dtype, device=self.device).normal_(generator=self._generator)
        return numbers.requires_grad_(leaf)

    def below(self, limit: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers from 0 to limit - 1."""
        return torch.randint(limit, shape, generator=self._generator, device=self.device, dtype=dtype)


def unchanged(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The inputs as they were drawn."""
    return inputs


@dataclass(frozen=True)
class Entry:
    """One contestant in one race.

    forward: inputs -> the op's results that have gradients. both: inputs -> anything, forward and backward at once;
    None where autograd gives the backward. prepare: the inputs as this contestant wants them, made once.
    """

    forward: Call
    both: Call | None = None
    prepare: Callable[[Sequence[Tensor]], Sequence[Tensor]] = unchanged


@dataclass(frozen=True)
class Aim:
    """Least share of the ceiling, forward and with the backward."""

    forward: float
    both: float


@dataclass(frozen=True)
class Case:
    """An op in one form.

    sizes: those of a whole run. quick: the one of a quick run. tiny: the one that a processor manages. draw: the
    inputs of one call. work: size and bytes of an element -> what has to be done. ours: a backend's functions ->
    entry. torch: as one writes it in torch. liger: imports Liger's kernel; None where it has none. compiled: what
    torch.compile gets, if not `torch`.
    """

    op: str
    form: str
    sizes: Sequence[Size]
    quick: Size
    tiny: Size
    draw: Callable[[Size, Draw], list[Tensor]]
    work: Callable[[Size, int], tuple[Work, Work | None]]
    ours: Callable[[Implementation], Entry]
    torch: Entry
    liger: Callable[[], Entry] | None = None
    compiled: Entry | None = None
    aim: Aim | None = None

    @property
    def name(self) -> str:
        """The op, and its form where it has several."""
        return f"{self.op}, {self.form}" if self.form else self.op


def grid(rows: Sequence[int], widths: Sequence[int]) -> list[Size]:
    """Every combination."""
    return [Size(count, width) for width in widths for count in rows]


HIDDEN = grid([4096, 32768], [1024, 2048, 4096, 8192, 16384])
QUICK, TINY = Size(8192, 4096), Size(32, 64)
