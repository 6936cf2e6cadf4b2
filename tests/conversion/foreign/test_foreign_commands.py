"""megapipe convert to and from other frameworks, as a user runs it."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megapipe.checkpoint.hugging_face import PICKLED, SINGLE
from megapipe.conversion.command import main
from tests.conversion.test_command import checkpoint, tensors  # noqa: F401
from tests.models.hugging_face import case_of


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    return captured.out + captured.err


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("megatron", ["--tensor", "2", "--layer_names", "transformer_engine"]),
        ("dcp", []),
    ],
)
def test_there_and_back_without_a_difference(
    name: str,
    options: list[str],
    checkpoint: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    assert main(["convert", str(checkpoint), "--to", name, there, *options]) == 0
    assert main(["convert", there, "--to", "megapipe", back]) == 2
    assert "--allow-pickle" in printed(capsys)
    assert not Path(back).exists()
    assert main(["convert", there, "--to", "megapipe", back, "--allow-pickle"]) == 0
    only_weights = [] if name == "dcp" else ["--weights-only"]
    assert main(["diff", str(checkpoint), back, *only_weights]) == 0
    assert main(["verify", there, "--allow-pickle"]) == 0
    assert main(["inspect", there, "--allow-pickle"]) == 0


def test_the_step_is_megatrons_iteration(checkpoint: Path, tmp_path: Path) -> None:  # noqa: F811
    assert main(["convert", str(checkpoint), "--to", "megatron", str(tmp_path / "made"), "--precision", "bf16"]) == 0
    assert (tmp_path / "made/latest_checkpointed_iteration.txt").read_text() == "5"
    saved = torch.load(tmp_path / "made/iter_0000005/mp_rank_00/model_optim_rng.pt", weights_only=False)
    assert (saved["iteration"], saved["args"].consumed_train_samples) == (5, 40)
    word = saved["model"]["embedding.word_embeddings.weight"]
    assert torch.equal(word[:61], tensors(0)["embedding.word.weight"].bfloat16())


SINGLE_BIN, INDEX_BIN = PICKLED


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One GPT-2 as safetensors, in one `.bin` file, and in two with an index."""
    root = tmp_path_factory.mktemp("folders")
    paths = {name: root / name for name in ("safetensors", "single", "sharded")}
    case_of("gpt2").theirs.save_pretrained(paths["safetensors"])
    tensors = safetensors.torch.load_file(paths["safetensors"] / SINGLE)
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.uint8)
    for name in ("single", "sharded"):
        paths[name].mkdir()
        (paths[name] / "config.json").write_text((paths["safetensors"] / "config.json").read_text())
    torch.save(tensors, paths["single"] / SINGLE_BIN)
    names = sorted(tensors)
    shards = {"a.bin": names[::2], "b.bin": names[1::2]}
    for file, part in shards.items():
        torch.save({name: tensors[name] for name in part}, paths["sharded"] / file)
    places = {name: file for file, part in shards.items() for name in part}
    (paths["sharded"] / INDEX_BIN).write_text(json.dumps({"weight_map": places}))
    return paths


def test_bin_folders_convert_bit_for_bit(folders: dict[str, Path], tmp_path: Path) -> None:
    assert main(["convert", str(folders["safetensors"]), "--to", "megapipe", str(tmp_path / "expected")]) == 0
    for name in ("single", "sharded"):
        target = str(tmp_path / name)
        assert main(["convert", str(folders[name]), "--to", "megapipe", target, "--allow-pickle"]) == 0
        assert main(["diff", target, str(tmp_path / "expected")]) == 0
        assert main(["verify", str(folders[name]), "--allow-pickle"]) == 0
