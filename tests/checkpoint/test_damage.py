"""Files that changed after the save: every change is noticed, or changes nothing that is read."""

import shutil
from pathlib import Path

import pytest

from megapipe.checkpoint import CheckpointError, DamagedCheckpointError, newest_valid
from tests.checkpoint.toy import ALONE, Layout, alone, load_step, save_step
from tests.support.meshes import run_threads

PAIR = Layout({"pipeline": 2}, [["table", "one"], ["two", "table"]])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 and 2, of two files each."""
    for step in (1, 2):
        run_threads(PAIR.sizes, save_step, PAIR, tmp_path, step)
    return tmp_path


def test_no_flipped_bit_gives_other_values(directory: Path) -> None:
    path, noticed, harmless = directory / "step-00000002", 0, 0
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for position in range(0, len(content), 11):
            damaged = bytearray(content)
            damaged[position] ^= 1 << (position % 8)
            file.write_bytes(damaged)
            try:
                load_step(alone(), ALONE, path, 2)
                harmless += 1
            except CheckpointError:
                noticed += 1
        file.write_bytes(content)
    # What may change unnoticed is white space and shapes in a header, which nothing depends on.
    assert noticed > 30 * harmless


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_every_file_cut_at_four_lengths_is_fallen_back_from(tmp_path: Path, directory: Path, share: float) -> None:
    for file in sorted((directory / "step-00000002").iterdir()):
        damaged = tmp_path / f"cut-{file.name}"
        shutil.copytree(directory, damaged, ignore=shutil.ignore_patterns("cut-*"))
        content = file.read_bytes()
        (damaged / "step-00000002" / file.name).write_bytes(content[: int(share * (len(content) - 1))])
        assert newest_valid(damaged) == damaged / "step-00000001"
        load_step(alone(), ALONE, damaged / "step-00000001", 1)


def test_files_of_another_step_or_rank_are_noticed(directory: Path) -> None:
    one, two = (directory / f"step-0000000{step}" for step in (1, 2))
    first, second = sorted(two.glob("*.safetensors"))
    kept = first.read_bytes()
    shutil.copyfile(one / first.name, first)
    with pytest.raises(DamagedCheckpointError, match=r"rank-00000.safetensors: tensor .* checksum"):
        load_step(alone(), ALONE, two, 2)
    shutil.copyfile(second, first)
    with pytest.raises(DamagedCheckpointError, match=r"rank-00000.safetensors"):
        load_step(alone(), ALONE, two, 2)
    first.write_bytes(kept)
    load_step(alone(), ALONE, two, 2)
