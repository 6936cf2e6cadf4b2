"""The feed-forward half of a block."""

from torch import Tensor, nn

from megapipe.config.model import ModelConfig
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
        inner = self.up(x, tape)
        if self.activation == "swiglu":
            inner = self.kernels.pick("swiglu", inner).apply(inner)
        else:
            approximate = "tanh" if self.activation == "gelu_tanh" else "none"
            inner = self.kernels.pick("gelu", inner).apply(inner, approximate)
        return self.down(inner, tape)
