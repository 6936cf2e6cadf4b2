"""Creates the links of a pipeline, of a kind that its devices and hosts support; implements links over
torch.distributed.

gloo uses the pipeline's group, NCCL a communicator for each ordered pair of ranks. Neither uses tags: the messages of
a pair are matched in the order in which both ends start them.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.parallel.groups import DistributedGroup, LaunchError, Work
from megapipe.parallel.in_process import InProcessMesh, in_process_links
from megapipe.parallel.links import Edge, LinkEnd
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.shared_memory import memory_is_shared, shared_memory_links
from megapipe.schedules.validation import STREAMS_PER_PRIORITY

_NCCL_MAXIMUM_BLOCKS = 4
"""Maximum number of thread blocks of a kernel of a link (max_ctas)."""
_BLOCKS_OF_A_MULTIPROCESSOR = 2
"""Number of NCCL's thread blocks that a multiprocessor can run: they have up to 640 threads, and it runs at least
1536."""


class DistributedLink(LinkEnd):
    """Either end of an edge.

    Args:
        carrier: gloo or NCCL group that holds both ends; gloo's is the pipeline's group.

    Attributes:
        wait_timeout: passed to the backend by `wait`. None for NCCL: its waits block the stream, and its watchdog ends
            the process if a peer stops responding.
    """

    def __init__(self, edge: Edge, group: DistributedGroup, timeout: float, carrier: DistributedGroup) -> None:
        super().__init__(edge, group, timeout)
        self._carrier = carrier
        self.wait_timeout = timedelta(seconds=timeout) if carrier is group else None

    def _start(self, tensor: Tensor) -> Work:
        call, verb = (dist.isend, "send") if self._sends else (dist.irecv, "receive")
        buffer, number = tensor.detach().contiguous(), next(self._numbers)
        try:
            work = call(buffer, self.peer, self._carrier.process_group)
        except RuntimeError as error:
            raise self.failure(number, f"the {verb} failed: {error}") from error
        return _DistributedTransfer(self, number, work, buffer)

    def connect(self, device: torch.device) -> None:
        """Exchange one element with the peer before any message. Returns after both ends have called it.

        NCCL connects each direction of a communicator at its first use, and that call blocks the host until the peer
        makes the opposite call. Both ends connect here, so that no later send or receive blocks.
        """
        element = torch.zeros(1, dtype=torch.uint8, device=device)
        transfer = self.send(element) if self._sends else self.receive(element)
        transfer.wait()
        self._numbers = itertools.count()


class _DistributedTransfer(Work):
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
    """Return this rank's ends of `edges`, connected. A collective call over the pipeline's group."""
    links = {edge: DistributedLink(edge, group, timeout, group) for edge in edges if group.rank in edge.pair}
    return _connected(links, device)


def nccl_links(
    group: DistributedGroup, edges: Sequence[Edge], timeout: float, device: torch.device
) -> dict[Edge, DistributedLink]:
    """Return this rank's ends of `edges`, connected. Each ordered pair of ranks has a communicator of its own.

    With one communicator for both directions, a posted receive would hold back the sends that the peer waits for. A
    pair keeps its communicator: later links reuse it.

    A collective call over the pipeline's group. The communicators are split from the pipeline's, run on high-priority
    streams and use few thread blocks, because they copy while kernels compute.

    Raises:
        LaunchError: a rank would have more communicators than torch has streams, or than its GPU can run kernels of at
            once.
    """
    new = [edge.pair for edge in edges if edge.pair not in group.pairs]
    _check_resources([*group.pairs, *new], torch.cuda.get_device_properties(device).multi_processor_count)
    for pairs in disjoint_rounds(new):
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.max_ctas = _NCCL_MAXIMUM_BLOCKS
        options._timeout = timedelta(seconds=timeout)
        mine = next((pair for pair in pairs if group.rank in pair), None)
        name = "links" if mine is None else f"link {mine[0]}->{mine[1]}"
        process_group = dist.split_group(
            group.process_group,
            [sorted(pair) for pair in pairs],
            timeout=timedelta(seconds=timeout),
            pg_options=options,
            group_desc=name,
        )
        group.pairs |= dict.fromkeys(pairs)
        if mine is not None:
            assert process_group is not None  # this rank is in one of the groups
            group.pairs[mine] = DistributedGroup(name, process_group)
    carriers = {edge: group.pairs[edge.pair] for edge in edges}
    links = {
        edge: DistributedLink(edge, group, timeout, carrier)
        for edge, carrier in carriers.items()
        if carrier is not None
    }
    _connected({edge: link for edge, link in links.items() if edge.pair in new}, device)
    # So that no set-up work is in progress when kernels are loaded.
    torch.cuda.synchronize(device)
    return links


def disjoint_rounds(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Divide pairs of ranks into rounds in which no rank appears twice: each pair goes into the first possible round.

    A rank in n pairs needs at least n rounds. Pipelines without wrap-around get exactly that number; in general there
    are fewer than twice as many (greedy edge colouring).
    """
    rounds: list[list[tuple[int, int]]] = []
    busy: list[set[int]] = []
    for pair in pairs:
        for taken, members in zip(rounds, busy, strict=True):
            if members.isdisjoint(pair):
                taken.append(pair)
                members.update(pair)
                break
        else:
            rounds.append([pair])
            busy.append(set(pair))
    return rounds


