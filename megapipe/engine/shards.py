"""Tensors in transit between a stage of the route and the vocabulary shards on all pipeline ranks
(`schedules.vocabulary`).

Output layer: the last hidden states are broadcast to all shards, and their gradients are summed. Input embedding: the
rows that shards look up are summed for the first stage, and the gradient of the sum is broadcast. The passes of all
shards have the same order on all ranks. So do these collectives, because a broadcast starts with a pass and a sum
starts at its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.engine.stage import TensorSpec
from megapipe.engine.step import StepState
from megapipe.parallel.groups import Group
from megapipe.schedules.schedule import Header


@dataclass(frozen=True)
class Shards:
    """The shard of an output layer or an input embedding on one rank.

    stage: its id. end: the stage at that end of the route. is_home: that stage is on this rank. group: all ranks that
    shard the layer. source: rank in the group that broadcasts. specs: the one tensor between the two stages.
    """

    stage: int
    end: int
    is_home: bool
    group: Group
    source: int
    specs: Sequence[TensorSpec]
    device: torch.device

    @classmethod
    def of(
        cls, header: Header, stage: int, group: Group, specs: Sequence[TensorSpec], device: torch.device
    ) -> "Shards":
        """Return the shard that `stage` is. group: pipeline and tensor ranks, with tensor ranks adjacent."""
        end = header.routes[0][-1 if stage in header.outputs else 0]
        home = header.stages[end].rank
        source = home * (group.size // header.num_ranks)
        return cls(stage, end, header.stages[stage].rank == home, group, source, specs, device)

    def broadcast(self, step: StepState, microbatch: int, own: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        """Return the tensors of the stage at the end of the route: `own` on its rank, otherwise those that arrive."""
        tensors = tuple(spec.allocate(self.device) for spec in self.specs) if own is None else own
        for each in tensors:
            work = self.group.broadcast(each, self.source, async_op=True)
            if self.group.rank == self.source:
                step.handed_out[self.stage, microbatch] = each, work
            else:
                work.wait()
                if self.is_home:
                    step.handed_out[self.stage, microbatch] = each, None
        return tensors

    def start_sum(self, step: StepState, microbatch: int, tensors: tuple[Tensor, ...]) -> None:
        """Start summing tensors of a micro-batch over all shards."""
        for each in tensors:
            step.summed[self.stage, microbatch] = each, self.group.all_reduce(each, async_op=True)

    def end_broadcast(self, step: StepState, microbatch: int) -> None:
        """Wait for the broadcast of a micro-batch, if this rank has started one."""
        _, work = step.handed_out.pop((self.stage, microbatch), (None, None))
        if work is not None:
            work.wait()

    def end_others(self, step: StepState) -> None:
        """Wait for the sums whose result is for other ranks."""
        for key in () if self.is_home else [key for key in step.summed if key[0] == self.stage]:
            step.summed.pop(key)[1].wait()

    def end_all(self, step: StepState) -> None:
        """Wait for all collectives in progress, except sums that the stage at the end of the route on this rank still
        needs."""
        self.end_others(step)
        for _, microbatch in [key for key in step.handed_out if key[0] == self.stage]:
            self.end_broadcast(step, microbatch)

    def sum_of(self, step: StepState, microbatch: int) -> tuple[Tensor, ...]:
        """Return the sum of a micro-batch, on the rank of the stage at the end of the route."""
        summed, work = step.summed.pop((self.stage, microbatch))
        work.wait()
        return (summed,)
