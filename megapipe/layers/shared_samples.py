"""Lets attention reach the tokens of its samples that other ranks hold."""

from megapipe.layers.attention import Attention
from megapipe.layers.head_exchange import HeadExchange
from megapipe.layers.ring_attention import Ring
from megapipe.layers.ring_pieces import Visibility
from megapipe.parallel.groups import Group
from megapipe.parallel.token_order import ContextAttention, order_of


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
