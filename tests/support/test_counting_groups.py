"""Counts of groups and links, compared with the calls of torch.distributed that a dispatch mode sees."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megapipe.config.run import PretrainConfig
from megapipe.engine.step import StepInput
from megapipe.parallel.mesh import Mesh
from megapipe.training.loop.replica import Replica
from tests.support.counting_groups import Place, Traffic, counted, counted_links
from tests.support.gpt_runs import LLAMA_SHAPE, load_batches, make_config, write_shard
from tests.support.meshes import Backend, run_mesh


def every_collective(mesh: Mesh) -> Traffic:
    traffic = Traffic()
    group = counted(mesh, traffic).group("data")
    halves = torch.arange(12, dtype=torch.bfloat16).view(2, 6)
    group.all_reduce(halves.clone(), async_op=True).wait()
    assert group.reduce_scatter(halves).tolist() == (2 * halves[mesh.rank]).tolist()
    assert group.all_gather(halves[mesh.rank]).shape == (2, 6)
    group.broadcast(halves.clone(), source=0)
    group.barrier()
    assert group.all_gather_object(mesh.rank) == [0, 1]
    return traffic


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_collectives_are_counted_by_their_whole_buffer(backend: Backend) -> None:
    for traffic in run_mesh({"data": 2}, every_collective, backend=backend):
        places = {Place("data", name) for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast")}
        assert {place for place, elements in traffic.elements.items() if elements} == places
        for place in places:
            assert (traffic.calls[place], traffic.elements[place], traffic.bytes[place]) == (1, 12, 24)
        assert traffic.calls[Place("data", "barrier")] == traffic.calls[Place("data", "all_gather_object")] == 1


class TorchsCalls(TorchDispatchMode):
    """How many collectives torch starts while the mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name()
        return func(*args, **(kwargs or {}))


def step_calls(mesh: Mesh, config: PretrainConfig) -> tuple[int, int, int]:
    """Return counted collectives and messages of one step, and the collectives that torch starts uncounted."""
    traffic = Traffic()
    sizes = {name: mesh.size(name) for name in ("data", "tensor")}
    config = replace(config, parallel=replace(config.parallel, **sizes))

    def step(where: Mesh) -> None:
        replica = Replica(config, where)
        (batch,) = load_batches(replica, config, mesh)
        traffic.clear()
        with torchs:
            replica.engine.run(StepInput(0, batch.contexts, batch.token_counts, 1e-3))

    torchs = TorchsCalls()
    with counted_links(traffic):
        step(counted(mesh, traffic))
    sends = traffic.calls[Place("link", "send")]
    collectives = sum(traffic.calls.values()) - sends
    torchs = TorchsCalls()
    step(mesh)
    return collectives, sends, torchs.count


@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "tensor": 2},
        *(pytest.param({name: 2}, marks=pytest.mark.exhaustive) for name in ("data", "tensor")),
    ],
    ids=str,
)
def test_every_collective_is_counted(tmp_path: Path, sizes: dict[str, int]) -> None:
    options: dict[str, Any] = {"batch": {"global_size": 4}}
    config = make_config(write_shard(tmp_path), LLAMA_SHAPE, **options)
    for collectives, sends, torchs in run_mesh(sizes, step_calls, config):
        assert collectives == torchs > 0
        assert sends == 0


def test_messages_are_counted_by_their_sender(tmp_path: Path) -> None:
    config = make_config(write_shard(tmp_path), LLAMA_SHAPE, parallel={"pipeline": 2})
    for _, sends, _ in run_mesh({"pipeline": 2}, step_calls, config):
        assert sends == config.batch.global_size
