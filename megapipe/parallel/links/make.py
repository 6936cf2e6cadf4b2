"""Makes the links of a pipeline, of the kind that its devices and hosts allow."""

from collections.abc import Sequence
from typing import Literal

from megapipe.parallel.groups import DistributedGroup
from megapipe.parallel.in_process import InProcessMesh
from megapipe.parallel.links.distributed import gloo_links, nccl_links
from megapipe.parallel.links.in_process import in_process_links
from megapipe.parallel.links.link import Edge, LinkEnd
from megapipe.parallel.links.shared_memory_setup import host_identity, shared_memory_links
from megapipe.parallel.mesh import Mesh

LinkKind = Literal["auto", "gloo", "shared_memory", "nccl", "in_process"]


def make_links(
    mesh: Mesh, edges: Sequence[Edge], kind: LinkKind = "auto", timeout: float = 600.0
) -> dict[Edge, LinkEnd]:
    """This rank's ends of `edges`, which run within its pipeline.

    A collective call: all ranks of a pipeline call it with the same edges in the same order, at most one edge for each
    ordered pair of ranks.

    Args:
        kind: "auto" takes in_process for threads, nccl on GPUs, and on the CPU shared memory where the whole pipeline
            is on one Linux host, else gloo.
        timeout: seconds that a wait gives the peer.

    Raises:
        ValueError: an edge that cannot be, or a kind that does not work on this mesh.
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
    assert isinstance(group, DistributedGroup)  # an edge needs two ranks, and these are processes
    if mesh.device.type == "cuda":
        _check_kind(kind, ("nccl",), "processes on GPUs")
        return {**nccl_links(group, edges, timeout, mesh.device)}
    _check_kind(kind, ("shared_memory", "gloo"), "processes on CPUs")
    if _memory_is_shared(group, kind):
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
                f"{edge} has {edge.slots} slots of {edge.maximum_bytes} bytes and {edge.loans} to lend, but needs at "
                "least 1 slot of at least 1 byte"
            )
        if edge.pair in seen:
            raise ValueError(f"{edge} is requested twice: one link carries everything that a rank sends to another")
        seen.add(edge.pair)


def _check_kind(kind: LinkKind, possible: tuple[LinkKind, ...], where: str) -> None:
    if kind not in ("auto", *possible):
        raise ValueError(f"{kind} links do not work between {where}: use {' or '.join(possible)}, or auto")


def _memory_is_shared(group: DistributedGroup, kind: LinkKind) -> bool:
    """Whether to use shared memory; all ranks of the pipeline decide alike."""
    hosts = set(group.all_gather_object(host_identity()))
    if kind != "auto":
        if kind == "shared_memory" and (len(hosts) > 1 or ("", "") in hosts):
            raise ValueError(f"the pipeline of ranks {group.ranks} is not on one Linux host: use gloo links, or auto")
        return kind == "shared_memory"
    return len(hosts) == 1 and ("", "") not in hosts
