"""Flags that one rank sets and all ranks read."""

from collections.abc import Callable

import torch

from megapipe.parallel.mesh import Mesh


def start_any_rank(mesh: Mesh, flag: bool) -> Callable[[], bool]:
    """Start to reduce a flag over all ranks; a collective call, between steps. The returned function waits for the
    other ranks and returns whether any of them set it."""
    total = torch.tensor(float(flag), device=mesh.device)
    work = mesh.world.all_reduce(total, "max", async_op=True)

    def answer() -> bool:
        work.wait()
        return bool(total)

    return answer


def any_rank(mesh: Mesh, flag: bool) -> bool:
    """Return whether any rank sets the flag. A collective call, between steps."""
    return start_any_rank(mesh, flag)()
