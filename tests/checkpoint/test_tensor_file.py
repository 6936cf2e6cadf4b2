"""safetensors files: the library reads what is written, and no changed byte goes unnoticed."""

import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import xxhash

from megapipe.checkpoint import tensor_file
from megapipe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megapipe.checkpoint.storage import DISK
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


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    size, _ = write_tensors(DISK, path, tensors())
    assert path.stat().st_size == size
    found = safetensors.torch.load_file(path)
    assert found.keys() == {tensor.key for tensor in tensors()}
    for tensor in tensors():
        assert torch.equal(found[tensor.key], tensor.values.view(tensor.shape))


def test_the_file_is_laid_out_as_the_library_would(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    write_tensors(DISK, mine, tensors())
    safetensors.torch.save_file({tensor.key: tensor.values.view(tensor.shape) for tensor in tensors()}, theirs)
    assert mine.stat().st_size == theirs.stat().st_size
    (length,) = struct.unpack("<Q", mine.read_bytes()[:8])
    assert (8 + length) % 8 == 0


def test_checksums_are_of_the_bytes_in_memory(tmp_path: Path) -> None:
    _, checksums = write_tensors(DISK, tmp_path / "file", tensors())
    content = tensors()[1].values.numpy().tobytes()
    pieces = [content[start : start + PIECE] for start in range(0, len(content), PIECE)]
    assert checksums["weights/b"] == tuple(xxhash.xxh3_64_hexdigest(piece) for piece in pieces)


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    write_tensors(DISK, tmp_path / "file", tensors())
    with pytest.raises(CheckpointError, match="File exists"):
        write_tensors(DISK, tmp_path / "file", tensors())


def test_every_flipped_bit_of_a_tensor_is_found_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    values = torch.arange(40, dtype=torch.float32)
    _, checksums = write_tensors(DISK, path, [FileTensor("b", (40,), values)])
    start = path.stat().st_size - 160
    for offset in range(0, 160, 7):
        content = bytearray(path.read_bytes())
        content[start + offset] ^= 1 << (offset % 8)
        damaged = tmp_path / f"damaged-{offset}"
        damaged.write_bytes(content)
        file = TensorFile(damaged)
        flat = file.flat("b", "F32", 40)
        with pytest.raises(DamagedCheckpointError, match="'b', bytes") as raised:
            file.check("b", flat, checksums["b"], [range(40)])
        assert f"bytes {offset // PIECE * PIECE} to" in str(raised.value)
        # A span in other pieces has not been touched.
        other = range(16) if offset >= PIECE else range(16, 40)
        file.check("b", flat, checksums["b"], [other])


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused(tmp_path: Path, share: float) -> None:
    path = tmp_path / "file"
    write_tensors(DISK, path, tensors())
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(DamagedCheckpointError, match="file"):
        TensorFile(path)


def test_what_the_manifest_tells_must_be_there(tmp_path: Path) -> None:
    write_tensors(DISK, tmp_path / "file", tensors())
    file = TensorFile(tmp_path / "file")
    with pytest.raises(DamagedCheckpointError, match="no tensor 'c'"):
        file.flat("c", "F32", 42)
    with pytest.raises(DamagedCheckpointError, match="42 elements"):
        file.flat("weights/b", "F32", 41)
    with pytest.raises(DamagedCheckpointError, match="float32"):
        file.flat("weights/b", "F64", 42)
    with pytest.raises(CheckpointError, match="missing"):
        TensorFile(tmp_path / "other")


def test_reading_a_slice_reads_no_other_piece(tmp_path: Path) -> None:
    """Checksums of untouched pieces may be wrong: they are not looked at."""
    values = torch.from_numpy(np.arange(64, dtype=np.float32))
    _, checksums = write_tensors(DISK, tmp_path / "file", [FileTensor("b", (64,), values)])
    wrong = ("0" * 16, *checksums["b"][1:])
    file = TensorFile(tmp_path / "file")
    flat = file.flat("b", "F32", 64)
    file.check("b", flat, wrong, [range(16, 20), range(60, 64)])
    with pytest.raises(DamagedCheckpointError):
        file.check("b", flat, wrong, [range(15, 17)])
