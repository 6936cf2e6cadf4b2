"""All-to-all attention (Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv 2309.14509, section 3).

Before attention every rank of a group trades heads for tokens: it gives away all heads but its share, of its own
tokens, and gets its share of heads, of all tokens. Whatever attends to whole samples does so unchanged, and what comes
of it goes back the same way. Ranks hold their tokens in rank order (`contiguous` in parallel/token_order.py).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megapipe.layers.attention import Attention
from megapipe.layers.context import MicrobatchContext
from megapipe.layout.token_order import Share
from megapipe.parallel.collectives import all_to_all
from megapipe.parallel.groups import Group
from megapipe.spec.attention import kv_copies


@dataclass(frozen=True)
class HeadExchange:
    """The attention of one block, its heads shared out over a group."""

    attention: Attention
    group: Group

    @property
    def share(self) -> Share:
        """The tokens that this rank holds."""
        return Share("contiguous", self.group.rank, self.group.size)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, context: MicrobatchContext) -> Tensor:
        """Mixed values [b, s, heads, d] of query [b, s, kv heads, heads of each, d], key and value [b, s, kv heads, 1,
        d], all of the tokens in hand."""
        batch, length, groups, heads, width = query.shape
        copies = kv_copies(groups, heads, self.group.size)
        if copies > 1:
            query = query.reshape(batch, length, groups * copies, heads // copies, width)
            key, value = (part.repeat_interleave(copies, dim=2) for part in (key, value))
        whole = self._tokens_for_heads(torch.cat([query, key, value], dim=3))
        query, key, value = whole.split([query.shape[3], 1, 1], dim=3)
        everything = replace(context, token_numbers=None, document_starts=context.whole_document_starts)
        mixed = self.attention.mix(query, key, value, everything)
        return self._heads_for_tokens(mixed.reshape(batch, self.group.size * length, -1, width))

    def _tokens_for_heads(self, x: Tensor) -> Tensor:
        """[b, s, kv heads, n, d] of the tokens in hand to [b, size x s, kv heads / size, n, d]."""
        batch, length, groups, rows, width = x.shape
        size = self.group.size
        cut = x.view(batch, length, size, groups // size, rows, width)
        by_rank = all_to_all(cut.permute(2, 0, 1, 3, 4, 5).contiguous(), self.group)
        return by_rank.transpose(0, 1).reshape(batch, size * length, groups // size, rows, width)

    def _heads_for_tokens(self, x: Tensor) -> Tensor:
        """[b, size x s, heads / size, d] to [b, s, heads, d] of the tokens in hand."""
        batch, whole, heads, width = x.shape
        size = self.group.size
        cut = x.view(batch, size, whole // size, heads, width)
        by_rank = all_to_all(cut.transpose(0, 1).contiguous(), self.group)
        return by_rank.permute(1, 2, 0, 3, 4).reshape(batch, whole // size, size * heads, width)
