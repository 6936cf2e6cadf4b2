"""tools/convert_checkpoint.py to and from other frameworks, as a user runs it."""

from pathlib import Path

import pytest
import torch

from megapipe.conversion.command import main
from tests.conversion.test_command import checkpoint, tensors  # noqa: F401


def told(capsys: pytest.CaptureFixture[str]) -> str:
    found = capsys.readouterr()
    return found.out + found.err


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("megatron", ["--tensor", "2", "--layer_names", "transformer_engine"]),
        ("megatron-dist", []),
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
    assert "--allow-pickle" in told(capsys)
    assert not Path(back).exists()
    assert main(["convert", there, "--to", "megapipe", back, "--allow-pickle"]) == 0
    weights_alone = [] if name == "dcp" else ["--weights-only"]
    assert main(["diff", str(checkpoint), back, *weights_alone]) == 0
    assert main(["verify", there, "--allow-pickle"]) == 0
    assert main(["inspect", there, "--allow-pickle"]) == 0


def test_megatron_takes_the_step_as_its_iteration(checkpoint: Path, tmp_path: Path) -> None:  # noqa: F811
    assert main(["convert", str(checkpoint), "--to", "megatron", str(tmp_path / "made"), "--precision", "bf16"]) == 0
    assert (tmp_path / "made/latest_checkpointed_iteration.txt").read_text() == "5"
    found = torch.load(tmp_path / "made/iter_0000005/mp_rank_00/model_optim_rng.pt", weights_only=False)
    assert (found["iteration"], found["args"].consumed_train_samples) == (5, 40)
    word = found["model"]["embedding.word_embeddings.weight"]
    assert torch.equal(word[:61], tensors(0)["embedding.word.weight"].bfloat16())


def test_a_hostile_megatron_folder_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "run" / "mp_rank_00"
    place.mkdir(parents=True)
    torch.save({"model": {}, "args": Path.unlink}, place / "model_optim_rng.pt")
    command = ["convert", str(tmp_path / "run"), "--to", "megapipe", str(tmp_path / "back"), "--allow-pickle"]
    assert main(command) == 2
    assert "builtins.getattr" in told(capsys)
    assert not (tmp_path / "back").exists()
