"""Flags that one rank sets and all ranks read."""

from collections.abc import Callable

import numpy as np

from megapipe.parallel.mesh import Mesh
from megapipe.parallel.transfer import tensor_on


def start_any_rank(mesh: Mesh, flag: bool) -> Callable[[], bool]:
    """Start to reduce a flag over all ranks; a collective call, between steps. The returned function waits for the
    other ranks and returns whether any of them set it."""
    total = tensor_on(np.array([flag], np.float32), mesh.device)
    work = mesh.world.all_reduce(total, "max", async_op=True)

    def answer() -> bool:
        work.wait()
        return bool(total)

    return answer


def any_rank(mesh: Mesh, flag: bool) -> bool:
    """Return whether any rank sets the flag. A collective call, between steps."""
    return start_any_rank(mesh, flag)()
