"""The feed-forward half of a block."""

from collections.abc import Callable

from torch import Tensor, nn

from megapipe.config.model import ModelConfig
from megapipe.kernels.registry import Registry
from megapipe.layers.linear import ColumnParallelLinear, RowParallelLinear, Shapes, within
from megapipe.layers.remade import Remade
from megapipe.layers.split import SplitTape
from megapipe.parallel.groups import Group


class MLP(nn.Module):
    """hidden -> ffn -> hidden on one tensor rank, which holds an equal share of the ffn channels.

    shapes: of `up.weight` (ffn, hidden), or (2, ffn, hidden) with the gate first where the activation is gated,
    `down.weight` and biases.
    recompute: make the activation again in the backward rather than keep it.
    """

    def __init__(self, model: ModelConfig, shapes: Shapes, group: Group, kernels: Registry) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(within(shapes, "up"), group)
        self.down = RowParallelLinear(within(shapes, "down"), group)
        self.activation = model.activation_kind
        self.recompute = False
        self.kernels = kernels

    def forward(self, x: Tensor, tape: SplitTape | None, again: Remade | None = None) -> Tensor:
        """Hidden states [b, s, h] to [b, s, h]. again: makes x again in the backward, so that x need not be kept."""
        inner, activate = self._before_activation(x, tape, again)
        made_again = Remade(activate, (inner.detach(),)) if self.recompute else None
        return self.down(activate(inner), tape, made_again)

    def _before_activation(
        self, x: Tensor, tape: SplitTape | None, again: Remade | None
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return what the activation reads, and the activation, which adds the bias if its kernel can."""
        kind, arguments = self.activation, self.activation.arguments
        if self.up.bias is not None and kind.biased is not None:
            # The linear layer computes the bias's gradient, wherever the bias is added.
            bias = self.up.bias.detach()
            op = self.kernels.pick(kind.biased, bias)
            if op is not self.kernels.reference(kind.biased):
                if self.recompute and tape is not None:  # the weight half may come when sharded weights are released
                    bias = bias.clone()
                return self.up.without_bias(x, tape, again), lambda inner: op.apply(inner, bias, *arguments)
            # Without a fused kernel the bias costs least inside the product.
            alone = self.kernels.reference(kind.op)
            return self.up(x, tape, again), lambda inner: alone.apply(inner, *arguments)
        inner = self.up(x, tape, again)
        plain = self.kernels.pick(kind.op, inner)
        return inner, lambda inner: plain.apply(inner, *arguments)
