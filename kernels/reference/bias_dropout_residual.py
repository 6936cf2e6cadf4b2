"""Residual plus dropout of a sum with a bias, in torch: the end of either half of a block."""

from torch import Tensor

from megapipe.kernels.reference import dropout


def apply(x: Tensor, bias: Tensor | None, residual: Tensor, keys: Tensor, probability: float) -> Tensor:
    """residual + dropout(x + bias), for x and residual [..., h] and bias [h].

    keys: int32 [...], of the tokens (`megapipe.kernels.reference.dropout.token_keys`). Channels are those of the last
    axis, counted from 0. probability: of zeroing an element.
    """
    channels = dropout.numbers(0, x.shape[-1], x.device)
    update = x if bias is None else x + bias
    return residual + dropout.apply(update, keys.unsqueeze(-1), channels, probability)
