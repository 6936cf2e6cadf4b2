"""The feed-forward half of a block."""

from typing import Literal

from torch import Tensor, nn

from megapipe.config.model import ModelConfig
from megapipe.kernels.reference import bias_gelu, gelu
from megapipe.kernels.registry import Registry
from megapipe.layers.linear import ColumnParallelLinear, RowParallelLinear, Shapes, within
from megapipe.layers.split import SplitTape
from megapipe.parallel.groups import Group


class MLP(nn.Module):
    """hidden -> ffn -> hidden on one tensor rank, which holds an equal share of the ffn channels.

    shapes: of `up.weight` (ffn, hidden), or (2, ffn, hidden) with the gate first for SwiGLU, `down.weight` and biases.
    """

    def __init__(self, model: ModelConfig, shapes: Shapes, group: Group, kernels: Registry) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(within(shapes, "up"), group)
        self.down = RowParallelLinear(within(shapes, "down"), group)
        self.activation = model.activation
        self.kernels = kernels

    def forward(self, x: Tensor, tape: SplitTape | None) -> Tensor:
        """Hidden states [b, s, h] to [b, s, h]."""
        return self.down(self._swiglu(x, tape) if self.activation == "swiglu" else self._gelu(x, tape), tape)

    def _swiglu(self, x: Tensor, tape: SplitTape | None) -> Tensor:
        inner = self.up(x, tape)
        return self.kernels.pick("swiglu", inner).apply(inner)

    def _gelu(self, x: Tensor, tape: SplitTape | None) -> Tensor:
        approximate: Literal["none", "tanh"] = "tanh" if self.activation == "gelu_tanh" else "none"
        if self.up.bias is None:
            inner = self.up(x, tape)
            return self.kernels.pick("gelu", inner).apply(inner, approximate)
        # The linear layer computes the bias's gradient, wherever the bias is added.
        bias = self.up.bias.detach()
        op = self.kernels.pick("bias_gelu", bias)
        if op is bias_gelu:
            # Apart from GELU the bias costs least inside the product.
            return gelu.apply(self.up(x, tape), approximate)
        return op.apply(self.up.without_bias(x, tape), bias, approximate)
