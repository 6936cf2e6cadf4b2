"""Untrusted folders: a fixture for each rule of docs/conversion.md is refused by name, and nothing is written.

The rules of JSON itself are tested in tests/config/test_files.py."""

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer, models

from megapipe.checkpoint import storage
from megapipe.checkpoint.hugging_face import INDEX, SINGLE
from megapipe.config.model import ModelConfig
from megapipe.conversion.command import main
from megapipe.conversion.formats import Contents, StoredTensor
from megapipe.conversion.megapipe_format import MegapipeTarget
from tests.conversion.foreign.weights import write as write_folder
from tests.conversion.test_command import convert, run, tensors, write
from tests.models.hugging_face import case_of


@pytest.fixture(scope="module")
def harmless(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of a GPT-2."""
    folder = tmp_path_factory.mktemp("harmless")
    case_of("gpt2").theirs.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(harmless: dict[str, bytes], tmp_path: Path) -> Path:
    """Return a copy of them at <tmp>/in/hostile; a file outside it must not be read."""
    target = tmp_path / "in" / "hostile"
    target.mkdir(parents=True)
    for name, content in harmless.items():
        (target / name).write_bytes(content)
    (tmp_path / "in" / SINGLE).write_bytes(harmless[SINGLE])
    return target


def refusal(folder: Path) -> str:
    """Return the error of a conversion."""
    command = ["convert", "--from", "hf", folder, "--to", "megapipe", folder.parents[1] / "out"]
    return run(*command, status=2).err


def index_to(folder: Path, place: str) -> None:
    """Write an index that names `place` for every tensor."""
    names = safetensors.torch.load_file(folder / SINGLE)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, place)}))


def link_out(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / SINGLE).symlink_to(folder.parent / SINGLE)


def with_tensor(folder: Path, name: str, tensor: torch.Tensor) -> None:
    tensors = safetensors.torch.load_file(folder / SINGLE)
    safetensors.torch.save_file({**tensors, name: tensor}, folder / SINGLE)


def linked_shard(folder: Path) -> None:
    (folder / "shard.safetensors").symlink_to(folder.parent / SINGLE)
    index_to(folder, "shard.safetensors")


def edited(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config_is(folder, json.dumps({**config, **changes}))


def header_of(folder: Path, length: int, size: int) -> None:
    """Write a sparse file of `size` bytes that claims a header of `length`."""
    with (folder / SINGLE).open("wb") as file:
        file.write(struct.pack("<Q", length))
        file.truncate(size)


def written(folder: Path, header: str) -> None:
    text = header.encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))


def described(folder: Path, *tensors: tuple[str, int, int]) -> None:
    """Write a header with tensors of a name and the place of their bytes, which need not be different."""
    entries = []
    for name, start, stop in tensors:
        entry = {"dtype": "F32", "shape": [(stop - start) // 4], "data_offsets": [start, stop]}
        entries.append(f"{json.dumps(name)}: {json.dumps(entry)}")
    written(folder, f"{{{', '.join(entries)}}}")


def many_shards(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"{n}": f"{n}" for n in range(10_001)}}))


def config_is(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)


def pickled(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")


UNREADABLE = "not a readable safetensors file"
FIXTURES: dict[str, tuple[Callable[[Path], object], str]] = {
    "absolute path": (lambda path: index_to(path, str(path.parent / SINGLE)), "not in its folder"),
    "parent": (lambda path: index_to(path, f"../{SINGLE}"), "not in its folder"),
    "inner folder": (lambda path: index_to(path, f"a/{SINGLE}"), "not in its folder"),
    "dots alone": (lambda path: index_to(path, ".."), "not in its folder"),
    "empty name": (lambda path: index_to(path, ""), "not in its folder"),
    "NUL": (lambda path: index_to(path, f"{SINGLE}\0"), "not in its folder"),
    "link out": (link_out, "a link that leads out of its folder"),
    "link out by an index": (linked_shard, "a link that leads out of its folder"),
    "weight_map of numbers": (lambda path: (path / INDEX).write_text('{"weight_map": {"a": 3}}'), "no weight_map"),
    "header beyond the file": (lambda path: header_of(path, 2**62, 64), "header of 4,611,686,018,427,387,904"),
    "header above the limit": (lambda path: header_of(path, 2**28, 2**29), "at most 100,000,000 are read"),
    "empty file": (lambda path: (path / SINGLE).write_bytes(b""), UNREADABLE),
    "header too deep": (lambda path: written(path, "[" * 9000), UNREADABLE),
    "tensor twice": (lambda path: described(path, ("a", 0, 32), ("a", 32, 64)), UNREADABLE),
    "overlap": (lambda path: described(path, ("a", 0, 32), ("b", 16, 64)), UNREADABLE),
    "out of bounds": (lambda path: described(path, ("a", 0, 4096)), UNREADABLE),
    "shards": (many_shards, "names 10,001 files; at most 10,000"),
    "JSON too long": (lambda path: os.truncate(path / "config.json", 2**30), "1,073,741,824 bytes; at most"),
    "key twice": (
        lambda path: config_is(path, '{"model_type": "gpt2", "model_type": "llama"}'),
        "'model_type' twice",
    ),
    "no object": (lambda path: config_is(path, "[]"), "does not contain a JSON object"),
    "a billion layers": (
        lambda path: edited(path, n_layer=10**9),
        "n_layer is 1000000000; it must be from 1 to",
    ),
    "a billion columns": (
        lambda path: edited(path, n_embd=12 * 10**9),
        "n_embd is 12000000000; it must be from 1 to 1048576",
    ),
    "a field of another type": (lambda path: edited(path, n_positions="../x"), "cannot be used|n_positions"),
    "model_type of another type": (
        lambda path: edited(path, model_type=["bert"]),
        r"model_type \['bert'\] is not",
    ),
    "a climbing tensor": (lambda path: with_tensor(path, "../../x", torch.zeros(2)), "'../../x' is unknown"),
    "wrong shape": (
        lambda path: with_tensor(path, "transformer.wpe.weight", torch.zeros(1)),
        r"the shape \(1,\), but .* needs \(64, 64\)",
    ),
    "pickle": (pickled, "is a pickle, which can carry code"),
}


@pytest.mark.parametrize("name", FIXTURES)
def test_refused_by_name_with_nothing_written(folder: Path, name: str, tmp_path: Path) -> None:
    damage, message = FIXTURES[name]
    damage(folder)
    before = sorted(tmp_path.rglob("*"))
    error = refusal(folder)
    assert re.search(message, error), error
    assert sorted(tmp_path.rglob("*")) == before


def test_limits_of_tensors_and_links_of_tokenizers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        index_to(folder, SINGLE)
        patch.setattr(storage, "MAX_TENSORS", 20)
        assert "tensors; at most 20 are read" in refusal(folder)
    secret = folder.parent / "secret"
    secret.write_text("{}")
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(folder / "tokenizer.json"))
    (folder / "special_tokens_map.json").symlink_to(secret)
    assert "a link that leads out" in convert(folder, "hf", folder.parents[1] / "out", status=2).err


def test_links_of_the_hubs_client_are_followed(folder: Path) -> None:
    """snapshots/<revision>/file -> ../../blobs/<hash>."""
    home = folder.parent / "models--gpt2"
    snapshot, blobs = home / "snapshots" / "0123", home / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    convert(snapshot, "megapipe", folder.parents[1] / "out")


def test_code_in_a_folder_is_neither_run_nor_copied(folder: Path) -> None:
    edited(folder, auto_map={"AutoConfig": "evil.Config"})
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    out = folder.parents[1] / "out"
    convert(folder, "hf", out)
    assert not list(out.glob("*.py"))
    assert "auto_map" not in (out / "config.json").read_text()


def test_a_megapipe_checkpoint_of_a_billion_layers(tmp_path: Path) -> None:
    """Only the manifest is wrong, and its checksum is right."""
    tensor = StoredTensor("embedding.word.weight", "weights", (2,), "F32")
    contents = Contents(ModelConfig(num_layers=10**9), (tensor,))
    write_folder("megapipe", tmp_path / "in", contents, {tensor: torch.ones(2)})
    error = convert(tmp_path / "in", "hf", tmp_path / "out", status=2).err
    assert "model.num_layers is 1000000000; it must be from 1 to 1048576" in error


def test_a_megapipe_checkpoint_whose_file_is_a_link_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "in/step", tensors(0))
    (folder / "part-00000.safetensors").rename(tmp_path / "elsewhere")
    (folder / "part-00000.safetensors").symlink_to(tmp_path / "elsewhere")
    assert "a link that leads out of its folder" in convert(folder, "hf", tmp_path / "out", status=2).err
    assert not (tmp_path / "out").exists()


def test_names_of_tensors_never_become_names_of_files(tmp_path: Path) -> None:
    tensor = StoredTensor("../../x", "../../weights", (2,), "F32")
    target = MegapipeTarget(tmp_path / "a/b/c", Contents(ModelConfig(), (tensor,)))
    target.add(tensor, torch.ones(2))
    target.abandon()
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert files == {"a", "a/b"}


def test_targets_are_checked_before_the_source_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = tmp_path / "checkpoints/step-00000001"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    for target, message in ((step / "sub", f"is inside the checkpoint {step}"), (step, "already exists")):
        assert main(["convert", str(tmp_path / "absent"), str(target), "--to", "hf"]) == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in step.iterdir()] == ["manifest.json"]
