"""safetensors files: the library reads what is written, and changed bytes are detected."""

import errno
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import xxhash

from megapipe.checkpoint import tensor_file
from megapipe.checkpoint.storage import DISK, CheckpointError, DamagedCheckpointError, StorageWriter
from megapipe.checkpoint.tensor_file import FileTensor, TensorFile, write_tensors

PIECE = 64


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", PIECE)


def tensors() -> list[FileTensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        FileTensor("half/a", (3, 5), torch.randn(15, generator=generator).to(torch.bfloat16)),
        FileTensor("weights/b", (2, 3, 7), torch.randn(42, generator=generator)),
        FileTensor("wide", (9,), torch.randn(9, generator=generator, dtype=torch.float64)),
        FileTensor("scalar", (), torch.ones(1)),
    ]


class SmallWrites(StorageWriter):
    """Writes a few bytes at a time, as the system may."""

    def write(self, descriptor: int, content: memoryview) -> int:
        return super().write(descriptor, content[:100])


def test_the_library_reads_and_would_write_the_same(tmp_path: Path) -> None:
    path, theirs = tmp_path / "file.safetensors", tmp_path / "theirs"
    size, checksums = write_tensors(SmallWrites(), path, tensors())
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == {tensor.key for tensor in tensors()}
    for tensor in tensors():
        assert torch.equal(loaded[tensor.key], tensor.values.view(tensor.shape))
    safetensors.torch.save_file({tensor.key: tensor.values.view(tensor.shape) for tensor in tensors()}, theirs)
    assert path.stat().st_size == theirs.stat().st_size == size
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert (8 + length) % 8 == 0
    content = tensors()[1].values.numpy().tobytes()
    pieces = [content[start : start + PIECE] for start in range(0, len(content), PIECE)]
    assert checksums["weights/b"] == tuple(xxhash.xxh3_64_hexdigest(piece) for piece in pieces)
    with pytest.raises(CheckpointError, match="File exists"):
        write_tensors(DISK, path, tensors())


class BrokenDisk(StorageWriter):
    """Refuses every write, and reports an error of its own when a file is closed."""

    def write(self, descriptor: int, content: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self, descriptor: int) -> None:
        super().close(descriptor)
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_refused_file_is_closed_and_its_first_error_reported(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(CheckpointError, match="No space left"):
        write_tensors(BrokenDisk(), tmp_path / "file", tensors())
    assert os.listdir("/proc/self/fd") == before


def test_what_the_manifest_lists_must_exist(tmp_path: Path) -> None:
    write_tensors(DISK, tmp_path / "file", tensors())
    file = TensorFile(tmp_path / "file")
    for arguments, message in (
        (("c", "F32", 42), "no tensor 'c'"),
        (("weights/b", "F32", 41), "42 elements"),
        (("weights/b", "F64", 42), "float32"),
    ):
        with pytest.raises(DamagedCheckpointError, match=message):
            file.flat(*arguments)
    with pytest.raises(CheckpointError, match="missing"):
        TensorFile(tmp_path / "other")


def test_a_slice_reads_and_checks_only_its_pieces(tmp_path: Path) -> None:
    values = torch.from_numpy(np.arange(64, dtype=np.float32))
    _, checksums = write_tensors(DISK, tmp_path / "file", [FileTensor("b", (64,), values)])
    wrong = (checksums["b"][0], "0" * 16, *checksums["b"][2:])
    file = TensorFile(tmp_path / "file")
    flat = file.flat("b", "F32", 64)
    file.check("b", flat, wrong, [range(16), range(60, 64)])
    with pytest.raises(DamagedCheckpointError, match=f"'b', bytes {PIECE} to {2 * PIECE}"):
        file.check("b", flat, wrong, [range(15, 17)])
