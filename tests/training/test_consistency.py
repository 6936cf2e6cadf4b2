"""What several ranks hold is compared bit for bit, whichever dimension they share it over."""

from pathlib import Path

import pytest
import torch

from megapipe.config.run import PretrainConfig
from megapipe.parallel.mesh import Mesh
from megapipe.training.consistency import ReplicasDifferError, check_replicas
from megapipe.training.families import family_of
from megapipe.training.replica import Replica
from tests.support.gpt_runs import GPT2_SHAPE, make_config, write_shard
from tests.support.meshes import run_threads

STEP = 7


def flip(replica: Replica, name: str, moment: str | None = None) -> None:
    """The lowest bit of the last element that this rank holds of a parameter, or of one of its moments."""
    for state in replica.states():
        for segment in state.table:
            if segment.spec.name == name:
                part = state.in_shard(state.master if moment is None else state.moments[moment], segment)
                part.view(torch.int32)[-1] ^= 1
                return
    raise AssertionError(f"no {name} here")


def compare(mesh: Mesh, config: PretrainConfig, flips: dict[int, tuple[str, str | None]]) -> str:
    replica = Replica(config, mesh, family_of(config).layers)
    check_replicas(replica.states(), mesh.world, STEP)
    if mesh.rank in flips:
        flip(replica, *flips[mesh.rank])
    try:
        check_replicas(replica.states(), mesh.world, STEP)
    except ReplicasDifferError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("sizes", "name", "victim", "told"),
    [
        ({"data": 3}, "blocks.1.attention.qkv.weight", 2, "on rank 2 against rank 0, 1;"),
        ({"tensor": 2, "data": 2}, "blocks.0.attention_norm.weight", 1, "on rank 1 against rank 0, 2, 3;"),
        ({"pipeline": 2, "tensor": 2}, "embedding.word.weight", 2, "(no majority)"),
    ],
)
def test_one_flipped_bit_names_the_parameter_and_the_rank(
    tmp_path: Path, sizes: dict[str, int], name: str, victim: int, told: str
) -> None:
    config = make_config(write_shard(tmp_path), GPT2_SHAPE, parallel={"data": None, **sizes})
    messages = run_threads(sizes, compare, config, {victim: (name, None)})
    assert len(set(messages)) == 1
    assert f"after step {STEP} ranks differ" in messages[0]
    assert f"weights of {name}" in messages[0]
    assert told in messages[0] or told.replace(";", ".") in messages[0]
