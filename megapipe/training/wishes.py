"""What one rank wishes, as all ranks know it."""

from collections.abc import Callable

import torch

from megapipe.parallel.mesh import Mesh


def start_asking(mesh: Mesh, wish: bool) -> Callable[[], bool]:
    """Begin to find out whether any rank wishes it; a collective call, between steps. What it returns waits for the
    other ranks to ask, and tells."""
    found = torch.tensor(float(wish), device=mesh.device)
    work = mesh.world.all_reduce(found, "max", async_op=True)

    def answer() -> bool:
        work.wait()
        return bool(found)

    return answer


def any_rank(mesh: Mesh, wish: bool) -> bool:
    """Whether any rank wishes it. A collective call, between steps."""
    return start_asking(mesh, wish)()
