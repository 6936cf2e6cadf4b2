"""State that several ranks hold is compared bit for bit, over any dimension."""

from pathlib import Path

import pytest
import torch

from megapipe.checkpoint.shards import parts_of, shards_of
from megapipe.config.run import PretrainConfig
from megapipe.parallel.mesh import Mesh
from megapipe.training.loop.replica import Replica
from megapipe.training.resilience.guards import ReplicasDifferError, check_replicas
from tests.support.gpt_runs import GPT2_SHAPE, make_config, opened, write_shard
from tests.support.meshes import run_threads

STEP = 1
MATRIX = "blocks.1.attention.qkv.weight"
NORM = "blocks.0.attention_norm.weight"


def flip(replica: Replica, name: str, kind: str) -> None:
    """The lowest bit of the last element that this rank holds of a parameter, or of one of its moments."""
    (part,) = [parts_of(shard)[kind] for shard in shards_of(replica.states()) if shard.name == name]
    part.view(torch.int32)[-1] ^= 1


def compare(mesh: Mesh, config: PretrainConfig, victim: int, name: str, kind: str) -> str:
    """Train a step, compare, flip a bit on one rank, compare again: what the second comparison says."""
    replica, given = opened(mesh, config)
    replica.engine.run(given(0))
    check_replicas(replica.states(), mesh.world, STEP)
    if mesh.rank == victim:
        flip(replica, name, kind)
    try:
        check_replicas(replica.states(), mesh.world, STEP)
    except ReplicasDifferError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("sizes", "zero", "name", "kind", "victim", "ranks"),
    [
        ({"data": 4}, 0, MATRIX, "weights", 2, "on rank 2 against rank 0, 1, 3"),
        ({"data": 4}, 0, MATRIX, "first_moment", 3, "on rank 3 against rank 0, 1, 2"),
        ({"tensor": 2, "data": 2}, 0, NORM, "weights", 1, "on rank 1 against rank 0, 2, 3"),
        ({"pipeline": 2, "tensor": 2}, 0, "embedding.word.weight", "weights", 2, "(no majority)"),
        ({"data": 2, "tensor": 2}, 2, NORM, "weights", 3, "(no majority)"),
    ],
    ids=str,
)
def test_one_flipped_bit_names_the_parameter_and_the_rank(
    tmp_path: Path, sizes: dict[str, int], zero: int, name: str, kind: str, victim: int, ranks: str
) -> None:
    config = make_config(write_shard(tmp_path), GPT2_SHAPE, parallel={"data": None, **sizes}, zero={"stage": zero})
    messages = run_threads(sizes, compare, config, victim, name, kind)
    assert len(set(messages)) == 1
    assert messages[0].startswith(
        f"after step {STEP} ranks differ in state that must be equal: {kind} of {name} (unit "
    )
    assert ranks in messages[0]
    assert messages[0].count(" on rank ") == 1
