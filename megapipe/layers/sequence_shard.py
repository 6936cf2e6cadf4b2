"""Which tokens a tensor rank holds between tensor-parallel regions (Korthikanti et al. 2022, 2205.05198, 4.2.2).

There norms, dropout, residual sums and position vectors work on a shard of the tokens, rank i of t on the i-th t-th.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from megapipe.parallel.groups import Group
from megapipe.parallel.sequence_collectives import gather_tokens

if TYPE_CHECKING:
    from megapipe.layers.sequence_products import SequenceProducts


@dataclass(frozen=True, eq=False)
class SequenceShards:
    """The ranks that share the tokens of every sample.

    chunks: pieces in which a matrix product's tokens are gathered or scattered, one beside the product of another.
    """

    group: Group
    chunks: int = 1

    def whole(self, x: Tensor) -> Tensor:
        """All ranks' tokens [b, s, h] of x [b, s / t, h]; each rank's gradient is a part of the sum."""
        return gather_tokens(x, self.group)


class OnShards:
    """Mixed into modules that act differently where tokens are sharded.

    sequence: how they are; None for whole samples. partial: own parameters that every rank holds whole and whose
    gradient there is of its own tokens (or heads) alone, so that it has to be summed over the ranks before an update.
    """

    sequence: "SequenceProducts | None" = None
    partial: ClassVar[tuple[str, ...]] = ()


def own_tokens(per_token: Tensor, shards: SequenceShards | None) -> Tensor:
    """This rank's tokens [..., s / t] of what is known of every token [..., s], a view; all without shards."""
    if shards is None:
        return per_token
    share = per_token.shape[-1] // shards.group.size
    return per_token.narrow(-1, shards.group.rank * share, share)


def num_tokens(x: Tensor, shards: SequenceShards | None) -> int:
    """Tokens of the samples that hidden states [b, s / t, h] belong to."""
    return x.shape[1] * (1 if shards is None else shards.group.size)


def shard_sequence(layer: nn.Module, products: "SequenceProducts") -> list[str]:
    """Let a layer take and give hidden states [b, s / t, h]; returns the paths of its `partial` parameters.

    A layer may name parts in `whole_sequence` that it runs on gathered tokens, alike on every rank.
    """
    found = []
    for path, part in _parts_on_shards(layer):
        part.sequence = products
        own = (name for name in part.partial if getattr(part, name) is not None)
        found += [f"{path}.{name}" if path else name for name in own]
    return found


def _parts_on_shards(layer: nn.Module) -> Iterator[tuple[str, OnShards]]:
    whole: tuple[str, ...] = getattr(layer, "whole_sequence", ())
    for path, part in layer.named_modules():
        if isinstance(part, OnShards) and path.partition(".")[0] not in whole:
            yield path, part
