"""megapipe's own checkpoints as source and target: any slice of any layout, and a run that resumes from one."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megapipe.checkpoint import RunState, save
from megapipe.config.parallel import ZeroConfig
from megapipe.conversion.megapipe_format import MegapipeSource
from megapipe.parallel.mesh import Mesh
from megapipe.training.loop.replica import Replica
from tests.checkpoint.runs import assert_same_bits, config_in, run
from tests.conversion.test_command import convert
from tests.conversion.test_command import run as command
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE, Shard, assembled, shards, write_shard
from tests.support.meshes import run_threads

MODEL = replace(LLAMA_SHAPE, max_positions=64, init_std=0.2)
"""A vocabulary of 61 tokens is sharded with padding."""
MOMENTS = ("first_moment", "second_moment")
SIZES = {"data": 2, "tensor": 2, "pipeline": 2}
RUN = RunState(3, 24, {"seed": 7}, "fp32", ((3, 4.25),), {"model": asdict(MODEL)})


def saved(mesh: Mesh, folder: Path) -> dict[str, list[Shard]]:
    """Save on one rank; return its shards of each kind."""
    config = config_in(folder, "unused", MODEL, data={"sequence_length": 16}, parallel=dict(SIZES))
    config.zero = ZeroConfig(stage=1)
    replica = Replica(config, mesh)
    states = replica.states()
    for state in states:
        # Functions of the weights, so that tensor ranks hold the same of what they do not share.
        state.moments = {MOMENTS[0]: state.master * 2, MOMENTS[1]: state.master * 3}
    save(folder, states, {state.name: 3 for state in states}, RUN, mesh)
    return {
        "weights": shards(states, [state.master for state in states]),
        **{kind: shards(states, [state.moments[kind] for state in states]) for kind in MOMENTS},
    }


Saved = tuple[Path, dict[str, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return a checkpoint of eight ranks, and its whole tensors by kind and name."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks: Sequence[dict[str, list[Shard]]] = run_threads(SIZES, saved, folder)
    return folder, {kind: assembled([rank[kind] for rank in ranks]) for kind in ranks[0]}


def assert_holds(folder: Path, expected: dict[str, dict[str, Tensor]]) -> None:
    """All tensors of all ranks."""
    source = MegapipeSource(folder)
    assert source.contents.kinds == list(expected)
    assert {(each.kind, each.name) for each in source.contents.tensors} == {
        (kind, name) for kind, tensors in expected.items() for name in tensors
    }
    for tensor in source.contents.tensors:
        assert torch.equal(source.read(tensor), expected[tensor.kind][tensor.name]), tensor.name
    source.close()


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_slice(checkpoint: Saved, data: st.DataObject) -> None:
    folder, expected = checkpoint
    source = MegapipeSource(folder)
    tensor = data.draw(st.sampled_from(source.contents.tensors))
    bounds = [data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True)) for n in tensor.shape]
    index = tuple(slice(min(pair), max(pair)) for pair in bounds)
    values = source.read(tensor, index)
    assert values.is_contiguous()
    assert torch.equal(values, expected[tensor.kind][tensor.name][index])
    source.close()


def test_copies_have_all_tensors_of_all_ranks(checkpoint: Saved, tmp_path: Path) -> None:
    folder, expected = checkpoint
    copy, half, bare = (tmp_path / name for name in ("copy", "half", "bare"))
    assert_holds(folder, expected)
    convert(folder, "megapipe", copy)
    assert "equal:" in command("diff", folder, copy).out
    command("verify", copy)
    copied = MegapipeSource(copy)
    assert copied.manifest.run == MegapipeSource(folder).manifest.run
    assert copied.contents.applied_updates == dict.fromkeys(expected["weights"], 3)
    convert(folder, "megapipe", half, "--precision", "bf16")
    halves = {name: tensor.bfloat16() for name, tensor in expected["weights"].items()}
    assert_holds(half, {**expected, "weights": halves})
    convert(folder, "megapipe", bare, "--weights_only")
    assert_holds(bare, {"weights": expected["weights"]})
    assert not MegapipeSource(bare).contents.applied_updates


@pytest.mark.slow
def test_a_run_resumes_from_a_converted_checkpoint(tmp_path: Path) -> None:
    """Bit for bit as from the checkpoint itself."""
    corpus = write_shard(tmp_path / "corpus")
    layout = {"data": 2}
    config = config_in(tmp_path / "run", corpus, GPT2_SHAPE, checkpoint={"every": 2})
    run(layout, config, 2)
    step = "checkpoints/step-00000002"
    convert(tmp_path / "run" / step, "megapipe", tmp_path / "other" / step)
    expected = run(layout, config, 4)
    config.training = replace(config.training, directory=str(tmp_path / "other"))
    outcome = run(layout, config, 4)
    assert outcome.start == expected.start == 2
    assert_same_bits(outcome, expected)
