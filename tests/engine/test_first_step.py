"""The first step over links whose first use in each direction blocks until both ends use it, as with NCCL."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megapipe.parallel import pipeline_links
from megapipe.parallel.mesh import Mesh
from tests.engine.library_models import adoptable, assert_same_bits, merged, plain, train
from tests.support.meshes import run_mesh

PATIENCE = timedelta(seconds=20)


def train_over_connecting_links(mesh: Mesh, layers: list[nn.Module]) -> Any:
    """Train over gloo links whose first use blocks like NCCL's; the first use must be during start-up."""
    store, used = dist.distributed_c10d._get_default_store(), []
    send, receive = dist.isend, dist.irecv

    def connecting(call: Callable[..., Any], sends: bool) -> Callable[..., Any]:
        def first_use_waits(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup) -> dist.Work | None:
            source, destination = (mesh.rank, peer) if sends else (peer, mesh.rank)
            link = f"{source}->{destination}"
            if link not in used:
                used.append(link)
                store.set(f"{link} used by {mesh.rank}", "")
                store.wait([f"{link} used by {peer}"], PATIENCE)
            return call(tensor, peer, group)

        return first_use_waits

    dist.isend, dist.irecv = connecting(send, True), connecting(receive, False)
    pipeline_links.memory_is_shared = lambda group: False  # as on several hosts
    return train(mesh, layers, "interleaved_1f1b", 4, {"chunks": 2}), used


def test_first_steps_do_not_hang_if_first_uses_block() -> None:
    layers = adoptable()
    outcomes, used = zip(*run_mesh({"pipeline": 2}, train_over_connecting_links, layers), strict=True)
    assert_same_bits(merged(list(outcomes)), plain(layers, 4))
    assert len(used[0]) == len(used[1]) == 2
