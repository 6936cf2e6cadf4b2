"""Links between ranks that are threads of one process: the buffers meet in memory, and whoever comes second copies."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from megapipe.parallel.groups import Group, ThreadWorld
from megapipe.parallel.groups.threads import Deposit
from megapipe.parallel.links.link import Edge, LinkEnd, Transfer


class _Posted(Transfer):
    """One posted send or receive. On a GPU, events order the streams of the two threads."""

    def __init__(self, world: ThreadWorld, link: LinkEnd, number: int, tensor: Tensor) -> None:
        self._world = world
        self._link = link
        self._number = number
        self._device = tensor.device
        self.deposit = Deposit(tensor)
        self.copied: torch.cuda.Event | None = None
        self.finished = False

    def wait(self) -> None:
        with self._world.changed:
            self._world.wait_for(lambda: self.finished, lambda: self._link.waiting(self._number), self._link.timeout)
        if self.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self.copied)


class _Meeting:
    """Where the two ends of an edge post. One side of it is always empty."""

    def __init__(self) -> None:
        self.sends: deque[_Posted] = deque()
        self.receives: deque[_Posted] = deque()


class InProcessLink(LinkEnd):
    """Either end of an edge between threads. A send is over once its tensor has been copied into the receiver's."""

    def __init__(self, edge: Edge, group: Group, timeout: float, world: ThreadWorld, meeting: _Meeting) -> None:
        super().__init__(edge, group, timeout)
        self._world = world
        self._meeting = meeting
        self._started = 0

    def send(self, tensor: Tensor) -> Transfer:
        if not self._sends:
            return super().send(tensor)
        self.check_size(tensor)
        return self._post(tensor, self._meeting.sends)

    def receive(self, into: Tensor) -> Transfer:
        if self._sends:
            return super().receive(into)
        self.check_buffer(into)
        return self._post(into, self._meeting.receives)

    def _post(self, tensor: Tensor, mine: deque[_Posted]) -> Transfer:
        posted = _Posted(self._world, self, self._started, tensor.detach())
        self._started += 1
        with self._world.changed:
            mine.append(posted)
            if self._meeting.sends and self._meeting.receives:
                self._copy(posted._number, self._meeting.sends.popleft(), self._meeting.receives.popleft())
                self._world.changed.notify_all()
        return posted

    def _copy(self, number: int, send: _Posted, receive: _Posted) -> None:
        source, target = send.deposit.take(), receive.deposit.take()
        if (source.dtype, source.numel()) != (target.dtype, target.numel()):
            sent, expected = (f"{tensor.numel()} elements of {tensor.dtype}" for tensor in (source, target))
            raise self.failure(number, f"{sent} were sent and {expected} expected")
        target.view(-1).copy_(source.reshape(-1))
        if target.is_cuda:
            send.copied = receive.copied = torch.cuda.current_stream(target.device).record_event()
        send.finished = receive.finished = True


def in_process_links(group: Group, world: ThreadWorld, edges: Sequence[Edge], timeout: float) -> dict[Edge, LinkEnd]:
    """This rank's ends of `edges`. A collective call: the source makes the meeting place and hands it over."""
    mine = {edge: _Meeting() for edge in edges if edge.source == group.rank}
    meetings = {edge: meeting for made in group.all_gather_object(mine) for edge, meeting in made.items()}
    return {
        edge: InProcessLink(edge, group, timeout, world, meeting)
        for edge, meeting in meetings.items()
        if group.rank in (edge.source, edge.destination)
    }
