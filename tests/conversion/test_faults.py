"""A conversion that fails at any change of the disk leaves nothing or, after the rename, the complete folder; it has a
few tensors in memory, not the whole model."""

import errno
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megapipe.checkpoint import CheckpointError
from megapipe.checkpoint.storage import DISK, StorageWriter
from megapipe.conversion.formats import FORMATS, Source, TargetOptions
from megapipe.conversion.megapipe_format import MegapipeSource
from megapipe.conversion.operations import contents_for, transfer
from tests.checkpoint.disks import OPERATIONS, CountingDisk, RefusingDisk
from tests.conversion.test_command import run, tensors, write

CHANGES = ("make_folder", "create", "write", "flush", "flush_folder", "rename")
"""Operations that fail; removals of what a failure leaves do not."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    opened = MegapipeSource(write(tmp_path_factory.mktemp("source") / "step", tensors(0)))
    yield opened
    opened.close()


def convert(source: Source, kind: str, path: Path, disk: StorageWriter) -> None:
    """Convert to a folder on this disk."""
    contents = contents_for(source.contents, FORMATS[kind], None, False)
    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(DISK, name, getattr(disk, name))
        transfer(source, contents, FORMATS[kind].open_target(path, contents, TargetOptions(max_shard_bytes=20_000)))


@pytest.mark.parametrize("kind", FORMATS)
def test_every_operation_fails_once(source: Source, tmp_path: Path, kind: str) -> None:
    disk = CountingDisk()
    convert(source, kind, tmp_path / "clean", disk)
    changes = [number for number, name in enumerate(disk.operations) if name in CHANGES]
    assert len(changes) > 20
    for at in changes:
        with pytest.raises(CheckpointError, match="cannot"):
            convert(source, kind, tmp_path / "out", RefusingDisk(at, errno.ENOSPC))
        left = [path.name for path in tmp_path.iterdir() if path.name != "clean"]
        renamed = "rename" in disk.operations[:at]
        assert left == (["out"] if renamed else []), at
        if renamed:
            assert_whole(source, kind, tmp_path / "out")
    assert renamed  # the last operation makes the name durable


def assert_whole(source: Source, kind: str, path: Path) -> None:
    opened = FORMATS[kind].open_source(path, True)
    for tensor in opened.contents.tensors:
        assert torch.equal(opened.read(tensor), source.read(tensor))
    opened.close()


def test_leftovers_of_a_killed_conversion_are_reported(tmp_path: Path, source: Source) -> None:
    contents = source.contents
    target = FORMATS["megapipe"].open_target(tmp_path / "out", contents, TargetOptions())
    target.add(contents.tensors[0], source.read(contents.tensors[0]))
    # Killed here.
    (partial,) = tmp_path.iterdir()
    assert "no complete checkpoint" in run("verify", "--from", "megapipe", partial, status=1).err
    with pytest.raises(CheckpointError, match=r"another conversion is writing.*one was killed; remove that folder"):
        FORMATS["megapipe"].open_target(tmp_path / "out", contents, TargetOptions())
    assert partial.exists()
    target.abandon()


BUILD = """
import sys
from pathlib import Path
import torch
from megapipe.config.model import ModelConfig
from megapipe.conversion.formats import Contents, StoredTensor
from megapipe.conversion.megapipe_format import MegapipeTarget
from megapipe.conversion.megapipe_format import parameters_of

model = ModelConfig(vocabulary_size=8192, num_layers=24, hidden_size=1024, num_heads=16, max_positions=64,
                    normalization="rms_norm", activation="swiglu", positions="rotary", bias="none")
tensors = tuple(StoredTensor(name, "weights", spec.shape, "F32") for name, spec in parameters_of(model).items())
target = MegapipeTarget(Path(sys.argv[1]), Contents(model, tensors))
for tensor in tensors:
    target.add(tensor, torch.full(tensor.shape, 0.5))
target.finish()
"""
CONVERT = """
import resource, sys
import torch
import megapipe.conversion.hugging_face, megapipe.conversion.megapipe_format, megapipe.conversion.megatron_torch
from megapipe.conversion.command import main

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak()
assert main(["convert", sys.argv[1], "--to", sys.argv[2], *sys.argv[3:]]) == 0
print(peak() - before)
"""
LARGEST = 8192 * 1024 * 4
"""Bytes of the embedding; the swiglu's first matrix has 2 x 2752 x 1024 x 4 = 23 MB."""
CONSTANT = 96 * 2**20
"""Buffers, parsers and the tokenizer library, for any model."""


@pytest.mark.exhaustive
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    """A model of 1.2 GB in both directions; joined parts need twice the largest tensor."""
    built, exported, back = (str(tmp_path / name) for name in ("built", "exported", "back"))
    subprocess.run([sys.executable, "-c", BUILD, built], check=True)
    total = sum(file.stat().st_size for file in Path(built).iterdir())
    bound = 2 * LARGEST + CONSTANT
    assert total > 6 * bound
    sharded, again = str(tmp_path / "sharded"), str(tmp_path / "again")
    for source, kind, *target in (
        (built, "hf", exported),
        (exported, "megapipe", back, "--precision", "bf16"),
        (back, "megatron", sharded, "--tensor", "2", "--pipeline", "2"),
        (sharded, "megapipe", again, "--allow-pickle"),
    ):
        command = [sys.executable, "-c", CONVERT, source, kind, *target]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert int(done.stdout.splitlines()[-1]) < bound
