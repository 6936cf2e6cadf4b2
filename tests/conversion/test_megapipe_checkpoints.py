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
from megapipe.conversion.command import main
from megapipe.conversion.megapipe_format import MegapipeSource
from megapipe.parallel.mesh import Mesh
from megapipe.training.loop.replica import Replica
from tests.checkpoint.runs import assert_same_bits, config_in, run
from tests.conversion.test_round_trips import logits_of
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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Tensor]]]:
    """Return a checkpoint of eight ranks, and its whole tensors by kind and name."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks: Sequence[dict[str, list[Shard]]] = run_threads(SIZES, saved, folder)
    return folder, {kind: assembled([rank[kind] for rank in ranks]) for kind in ranks[0]}


def test_all_tensors_of_all_ranks(checkpoint: tuple[Path, dict[str, dict[str, Tensor]]]) -> None:
    folder, expected = checkpoint
    source = MegapipeSource(folder)
    assert source.contents.kinds == ["weights", *MOMENTS]
    assert {(each.kind, each.name) for each in source.contents.tensors} == {
        (kind, name) for kind, tensors in expected.items() for name in tensors
    }
    for tensor in source.contents.tensors:
        assert torch.equal(source.read(tensor), expected[tensor.kind][tensor.name]), tensor.name
    source.close()


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_slice(checkpoint: tuple[Path, dict[str, dict[str, Tensor]]], data: st.DataObject) -> None:
    folder, expected = checkpoint
    source = MegapipeSource(folder)
    tensor = data.draw(st.sampled_from(source.contents.tensors))
    bounds = [data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True)) for n in tensor.shape]
    index = tuple(slice(min(pair), max(pair)) for pair in bounds)
    values = source.read(tensor, index)
    assert values.is_contiguous()
    assert torch.equal(values, expected[tensor.kind][tensor.name][index])
    source.close()


def test_copies_are_equal_and_verified(
    checkpoint: tuple[Path, dict[str, dict[str, Tensor]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, expected = checkpoint
    assert main(["convert", str(folder), "--to", "megapipe", str(tmp_path / "copy")]) == 0
    assert main(["diff", str(folder), str(tmp_path / "copy")]) == 0
    assert main(["verify", str(tmp_path / "copy")]) == 0
    source, copy = MegapipeSource(folder), MegapipeSource(tmp_path / "copy")
    assert copy.manifest.run == source.manifest.run
    assert copy.contents.applied_updates == dict.fromkeys(expected["weights"], 3)
    assert "equal:" in capsys.readouterr().out
    half = ["convert", str(folder), "--to", "megapipe", str(tmp_path / "half"), "--precision", "bf16"]
    assert main(half) == 0
    source = MegapipeSource(tmp_path / "half")
    for tensor in source.contents.tensors:
        wanted = expected[tensor.kind][tensor.name]
        wanted = wanted.bfloat16() if tensor.kind == "weights" else wanted
        assert torch.equal(source.read(tensor), wanted), tensor
    bare = ["convert", str(folder), "--to", "megapipe", str(tmp_path / "bare"), "--weights_only"]
    assert main(bare) == 0
    contents = MegapipeSource(tmp_path / "bare").contents
    assert contents.kinds == ["weights"]
    assert not contents.applied_updates


def test_checkpoints_of_eight_ranks_have_transformers_logits(
    checkpoint: tuple[Path, dict[str, dict[str, Tensor]]], tmp_path: Path
) -> None:
    folder, expected = checkpoint
    assert main(["convert", str(folder), "--to", "hf", str(tmp_path / "theirs")]) == 0
    ((ours, theirs),) = logits_of(tmp_path / "theirs", MODEL, expected["weights"])
    assert 0.5 < theirs.std() < 50.0
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.slow
def test_a_run_resumes_from_a_converted_checkpoint(tmp_path: Path) -> None:
    """Bit for bit as from the checkpoint itself."""
    corpus = write_shard(tmp_path / "corpus")
    layout = {"data": 2}
    config = config_in(tmp_path / "run", corpus, GPT2_SHAPE, checkpoint={"every": 2})
    run(layout, config, 2)
    step = "checkpoints/step-00000002"
    assert main(["convert", str(tmp_path / "run" / step), "--to", "megapipe", str(tmp_path / "other" / step)]) == 0
    expected = run(layout, config, 4)
    config.training = replace(config.training, directory=str(tmp_path / "other"))
    outcome = run(layout, config, 4)
    assert outcome.start == expected.start == 2
    assert_same_bits(outcome, expected)
