"""megapipe's own checkpoints as a source: every byte that is read is checked against the manifest."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from megapipe.checkpoint.directory import newest_whole
from megapipe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megapipe.checkpoint.extents import Extent, Overlap, overlaps, tiling_problem
from megapipe.checkpoint.manifest import Chunk
from megapipe.checkpoint.manifest_file import MANIFEST, read_manifest
from megapipe.checkpoint.tensor_file import DTYPES, PIECE_BYTES
from megapipe.checkpoint.untrusted import inside
from megapipe.config.model import ModelConfig
from megapipe.conversion.contents import WEIGHTS, Contents, StoredTensor
from megapipe.conversion.megapipe_target import TOKENIZER
from megapipe.conversion.model_fields import check_layers, model_of, parameters_of
from megapipe.conversion.source import Index
from megapipe.conversion.tensor_stream import TensorReader, bytes_of
from megapipe.data.errors import DataError
from megapipe.data.manifest import read_manifest as read_shard_manifest
from megapipe.data.shard_tokenizer import tokenizer_of_shard
from megapipe.spec.parameters import Box


class MegapipeSource:
    """A step's folder, or a run's: its newest complete checkpoint.

    folder: of the step. manifest: what it says.
    """

    def __init__(self, path: Path) -> None:
        self.folder = _step_of(path)
        self.manifest = read_manifest(self.folder)
        self._files: dict[str, TensorReader] = {}
        self._check_tiling()
        run = self.manifest.run
        model = model_of(run.config.get("model", {}))
        check_layers(self.folder, model, len(self.manifest.shapes()))
        self.contents = Contents(
            model=model,
            tensors=tuple(self._tensors(model)),
            run=run,
            applied_updates=self.manifest.applied_updates,
            tokenizer=_tokenizer_of(self.folder, run.config.get("data", {})),
        )

    def read(self, tensor: StoredTensor, index: Index = ()) -> Tensor:
        whole = tuple(slice(0, length) for length in tensor.shape)
        box = Box(*zip(*[(part.start, part.stop) for part in index or whole], strict=True))
        wanted = Extent.whole(box)
        found = torch.empty(box.num_elements, dtype=DTYPES[tensor.dtype])
        for chunk in self.manifest.chunks_of(tensor.name, tensor.kind):
            shared = list(overlaps(chunk.extent, wanted))
            if shared:
                self._copy(chunk, shared, found, wanted)
        return found.reshape(box.shape)

    def verify(self, tensor: StoredTensor) -> list[str]:
        problems = []
        for chunk in self.manifest.chunks_of(tensor.name, tensor.kind):
            try:
                self._read(chunk, None, [range(chunk.extent.num_elements)])
            except CheckpointError as error:
                problems.append(str(error))
        return problems

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def _tensors(self, model: ModelConfig) -> list[StoredTensor]:
        """Weights of the whole model first, then the other kinds, parameters in the model's order."""
        found: dict[tuple[str, str], StoredTensor] = {}
        for chunk in self.manifest.chunks:
            found.setdefault((chunk.name, chunk.kind), StoredTensor(chunk.name, chunk.kind, chunk.shape, chunk.dtype))
        places = {name: place for place, name in enumerate(parameters_of(model))}
        return sorted(
            found.values(),
            key=lambda each: (each.kind != WEIGHTS, each.kind, places.get(each.name, len(places)), each.name),
        )

    def _check_tiling(self) -> None:
        """See that every tensor is there once, before anything is written."""
        for name in self.manifest.shapes():
            for kind in self.manifest.kinds_of(name):
                chunks = self.manifest.chunks_of(name, kind)
                if len({(chunk.shape, chunk.dtype) for chunk in chunks}) > 1:
                    raise DamagedCheckpointError(f"the parts of {kind} of {name} differ in shape or type", "manifest")
                problem = tiling_problem(chunks[0].shape, [chunk.extent for chunk in chunks])
                if problem is not None:
                    raise DamagedCheckpointError(f"{kind} of {name}: {problem}", "manifest")

    def _copy(self, chunk: Chunk, shared: list[Overlap], target: Tensor, wanted: Extent) -> None:
        if chunk.extent == wanted:
            self._read(chunk, target, [range(wanted.num_elements)])
            return
        # Pages that nothing is read to take no memory.
        source = torch.empty(chunk.extent.num_elements, dtype=DTYPES[chunk.dtype])
        self._read(chunk, source, [overlap.source.span for overlap in shared])
        for overlap in shared:
            overlap.copy(source, target)

    def _read(self, chunk: Chunk, target: Tensor | None, spans: list[range]) -> None:
        """Read the checked pieces that `spans` of a chunk's elements lie in, into `target` or to check them alone."""
        file = self._file(chunk.file)
        width = DTYPES[chunk.dtype].itemsize
        num_bytes = chunk.extent.num_elements * width
        entry = file.entry(chunk.key)
        if entry.num_bytes != num_bytes or entry.dtype != chunk.dtype:
            raise DamagedCheckpointError(
                f"{file.path}: tensor {chunk.key!r} has {entry.num_bytes} bytes of {entry.dtype}; the manifest "
                f"has {num_bytes} bytes of {chunk.dtype}",
                "unreadable",
            )
        content = memoryview(bytearray(PIECE_BYTES)) if target is None else bytes_of(target)
        touched = {
            piece
            for span in spans
            for piece in range(span.start * width // PIECE_BYTES, -(-span.stop * width // PIECE_BYTES))
        }
        for piece in sorted(touched):
            start, stop = piece * PIECE_BYTES, min((piece + 1) * PIECE_BYTES, num_bytes)
            part = content[: stop - start] if target is None else content[start:stop]
            file.read(chunk.key, part, start)
            found = xxhash.xxh3_64_hexdigest(part)
            if found != chunk.checksums[piece]:
                raise DamagedCheckpointError(
                    f"{file.path}: tensor {chunk.key!r}, bytes {start} to {stop}, have checksum {found} instead of "
                    f"{chunk.checksums[piece]}: the file has changed since it was saved",
                    "checksum",
                )

    def _file(self, name: str) -> TensorReader:
        if name not in self._files:
            path, size = inside(self.folder, name), self.manifest.files[name]
            if path.is_file() and path.stat().st_size != size:
                raise DamagedCheckpointError(
                    f"{path} has {path.stat().st_size:,} bytes instead of {size:,}: it has changed since it was saved",
                    "files",
                )
            self._files[name] = TensorReader(path)
        return self._files[name]


def _step_of(path: Path) -> Path:
    """The step's folder that a user means."""
    if (path / MANIFEST).is_file():
        return path
    found = newest_whole(path / "checkpoints") or newest_whole(path)
    if found is None:
        raise CheckpointError(
            f"no complete checkpoint in {path}: a run keeps them in folders such as checkpoints/step-00000100"
        )
    return found


def _tokenizer_of(folder: Path, data: Mapping[str, Any]) -> str | None:
    """Return the tokenizer that is stored in the checkpoint, or that a BERT's run or the shard's manifest names.

    None if the shard no longer exists.
    """
    if (folder / TOKENIZER).is_dir():
        return str(folder / TOKENIZER)
    if data.get("tokenizer"):
        return str(data["tokenizer"])
    prefix = data.get("prefix") or next(iter(data.get("blend") or {}), None)
    if not prefix:
        return None
    try:
        manifest = read_shard_manifest(prefix)
        return None if manifest is None else tokenizer_of_shard(prefix, manifest)
    except (DataError, OSError):
        return None
