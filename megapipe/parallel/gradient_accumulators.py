"""Where backwards of one unit add gradients up, and what a replica keeps of them once they are reduced."""

import torch
from torch import Tensor

from megapipe.parallel.sharding import Sharding, allocate, free, is_allocated, transient
from megapipe.parallel.table_shard import TableShard


class GradientAccumulators(TableShard):
    """The gradient buffers of a unit's state; see `UnitState`, which says what else is in them."""

    sharding: Sharding
    accumulate_dtype: torch.dtype

    def _make_accumulators(self, size: int, device: torch.device | str, num_uses: int, gradient_buffers: int) -> None:
        """Buffers of so many elements. They are cleared, except where their memory comes and goes."""
        self.num_uses = num_uses
        buffer = transient if self.sharding.gradients else torch.zeros
        self.gradients = [
            buffer(size, dtype=self.accumulate_dtype, device=device) for _ in range(gradient_buffers * num_uses)
        ]
        self.gradient_shards: list[Tensor] = []
        if self.sharding.gradients:
            shard_size = self.shard.stop - self.shard.start
            self.gradient_shards = [gradient.new_zeros(shard_size) for gradient in self.gradients]
        self._has_reduced = [False] * gradient_buffers

    def gradients_of(self, update: int) -> list[Tensor]:
        """The accumulators of an update, by use. update: absolute number, that of the version it is computed with."""
        buffer = update * self.num_uses % len(self.gradients)
        return self.gradients[buffer : buffer + self.num_uses]

    def sum_uses(self, update: int = 0) -> None:
        """Add every use's gradient into the first accumulator of an update, in order of use."""
        total, *others = self.gradients_of(update)
        for other in others:
            total.add_(other)

    def zero_gradients(self, update: int = 0) -> None:
        """Clear the accumulators of an update for the next one that takes their buffer."""
        self._has_reduced[update % len(self._has_reduced)] = False
        if self.sharding.gradients:
            return
        for gradient in self.gradients_of(update):
            gradient.zero_()

    def reduced_gradient(self, update: int = 0) -> Tensor:
        """This rank's part of the gradient of an update, once it is reduced."""
        if self.sharding.gradients:
            return self.gradient_shards[update % len(self.gradient_shards)]
        return self.gradients_of(update)[0][self.shard]

    def has_open_gradients(self, update: int = 0) -> bool:
        """Whether there is memory for the backwards of an update to add to."""
        return is_allocated(self.gradients_of(update)[0])

    def open_gradients(self, update: int = 0) -> None:
        """Give the accumulator of an update's sharded gradients memory, cleared."""
        (gradient,) = self.gradients_of(update)
        allocate(gradient)
        gradient.zero_()

    def close_gradients(self, update: int = 0) -> None:
        """Add what a reduction left in this rank's part of the accumulator to the shard, and free the accumulator."""
        (gradient,) = self.gradients_of(update)
        buffer = update % len(self.gradient_shards)
        shard, part = self.gradient_shards[buffer], gradient[self.shard]
        if self._has_reduced[buffer]:
            shard.add_(part)
        else:
            shard.copy_(part)
        self._has_reduced[buffer] = True
        free(gradient)
