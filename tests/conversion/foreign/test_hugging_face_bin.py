"""Hugging Face folders whose weights are `.bin` files, which torch.save wrote."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megapipe.checkpoint.hugging_face_files import PICKLED, SINGLE
from megapipe.conversion.command import main
from tests.models.hugging_face import gpt2

SINGLE_BIN, INDEX_BIN = PICKLED


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One GPT-2 as safetensors, in one `.bin` file, and in two with an index."""
    root = tmp_path_factory.mktemp("folders")
    found = {name: root / name for name in ("safetensors", "single", "sharded")}
    gpt2().theirs.save_pretrained(found["safetensors"])
    tensors = safetensors.torch.load_file(found["safetensors"] / SINGLE)
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.uint8)
    for name in ("single", "sharded"):
        found[name].mkdir()
        (found[name] / "config.json").write_text((found["safetensors"] / "config.json").read_text())
    torch.save(tensors, found["single"] / SINGLE_BIN)
    names = sorted(tensors)
    shards = {"a.bin": names[::2], "b.bin": names[1::2]}
    for file, held in shards.items():
        torch.save({name: tensors[name] for name in held}, found["sharded"] / file)
    places = {name: file for file, held in shards.items() for name in held}
    (found["sharded"] / INDEX_BIN).write_text(json.dumps({"weight_map": places}))
    return found


def test_bin_folders_convert_bit_for_bit(folders: dict[str, Path], tmp_path: Path) -> None:
    assert main(["convert", str(folders["safetensors"]), "--to", "megapipe", str(tmp_path / "expected")]) == 0
    for name in ("single", "sharded"):
        target = str(tmp_path / name)
        assert main(["convert", str(folders[name]), "--to", "megapipe", target, "--allow-pickle"]) == 0
        assert main(["diff", target, str(tmp_path / "expected")]) == 0
        assert main(["verify", str(folders[name]), "--allow-pickle"]) == 0


def test_bin_folders_are_read_with_consent_alone(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("single", "sharded"):
        assert main(["convert", str(folders[name]), "--to", "megapipe", str(tmp_path / "out")]) == 2
        assert "is a pickle, which can carry code: convert the folder first" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_flipped_bit_in_a_bin_file_is_found(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in folders["single"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = bytearray((tmp_path / SINGLE_BIN).read_bytes())
    weight = safetensors.torch.load_file(folders["safetensors"] / SINGLE)["transformer.wpe.weight"]
    content[content.index(weight.numpy().tobytes())] ^= 1
    (tmp_path / SINGLE_BIN).write_bytes(content)
    assert main(["verify", str(tmp_path), "--allow-pickle"]) == 1
    assert "its CRC-32 differs" in capsys.readouterr().err
