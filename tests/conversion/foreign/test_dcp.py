"""State dicts in the files of torch.distributed.checkpoint: torch loads what is written here, and vice versa."""

import json
import pickle
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._pytree import tree_map

from megapipe.checkpoint.manifest import RunState
from megapipe.checkpoint.storage import CheckpointError, DamagedCheckpointError
from megapipe.config.run import PretrainConfig
from megapipe.conversion.formats import FORMATS, format_of
from tests.conversion.foreign.weights import MODELS, drawn, opened, write
from tests.support.ranks import run_ranks

KINDS = ("weights", "exp_avg", "exp_avg_sq")


def nested(values: dict) -> dict[str, Any]:
    """The state dict that a folder is to hold."""
    model = {tensor.name: value for tensor, value in values.items() if tensor.kind == "weights"}
    state: dict[str, dict[str, Any]] = {}
    for tensor, value in values.items():
        if tensor.kind != "weights":
            state.setdefault(tensor.name, {})[tensor.kind] = value
    return {"model": model, "optimizer": {"state": state}} if state else {"model": model}


def save_with_torch(folder: Path, state: dict[str, Any], description: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    (folder / "megapipe.json").write_text(json.dumps(description))
    return folder


def save_sharded(rank: int, folder: str, state: dict[str, Any]) -> None:
    """On each rank: its rows of every tensor that has any, as DTensors."""
    mesh = init_device_mesh("cpu", (2,))
    sharded = {name: distribute_tensor(value, mesh, [Shard(value.ndim - 1)]) for name, value in state.items()}
    dcp.save({"model": sharded}, checkpoint_id=folder)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_torch_loads_what_is_written(dtype: str, tmp_path: Path) -> None:
    contents, values = drawn(MODELS["llama"], dtype, KINDS)
    config = json.loads(json.dumps(asdict(PretrainConfig())))
    run = RunState(3, 96, {"seed": 7}, "fp32", ((1, 2.5), (2, float("nan"))), config)
    contents = replace(contents, run=run, applied_updates={contents.tensors[0].name: 3})
    folder = tmp_path / "state"
    write("dcp", folder, contents, values)
    expected = nested(values)
    loaded = tree_map(torch.zeros_like, expected)
    dcp.load(loaded, checkpoint_id=str(folder), no_dist=True)
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)
    dcp_to_torch_save(str(folder), str(tmp_path / "state.pt"))
    assert torch.load(tmp_path / "state.pt").keys() == expected.keys()

    assert format_of(folder) is FORMATS["dcp"]
    source = opened("dcp", folder)
    again = source.contents
    assert (again.model, again.applied_updates) == (contents.model, contents.applied_updates)
    assert again.tensors == tuple(sorted(contents.tensors, key=lambda tensor: KINDS.index(tensor.kind)))
    assert again.run is not None
    assert repr(again.run.losses) == repr(run.losses)
    assert replace(again.run, losses=()) == replace(run, losses=())
    assert all(torch.equal(source.read(tensor), values[tensor]) for tensor in again.tensors)
    source.close()


def test_what_torch_saves_is_read(tmp_path: Path) -> None:
    """With and without `model.`; a step count and a generator's state are not tensors of a model."""
    contents, values = drawn(MODELS["qwen"], kinds=KINDS)
    description = {"model": asdict(contents.model)}
    prefixed = {**nested(values), "step": torch.tensor(3), "random": torch.get_rng_state()}
    bare = {**prefixed["model"], "optimizer": prefixed["optimizer"]}
    for name, state in (("prefixed", prefixed), ("bare", bare)):
        source = opened("dcp", save_with_torch(tmp_path / name, state, description))
        assert source.contents.run is None
        assert all(torch.equal(source.read(tensor), values[tensor]) for tensor in contents.tensors)
        source.close()


