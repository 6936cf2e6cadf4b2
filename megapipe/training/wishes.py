"""What one rank wishes, as all ranks know it."""

import torch

from megapipe.parallel.mesh import Mesh


def any_rank(mesh: Mesh, wish: bool) -> bool:
    """Whether any rank wishes it. A collective call, between steps."""
    found = torch.tensor(float(wish), device=mesh.device)
    mesh.world.all_reduce(found, "max")
    return bool(found)
