"""The feed-forward half of a block."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from megapipe.config.model import ModelConfig
from megapipe.kernels.reference import bias_gelu, gelu
from megapipe.kernels.registry import Registry
from megapipe.layers.linear import ColumnParallelLinear, RowParallelLinear, Shapes, within
from megapipe.layers.remade import Remade
from megapipe.layers.split import SplitTape
from megapipe.parallel.groups import Group

Activation = Callable[[Tensor], Tensor]


class MLP(nn.Module):
    """hidden -> ffn -> hidden on one tensor rank, which holds an equal share of the ffn channels.

    shapes: of `up.weight` (ffn, hidden), or (2, ffn, hidden) with the gate first for SwiGLU, `down.weight` and biases.
    recompute: make the activation again in the backward rather than keep it.
    """

    def __init__(self, model: ModelConfig, shapes: Shapes, group: Group, kernels: Registry) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(within(shapes, "up"), group)
        self.down = RowParallelLinear(within(shapes, "down"), group)
        self.activation = model.activation
        self.recompute = False
        self.kernels = kernels

    def forward(self, x: Tensor, tape: SplitTape | None, again: Remade | None = None) -> Tensor:
        """Hidden states [b, s, h] to [b, s, h]. again: makes x again in the backward, so that x need not be kept."""
        inner, activate = self._swiglu(x, tape, again) if self.activation == "swiglu" else self._gelu(x, tape, again)
        made_again = Remade(activate, (inner.detach(),)) if self.recompute else None
        return self.down(activate(inner), tape, made_again)

    def _swiglu(self, x: Tensor, tape: SplitTape | None, again: Remade | None) -> tuple[Tensor, Activation]:
        inner = self.up(x, tape, again)
        return inner, self.kernels.pick("swiglu", inner).apply

    def _gelu(self, x: Tensor, tape: SplitTape | None, again: Remade | None) -> tuple[Tensor, Activation]:
        approximate: Literal["none", "tanh"] = "tanh" if self.activation == "gelu_tanh" else "none"
        if self.up.bias is None:
            inner = self.up(x, tape, again)
            op = self.kernels.pick("gelu", inner)
            return inner, lambda inner: op.apply(inner, approximate)
        # The linear layer computes the bias's gradient, wherever the bias is added.
        bias = self.up.bias.detach()
        op = self.kernels.pick("bias_gelu", bias)
        if op is bias_gelu:
            # Apart from GELU the bias costs least inside the product.
            return self.up(x, tape, again), lambda inner: gelu.apply(inner, approximate)
        if self.recompute and tape is not None:  # the weight half may come when sharded weights are released
            bias = bias.clone()
        return self.up.without_bias(x, tape, again), lambda inner: op.apply(inner, bias, approximate)
