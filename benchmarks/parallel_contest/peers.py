"""torch's data parallelism for a plain GPT: DistributedDataParallel and FSDP2 (`fully_shard`)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from plain_gpt import PlainGpt
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from .setting import BETAS, CLIP, DECAY, LEARNING_RATE, Setting, Step

LastOnly = Callable[[bool], AbstractContextManager[object]]
"""Returns the context manager in which a backward runs. Its argument: whether this is the step's last backward, which
is the only one that communicates."""


def alone(model: PlainGpt, setting: Setting, rank: int) -> Step:
    """Return a step that computes this rank's part of the batch, without communication."""
    return _step(model, setting, rank, lambda last: nullcontext())


def ddp(model: PlainGpt, setting: Setting, rank: int) -> Step:
    """Return a step of DistributedDataParallel, whose gradients are views of its buckets."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _step(wrapped, setting, rank, lambda last: nullcontext() if last else wrapped.no_sync())


def fsdp(model: PlainGpt, setting: Setting, rank: int, reshard: bool, replicas: int) -> Step:
    """Return a step of FSDP2, with `fully_shard` for every block and for the other layers.

    reshard: free gathered weights between forward and backward.
    """
    mesh = init_device_mesh("cpu", (replicas,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    sharded = fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

    def last_only(last: bool) -> AbstractContextManager[object]:
        sharded.set_requires_gradient_sync(last)
        return nullcontext()

    return _step(sharded, setting, rank, last_only)


def _step(model: nn.Module, setting: Setting, rank: int, last_only: LastOnly) -> Step:
    """Return a step as a user would write it: accumulate gradients, clip them, and step torch's fused AdamW."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=BETAS,
        fused=True,
    )
    batches = setting.batches(rank)

    def step() -> float:
        total = 0.0
        for number, (tokens, labels) in enumerate(batches, 1):
            with last_only(number == len(batches)):
                loss = model(tokens, labels) / len(batches)
                loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step