@pytest.mark.slow
def test_what_two_ranks_saved_is_read(tmp_path: Path) -> None:
    contents, values = drawn(MODELS["llama"])
    run_ranks(2, save_sharded, str(tmp_path / "state"), nested(values)["model"])
    (tmp_path / "state" / "megapipe.json").write_text(json.dumps({"model": asdict(contents.model)}))
    assert len(list((tmp_path / "state").glob("*.distcp"))) == 2
    source = opened("dcp", tmp_path / "state")
    for tensor in source.contents.tensors:
        middle = tuple(slice(length // 4, length - length // 4) for length in tensor.shape)
        assert torch.equal(source.read(tensor), values[tensor])
        assert torch.equal(source.read(tensor, middle), values[tensor][middle])
        assert source.verify(tensor) == []
    source.close()


def test_unknown_and_missing_names_are_reported(tmp_path: Path) -> None:
    contents, values = drawn(MODELS["llama"])
    state, description = nested(values)["model"], {"model": asdict(contents.model)}
    titan = {**state, "layers.0.attention.wq.weight": torch.ones(2)}
    short = {name: value for name, value in state.items() if name != "blocks.1.mlp.up.weight"}
    for name, model, message in (
        ("titan", titan, r"'model.layers.0.attention.wq.weight'.*megapipe's names"),
        ("short", short, r"lacks model.blocks.1.mlp.up.weight"),
    ):
        folder = save_with_torch(tmp_path / name, {"model": model}, description)
        with pytest.raises(CheckpointError, match=message):
            opened("dcp", folder)
    (folder / "megapipe.json").unlink()
    with pytest.raises(CheckpointError, match=r"no megapipe.json"):
        opened("dcp", folder)


@pytest.fixture
def metadata(tmp_path: Path) -> Path:
    """The file of metadata in a good folder, which a test may change."""
    write("dcp", tmp_path / "state", *drawn(MODELS["llama"]))
    return tmp_path / "state" / ".metadata"


Change = Callable[[dcp.metadata.Metadata], object]


def with_places(**fields: object) -> Change:
    """Set fields of every place in a file."""
    return lambda metadata: [vars(info).update(fields) for info in metadata.storage_data.values()]


def with_norm(change: Callable[[Any], dict[str, object]]) -> Change:
    """Set fields of a tensor, computed from it."""

    def changed(metadata: dcp.metadata.Metadata) -> None:
        stored = metadata.state_dict_metadata["model.head.norm.weight"]
        vars(stored).update(change(stored))

    return changed


def swapped(metadata: dcp.metadata.Metadata) -> None:
    places = metadata.storage_data
    first, second, *_ = places
    places[first], places[second] = places[second], places[first]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_places(relative_path="../secret.distcp"), "not in its folder"),
        (with_places(offset=1 << 40), "bytes"),
        (with_norm(lambda stored: {"size": torch.Size([1 << 50])}), "do not cover it"),
        (with_norm(lambda stored: {"chunks": stored.chunks * 2}), "do not cover it"),
        (swapped, "do not hold the part"),
        (with_places(transform_descriptors=["zstd"]), "extensions"),
        (lambda metadata: metadata.storage_data.clear(), "is not metadata of"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_hostile_metadata_is_refused(change: Change, message: str, metadata: Path) -> None:
    value = pickle.loads(metadata.read_bytes())
    change(value)
    metadata.write_bytes(pickle.dumps(value))

    def read_all() -> None:
        source = opened("dcp", metadata.parent)
        for tensor in source.contents.tensors:
            source.read(tensor)

    with pytest.raises(CheckpointError, match=message):
        read_all()


def test_damaged_and_foreign_metadata_is_refused(metadata: Path) -> None:
    metadata.write_bytes(metadata.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"\.metadata is not read"):
        opened("dcp", metadata.parent)
    metadata.write_bytes(pickle.dumps(["something", "else"]))
    with pytest.raises(DamagedCheckpointError, match="is not metadata of"):
        opened("dcp", metadata.parent)
