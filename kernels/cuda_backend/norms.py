"""What both norms share: checked, contiguous operands, and the launches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.kernels.cuda_backend import library


def statistic_of(x: Tensor) -> Tensor:
    """Memory for one fp32 number per row of x: [..., 1]."""
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def result_of(x: Tensor) -> Tensor:
    """Contiguous memory for a result in x's shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def sizes(x: Tensor) -> tuple[int, int, int]:
    """(rows, width, the number of the dtype), as csrc takes them."""
    width = x.shape[-1]
    return x.numel() // width if width else 0, width, library.DTYPES[x.dtype]


def operands(name: str, x: Tensor, beside: dict[str, Tensor | None], parameters: dict[str, Tensor]) -> list[Tensor]:
    """x, what has its shape, and parameters of its width, contiguous and in this order; absent ones are left out.

    Raises ValueError, naming the tensor, when a shape or dtype differs.
    """
    expected = {key: (tensor, x.shape) for key, tensor in beside.items() if tensor is not None}
    expected |= {key: (tensor, x.shape[-1:]) for key, tensor in parameters.items()}
    for key, (tensor, shape) in expected.items():
        if tensor.shape != shape or tensor.dtype != x.dtype:
            raise ValueError(
                f"{name}: {key} is {tensor.dtype} {list(tensor.shape)} beside x, {x.dtype} {list(x.shape)}; it must "
                f"be {x.dtype} {list(shape)}; cast it, or request the backend 'reference', which supports all "
                "dtypes"
            )
    return [x.contiguous(), *(tensor.contiguous() for tensor, _ in expected.values())]


@dataclass(frozen=True)
class Backward:
    """Operands of a norm's gradients, checked.

    op: `layer_norm` or `rms_norm`. statistics: mean (of layer_norm) and reciprocal deviation. dx: or None.
    """

    op: str
    dy: Tensor
    x: Tensor
    statistics: tuple[Tensor, ...]
    weight: Tensor
    dx: Tensor | None

    @classmethod
    def of(
        cls, op: str, dy: Tensor, x: Tensor, statistics: tuple[Tensor, ...], weight: Tensor, dx: Tensor | None = None
    ) -> "Backward":
        """Raises ValueError when a shape or dtype does not fit x."""
        x, dy, *rest = operands(op, x, {"dy": dy, "dx": dx}, {"weight": weight})
        # torch.compile narrows the statistics to the dtype of x.
        wide = tuple(statistic.float().contiguous() for statistic in statistics)
        return cls(op, dy, x, wide, rest[-1], rest[0] if dx is not None else None)

    def input_gradient(self) -> Tensor:
        """Gradient of x, dx included."""
        found = torch.empty_like(self.x)
        self._launch(found, None, [None for _ in self.statistics])
        return found

    def weight_gradients(self) -> list[Tensor]:
        """Gradients of weight and, of layer_norm, bias."""
        return self._with_weights(None)

    def gradients(self) -> list[Tensor]:
        """Gradients of x, dx included, of weight and, of layer_norm, bias: the bits of both halves, in one pass."""
        found = torch.empty_like(self.x)
        return [found, *self._with_weights(found)]

    def _with_weights(self, dx: Tensor | None) -> list[Tensor]:
        slabs = library.current().norm_slabs(*sizes(self.x)[:2])
        found = [torch.empty_like(self.weight) for _ in self.statistics]
        self._launch(dx, self.x.new_empty(len(found), slabs, self.x.shape[-1], dtype=torch.float32), found)
        return found

    def _launch(self, dx: Tensor | None, partial: Tensor | None, gradients: Sequence[Tensor | None]) -> None:
        tensors = (self.dy, self.x, *self.statistics, self.weight, self.dx, dx, partial, *gradients)
        library.current().launch(f"{self.op}_backward", *tensors, *sizes(self.x))
