"""One test function over a mesh, run by processes over gloo or by threads of this process."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from megapipe.config.parallel import MeshShape
from megapipe.parallel.in_process import in_process_meshes, run_in_process
from megapipe.parallel.launch import connected_mesh
from tests.support.ranks import run_ranks

Backend = Literal["processes", "threads"]


def run_mesh(
    sizes: Mapping[str, int],
    function: Callable[..., Any],
    *args: Any,
    backend: Backend = "processes",
    timeout: float = 60.0,
) -> list[Any]:
    """Run `function(mesh, *args)` on every rank of a mesh of `sizes` and return the results in rank order."""
    if backend == "threads":
        return run_threads(sizes, function, *args, timeout=timeout)
    return run_ranks(MeshShape(sizes).world_size, in_mesh, dict(sizes), function, *args, timeout=timeout)


def run_threads(
    sizes: Mapping[str, int], function: Callable[..., Any], *args: Any, timeout: float = 60.0, device: str = "cpu"
) -> list[Any]:
    """Run `function(mesh, *args)` on every rank of an in-process mesh and return the results in rank order."""
    return run_in_process(in_process_meshes(sizes, device, timeout), function, *args)


def in_mesh(rank: int, sizes: Mapping[str, int], function: Callable[..., Any], *args: Any) -> Any:
    """For `run_ranks`: `function(mesh, *args)` on a rank of a mesh of `sizes`."""
    return function(connected_mesh(MeshShape(sizes), torch.device("cpu"), timeout=60.0), *args)
