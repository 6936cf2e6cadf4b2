"""The subject of a race: an op at a size, the bytes that it must move, and the contestants that can run it."""

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
        """Number of elements of a tensor of this size."""
        return self.rows * self.width


@dataclass(frozen=True)
class Work:
    """The least work of an op by its definition: bytes, each read or written once, and FLOPs of matrix products."""

    bytes: float
    flops: float = 0.0


@dataclass(frozen=True)
class Traffic:
    """Bytes of an elementwise or row-wise op, in tensors of [rows, width].

    forward, backward: tensors read plus tensors written, without parameters and statistics, which are one row or one
    column. backward: None if the op has no backward.
    """

    forward: float
    backward: float | None

    def work(self, size: Size, itemsize: int) -> tuple[Work, Work | None]:
        """Return the work of the forward, and of forward and backward. itemsize: bytes of an element."""
        tensor = size.elements * itemsize
        both = None if self.backward is None else Work((self.forward + self.backward) * tensor)
        return Work(self.forward * tensor), both


class Draw:
    """Creates inputs, which are equal for equal seeds. leaf: whether the input needs a gradient."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device = device
        self.dtype = dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, leaf: bool = True) -> Tensor:
        """Return normally distributed numbers, by default in the dtype of the race."""
        numbers = torch.empty(shape, dtype=dtype or self.dtype, device=self.device).normal_(generator=self._generator)
        return numbers.requires_grad_(leaf)

    def below(self, limit: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return integers from 0 to limit - 1."""
        return torch.randint(limit, shape, generator=self._generator, device=self.device, dtype=dtype)


def unchanged(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the inputs unchanged."""
    return inputs


@dataclass(frozen=True)
class Entry:
    """One contestant in one race.

    forward: takes the inputs and returns the results that have gradients. both: takes the inputs, and runs forward and
    backward; None if autograd runs the backward. prepare: converts the inputs for this contestant, once before the
    race.
    """

    forward: Call
    both: Call | None = None
    prepare: Callable[[Sequence[Tensor]], Sequence[Tensor]] = unchanged


@dataclass(frozen=True)
class Aim:
    """Minimum fraction of the ceiling that a kernel should reach: in the forward, and with the backward."""

    forward: float
    both: float


@dataclass(frozen=True)
class Case:
    """An op in one form.

    sizes: sizes of a full run. quick: size of a quick run. tiny: size for a CPU. draw: creates the inputs of one call.
    work: returns the work, from the size and the bytes of an element. entry: returns the contestant for a backend's
    functions. torch: the op as it is usually written in torch. liger: imports Liger's kernel; None if Liger does not
    have one. compiled: the contestant that torch.compile compiles, by default `torch`.
    """

    op: str
    form: str
    sizes: Sequence[Size]
    quick: Size
    tiny: Size
    draw: Callable[[Size, Draw], list[Tensor]]
    work: Callable[[Size, int], tuple[Work, Work | None]]
    entry: Callable[[Implementation], Entry]
    torch: Entry
    liger: Callable[[], Entry] | None = None
    compiled: Entry | None = None
    aim: Aim | None = None

    @property
    def name(self) -> str:
        """Name of the op, and of its form if it has several."""
        return f"{self.op}, {self.form}" if self.form else self.op


def grid(rows: Sequence[int], widths: Sequence[int]) -> list[Size]:
    """Return a size for every combination of rows and widths."""
    return [Size(count, width) for width in widths for count in rows]


HIDDEN = grid([4096, 32768], [1024, 2048, 4096, 8192, 16384])
QUICK, TINY = Size(8192, 4096), Size(32, 64)
