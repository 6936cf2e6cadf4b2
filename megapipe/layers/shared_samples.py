"""Lets attention reach the tokens of its samples that other ranks hold."""

import torch
from torch import nn

from megapipe.layers.attention import Attention
from megapipe.layers.head_exchange import HeadExchange
from megapipe.layers.ring_attention import Ring
from megapipe.layers.ring_pieces import Visibility
from megapipe.layout.token_order import ContextAttention, Share, order_of
from megapipe.parallel.groups import Group


def share_samples(attention: Attention, group: Group, kind: ContextAttention) -> None:
    """From now on the ranks of `group` hold parts of every sample, and `attention` works over all of them.

    The parts are those of parallel/token_order.py, in the order that suits the kind.
    """
    if kind == "ring":
        attention.sharing = Ring(
            group,
            order_of(kind, attention.causal),
            Visibility(attention.causal, attention.window if attention.causal else None),
            attention.scale,
            attention.path == "unfused",
            attention.first_head,
            attention.dropout,
        )
        return
    attention.sharing = HeadExchange(attention, group)
    attention.num_heads //= group.size
    attention.first_head += group.rank * attention.num_heads


class OutsideGraphs:
    """A ring that torch.compile leaves alone: a graph would have no place for hops that go on beside products.

    Ring.mix does not say so itself, as to say it imports the compiler, and Triton with it: seconds for every run, and
    too late then for TRITON_INTERPRET.
    """

    def __init__(self, ring: Ring) -> None:
        self.mix = torch.compiler.disable(ring.mix)
        self._ring = ring

    @property
    def share(self) -> Share:
        """The tokens that this rank holds."""
        return self._ring.share


def keep_rings_out_of_graphs(module: nn.Module) -> bool:
    """Prepare a module for torch.compile; whether it can still be one graph."""
    whole = True
    for part in module.modules():
        if isinstance(part, Attention) and isinstance(part.sharing, Ring):
            part.sharing = OutsideGraphs(part.sharing)
            whole = False
    return whole
