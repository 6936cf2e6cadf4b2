"""Links over torch.distributed: gloo with channels as tags in the pipeline's group, NCCL with a communicator each."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.parallel.groups import DistributedGroup
from megapipe.parallel.links.link import Edge, Link, Transfer

_NCCL_MAXIMUM_BLOCKS = 4


class DistributedLink(Link):
    """Either end of an edge. Messages of one pair of ranks with one tag arrive in order in both backends.

    Args:
        carrier: gloo or NCCL group that holds both ends.
        tag: the messages' tag; NCCL has none and ignores it.
        wait_timeout: what `wait` gives the backend. NCCL gets None: its waits are the stream's, and its watchdog ends
            the process when a peer falls silent.
    """

    def __init__(
        self,
        edge: Edge,
        group: DistributedGroup,
        timeout: float,
        carrier: DistributedGroup,
        tag: int,
        wait_timeout: timedelta | None,
    ) -> None:
        super().__init__(edge, group, timeout)
        self._carrier = carrier
        self._tag = tag
        self.wait_timeout = wait_timeout
        self._started = 0

    def send(self, tensor: Tensor) -> Transfer:
        if not self._sends:
            return super().send(tensor)
        self.check_size(tensor)
        payload = tensor.detach().contiguous()
        number = self._next_number()
        try:
            work = dist.isend(payload, self.peer, self._carrier.process_group, self._tag)
        except RuntimeError as error:
            raise self.failure(number, f"the send failed: {error}") from error
        return _DistributedTransfer(self, number, work, payload)

    def receive(self, into: Tensor) -> Transfer:
        if self._sends:
            return super().receive(into)
        self.check_buffer(into)
        buffer = into.detach()
        number = self._next_number()
        try:
            work = dist.irecv(buffer, self.peer, self._carrier.process_group, self._tag)
        except RuntimeError as error:
            raise self.failure(number, f"the receive failed: {error}") from error
        return _DistributedTransfer(self, number, work, buffer)

    def connect(self, device: torch.device) -> None:
        """Exchange one element with the peer before any message. Returns when both ends have made the call.

        NCCL connects each direction of a communicator at its first use, and that call blocks the host until the peer
        makes the opposite call. Both ends connect here, so that no later send or receive blocks.
        """
        element = torch.zeros(1, dtype=torch.uint8, device=device)
        transfer = self.send(element) if self._sends else self.receive(element)
        transfer.wait()
        self._started = 0

    def _next_number(self) -> int:
        self._started += 1
        return self._started - 1


class _DistributedTransfer(Transfer):
    """Keeps the tensor alive, as the backend's thread or stream works on its memory."""

    def __init__(self, link: DistributedLink, number: int, work: dist.Work | None, tensor: Tensor) -> None:
        self._link = link
        self._number = number
        self._work = work
        self._tensor: Tensor | None = tensor

    def wait(self) -> None:
        if self._work is None:
            return
        try:
            if self._link.wait_timeout is None:
                self._work.wait()
            else:
                self._work.wait(self._link.wait_timeout)
        except RuntimeError as error:
            raise self._link.failure(self._number, f"the transfer failed: {error}") from error
        self._work = self._tensor = None


def gloo_links(
    group: DistributedGroup, edges: Sequence[Edge], timeout: float, device: torch.device
) -> dict[Edge, DistributedLink]:
    """Return this rank's ends of `edges`, connected; the channel is the tag. A collective call over the pipeline's
    group."""
    wait_timeout = timedelta(seconds=timeout)
    links = {
        edge: DistributedLink(edge, group, timeout, group, edge.channel, wait_timeout)
        for edge in edges
        if group.rank in (edge.source, edge.destination)
    }
    return _connected(links, device)


def nccl_links(
    group: DistributedGroup, edges: Sequence[Edge], timeout: float, device: torch.device
) -> dict[Edge, DistributedLink]:
    """Return this rank's ends of `edges`, connected. Each has a communicator of its two ranks, so that no direction
    waits for another.

    A collective call over the pipeline's group. The communicators are split from the pipeline's, run on high-priority
    streams and use few thread blocks, because they copy while kernels compute.
    """
    links: dict[Edge, DistributedLink] = {}
    for edge in edges:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.max_ctas = _NCCL_MAXIMUM_BLOCKS
        options._timeout = timedelta(seconds=timeout)
        pair = dist.split_group(
            group.process_group,
            [sorted((edge.source, edge.destination))],
            timeout=timedelta(seconds=timeout),
            pg_options=options,
            group_desc=str(edge),
        )
        if pair is not None:
            links[edge] = DistributedLink(edge, group, timeout, DistributedGroup(str(edge), pair), 0, None)
    return _connected(links, device)


def _connected(links: dict[Edge, DistributedLink], device: torch.device) -> dict[Edge, DistributedLink]:
    """Connect the links one after another. This cannot hang, because the order is the same on all ranks."""
    for link in links.values():
        link.connect(device)
    return links
