"""The last hidden states on their way to all shards of an output layer, and the sum of their gradients.

All pipeline ranks share the output layer (`schedules.vocabulary`). Their passes have one order on all ranks, and so do
the collectives: a broadcast starts with a forward, and a sum of gradients at the end of a backward.
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
    """The shard of an output layer on one rank.

    stage: its id. last: the last stage of the route. is_home: that stage is on this rank. group: all ranks that share
    the layer. source: rank in the group that broadcasts the hidden states. specs: tensors that the last stage returns;
    one.
    """

    stage: int
    last: int
    is_home: bool
    group: Group
    source: int
    specs: Sequence[TensorSpec]
    device: torch.device

    @classmethod
    def of(
        cls, header: Header, rank: int, group: Group, specs: Sequence[TensorSpec], device: torch.device
    ) -> "Shards":
        """Return the shard of a pipeline rank. group: pipeline and tensor ranks, tensor ranks adjacent."""
        last = header.routes[0][-1]
        home = header.stages[last].rank
        source = home * (group.size // header.num_ranks)
        return cls(header.vocabulary[rank], last, rank == home, group, source, specs, device)

    def hidden(self, step: StepState, microbatch: int) -> tuple[Tensor, ...]:
        """Return the last hidden states of a micro-batch, which this rank has or receives."""
        if self.is_home:
            found = tuple(each.detach() for each in step.activations.pop((self.last, microbatch)))
        else:
            found = tuple(spec.allocate(self.device) for spec in self.specs)
        for each in found:
            work = self.group.broadcast(each, self.source, async_op=True)
            if self.group.rank == self.source:
                step.handed_out[microbatch] = work
            else:
                work.wait()
        return found

    def start_sum(self, step: StepState, microbatch: int, gradients: tuple[Tensor, ...]) -> None:
        """Start to sum the gradients of a micro-batch's hidden states over all shards."""
        for each in gradients:
            step.summed[microbatch] = each, self.group.all_reduce(each, async_op=True)

    def end_sums(self, step: StepState, microbatch: int | None = None) -> None:
        """End what is under way but for the last stage here. microbatch: whose backward comes next; None at the end of
        a step."""
        if microbatch in step.handed_out:
            step.handed_out.pop(microbatch).wait()
        for number in () if self.is_home else tuple(step.summed):
            step.summed.pop(number)[1].wait()

    def gradients(self, step: StepState, microbatch: int) -> tuple[Tensor, ...]:
        """Return the gradient of a micro-batch's hidden states on the rank of the last stage."""
        gradient, work = step.summed.pop(microbatch)
        work.wait()
        return (gradient,)