def _check_resources(pairs: Sequence[tuple[int, int]], multiprocessors: int) -> None:
    counts = Counter(rank for pair in pairs for rank in pair)
    rank, count = counts.most_common(1)[0] if counts else (0, 0)
    if count > STREAMS_PER_PRIORITY:
        raise LaunchError(
            f"pipeline rank {rank} has {count} links, but torch has {STREAMS_PER_PRIORITY} "
            "high-priority streams on a GPU, and links of one stream wait for one another: place "
            f"the stages so that each rank has at most {STREAMS_PER_PRIORITY // 2} neighbours"
        )
    blocks, room = count * _NCCL_MAXIMUM_BLOCKS, multiprocessors * _BLOCKS_OF_A_MULTIPROCESSOR
    if blocks > room:
        raise LaunchError(
            f"pipeline rank {rank} has {count} links, with up to {blocks} thread blocks, but its "
            f"GPU runs only {room} at once ({multiprocessors} multiprocessors): place the stages "
            f"so that each rank has at most {room // (2 * _NCCL_MAXIMUM_BLOCKS)} neighbours"
        )


def _connected(links: dict[Edge, DistributedLink], device: torch.device) -> dict[Edge, DistributedLink]:
    """Connect the links one after another. This cannot hang, because the order is the same on all ranks."""
    for link in links.values():
        link.connect(device)
    return links


LinkKind = Literal["auto", "gloo", "shared_memory", "nccl", "in_process"]


def make_links(
    mesh: Mesh, edges: Sequence[Edge], kind: LinkKind = "auto", timeout: float = 600.0
) -> dict[Edge, LinkEnd]:
    """Create this rank's ends of `edges`, which are within its pipeline.

    A collective call: all ranks of a pipeline call it with the same edges in the same order, at most one edge for each
    ordered pair of ranks.

    Args:
        kind: "auto" uses in_process for threads and nccl on GPUs; on the CPU, shared memory if the whole pipeline is
            on one Linux host, otherwise gloo.
        timeout: seconds that a wait gives the peer.

    Raises:
        ValueError: an impossible edge, or a kind that does not work on this mesh.
        LaunchError: more links than NCCL can have.
        CommunicationError: a peer did not answer.
    """
    _check_edges(edges, mesh.size("pipeline"))
    if not edges:
        return {}
    if isinstance(mesh, InProcessMesh):
        _check_kind(kind, ("in_process",), "ranks that are threads")
        return in_process_links(mesh.group("pipeline"), mesh.threads, edges, timeout)
    group = mesh.group("pipeline")
    # An edge needs two ranks, and these are processes.
    assert isinstance(group, DistributedGroup)
    if mesh.device.type == "cuda":
        _check_kind(kind, ("nccl",), "processes on GPUs")
        return {**nccl_links(group, edges, timeout, mesh.device)}
    _check_kind(kind, ("shared_memory", "gloo"), "processes on CPUs")
    if _uses_shared_memory(group, kind):
        return shared_memory_links(group, edges, timeout)
    return {**gloo_links(group, edges, timeout, mesh.device)}


def _check_edges(edges: Sequence[Edge], pipeline_size: int) -> None:
    seen = set()
    for edge in edges:
        for coordinate in (edge.source, edge.destination):
            if not 0 <= coordinate < pipeline_size:
                raise ValueError(f"{edge}: pipeline coordinate {coordinate} is outside 0..{pipeline_size - 1}")
        if edge.source == edge.destination:
            raise ValueError(f"{edge}: stages on one rank hand tensors over without a link")
        if edge.slots < 1 or edge.loans < 0 or edge.maximum_bytes < 1:
            raise ValueError(
                f"{edge} has {edge.slots} slots of {edge.maximum_bytes} bytes and "
                f"{edge.loans} to lend, but needs at least 1 slot of at least 1 byte"
            )
        if edge.pair in seen:
            raise ValueError(f"{edge} is requested twice: request one for a pair of ranks")
        seen.add(edge.pair)


def _check_kind(kind: LinkKind, possible: tuple[LinkKind, ...], where: str) -> None:
    if kind not in ("auto", *possible):
        raise ValueError(f"{kind} links do not work between {where}: use {' or '.join(possible)}, or auto")


def _uses_shared_memory(group: DistributedGroup, kind: LinkKind) -> bool:
    """Return whether to use shared memory; the same on all ranks of the pipeline."""
    possible = memory_is_shared(group)
    if kind == "shared_memory" and not possible:
        raise ValueError(f"the pipeline of ranks {group.ranks} is not on one Linux host: use gloo links, or auto")
    return possible and kind != "gloo"
