"""megapipe's own checkpoints as a source and as a target, and model configurations from plain values."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import megapipe
from megapipe.checkpoint.directory import FreshFolder, whole_checkpoint
from megapipe.checkpoint.hugging_face import CONFIG
from megapipe.checkpoint.manifest import (
    MANIFEST,
    TOKENIZER,
    Chunk,
    Manifest,
    RunState,
    check_files,
    check_size,
    encoded,
    read_manifest,
)
from megapipe.checkpoint.shards import Extent, Overlap, box_of, overlaps, tiling_problem
from megapipe.checkpoint.storage import CheckpointError, DamagedCheckpointError, inside, on_failure
from megapipe.checkpoint.tensor_file import (
    DTYPES,
    PIECE_BYTES,
    TensorReader,
    TensorStream,
    bytes_of,
    check_piece,
    touched_pieces,
)
from megapipe.config.bert import BertModelConfig
from megapipe.config.files import DECODING_ERRORS
from megapipe.config.load import KINDS, FieldParser
from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.conversion.formats import WEIGHTS, Contents, Index, StoredTensor, TargetOptions
from megapipe.conversion.tokenizer_files import copied_files, token_ids
from megapipe.data import DataError
from megapipe.data.manifest import read_manifest as read_shard_manifest
from megapipe.data.manifest import tokenizer_of_shard
from megapipe.spec.layers import model_layers
from megapipe.spec.parameters import Box, ParameterSpec

_PRECISIONS = {"F32": "fp32", "F64": "fp32", "BF16": "bf16", "F16": "fp16"}


class MegapipeTarget:
    """Writes a checkpoint with one file per kind and type of tensors. Files are numbered, because tensor names are
    untrusted."""

    def __init__(self, path: Path, contents: Contents, options: TargetOptions | None = None) -> None:
        self._contents = contents
        self._folder = FreshFolder(path)
        self._chunks: list[Chunk] = []
        self._streams: dict[tuple[str, str], tuple[str, TensorStream]] = {}
        with on_failure(self.abandon):
            # Each file has one type, so that every tensor starts at a multiple of its element size.
            for number, group in enumerate(dict.fromkeys((each.kind, each.dtype) for each in contents.tensors)):
                file = f"part-{number:05d}.safetensors"
                tensors = [
                    (_key(each), each.dtype, each.shape)
                    for each in contents.tensors
                    if (each.kind, each.dtype) == group
                ]
                self._streams[group] = file, TensorStream(self._folder.partial / file, tensors)

    def add(self, tensor: StoredTensor, values: Tensor) -> None:
        """Append a tensor to the file of its kind and type."""
        file, stream = self._streams[tensor.kind, tensor.dtype]
        checksums = stream.add(_key(tensor), values)
        whole = Extent.whole(Box((0,) * len(tensor.shape), tensor.shape))
        self._chunks.append(
            Chunk(tensor.name, tensor.kind, tensor.shape, whole, file, _key(tensor), tensor.dtype, checksums)
        )

    def finish(self) -> list[str]:
        """Write the tokenizer's files and the manifest, and rename the folder."""
        for _, stream in self._streams.values():
            stream.close()
        run = self._contents.run or _fresh_run(self._contents)
        manifest = Manifest(
            code_version=megapipe.__version__,
            run=run,
            applied_updates=self._contents.applied_updates,
            files={file: stream.size for file, stream in self._streams.values()},
            chunks=tuple(self._chunks),
        )
        check_files(self._folder.partial, manifest)
        self._copy_tokenizer()
        self._folder.write(MANIFEST, encoded(manifest))
        self._folder.finish()
        if self._contents.applied_updates:
            return [f"to resume from it, move it to RUN/checkpoints/step-{run.step:08d}"]
        return [f"weights for a new run: --init_from {self._folder.path}"]

    def _copy_tokenizer(self) -> None:
        """Copy the tokenizer's files of a Hugging Face folder, so that a later export writes them unchanged."""
        if self._contents.tokenizer is None:
            return
        folder = Path(self._contents.tokenizer)
        if not (folder / CONFIG).is_file():
            return
        self._folder.make_folder(TOKENIZER)
        ids = json.dumps(token_ids(folder), indent=2).encode()
        for name, content in {**copied_files(folder), CONFIG: ids}.items():
            self._folder.write(f"{TOKENIZER}/{name}", content)

    def abandon(self) -> None:
        """Remove everything that was written."""
        for _, stream in self._streams.values():
            stream.abandon()
        self._folder.abandon()


def _key(tensor: StoredTensor) -> str:
    return f"{tensor.kind}/{tensor.name}"


def _fresh_run(contents: Contents) -> RunState:
    """Return the state of a run that has not started, for weights that do not come from a run."""
    dtype = next(tensor.dtype for tensor in contents.tensors if tensor.kind == WEIGHTS)
    return RunState(
        step=0,
        consumed_samples=0,
        random={"seed": 0},
        precision=_PRECISIONS[dtype],
        losses=(),
        config=asdict(_fresh_config(contents.model)),
    )


def _fresh_config(model: ModelConfig) -> PretrainConfig:
    """Return a valid configuration for the model; the user chooses the data and everything else."""
    config = replace(KINDS[model.kind](), model=model)
    data: Any = config.data
    if not vars(model).get("sentence_head", True):
        data = replace(data, pairs="none")
    return replace(config, data=replace(data, sequence_length=min(data.sequence_length, model.max_positions)))


def model_of(fields: Mapping[str, Any]) -> ModelConfig:
    """Return a ModelConfig, or a BertModelConfig if there is a field that only BERT has.

    Raises CheckpointError for unknown fields, wrong types and invalid values.
    """
    parser = FieldParser()
    parser.add_class_arguments(BertModelConfig if "sentence_head" in fields else ModelConfig, "model")
    try:
        model: ModelConfig = parser.instantiate(parser.parse_object({"model": dict(fields)}))["model"]
        problems = model.problems()
    except DECODING_ERRORS as error:
        raise CheckpointError(f"the checkpoint's model configuration cannot be used: {error}") from error
    if problems:
        raise CheckpointError(f"the checkpoint's model configuration cannot be used: {'; '.join(problems)}")
    return model


def parameters_of(model: ModelConfig) -> dict[str, ParameterSpec]:
    """Return every parameter by its global name, in the model's order. A tied parameter appears once."""
    return {spec.name: spec for layer in model_layers(model) for spec in layer.parameters.values()}


def ordered(tensors: Iterable[StoredTensor], model: ModelConfig) -> tuple[StoredTensor, ...]:
    """Return tensors in the order of `Contents`: weights first, then the other kinds, parameters in the model's
    order."""
    places = {name: sort_key for sort_key, name in enumerate(parameters_of(model))}

    def sort_key(tensor: StoredTensor) -> tuple[bool, str, int, str]:
        return tensor.kind != WEIGHTS, tensor.kind, places.get(tensor.name, len(places)), tensor.name

    return tuple(sorted(tensors, key=sort_key))


def check_layers(path: Path, model: ModelConfig, tensors: int) -> None:
    """Raise CheckpointError if the model has more layers than the checkpoint has tensors, before layers are
    created."""
    layers = model.num_layers + model.mtp_layers
    if layers > tensors:
        raise CheckpointError(
            f"{path} describes a model of {layers} layers but contains parameters of at most "
            f"{tensors}; it is damaged or incomplete"
        )


class MegapipeSource:
    """Reads the checkpoint in a step's folder, or the newest complete checkpoint in a run's folder.

    folder: the step's folder. manifest: its manifest. Every byte that is read is checked against the manifest.
    """

    def __init__(self, path: Path, allow_pickle: bool = False) -> None:
        self.folder = whole_checkpoint(path)
        self.manifest = read_manifest(self.folder)
        self._files: dict[str, TensorReader] = {}
        self._check_tiling()
        run = self.manifest.run
        model = model_of(run.config.get("model", {}))
        check_layers(self.folder, model, len(self.manifest.shapes()))
        self.contents = Contents(
            model=model,
            tensors=ordered(
                {StoredTensor(each.name, each.kind, each.shape, each.dtype) for each in self.manifest.chunks}, model
            ),
            run=run,
            applied_updates=self.manifest.applied_updates,
            tokenizer=_tokenizer_of(self.folder, run.config.get("data", {})),
        )

    def read(self, tensor: StoredTensor, index: Index = ()) -> Tensor:
        """Return elements; see `Source.read`. Only the pieces that contain them are read and checked."""
        box = box_of(index, tensor.shape)
        extent = Extent.whole(box)
        elements = torch.empty(box.num_elements, dtype=DTYPES[tensor.dtype])
        for chunk in self.manifest.chunks_of(tensor.name, tensor.kind):
            shared = list(overlaps(chunk.extent, extent))
            if shared:
                self._copy(chunk, shared, elements, extent)
        return elements.reshape(box.shape)

    def verify(self, tensor: StoredTensor) -> list[str]:
        """Read and check all pieces of a tensor; return one message for each bad chunk."""
        problems = []
        for chunk in self.manifest.chunks_of(tensor.name, tensor.kind):
            try:
                self._read(chunk, None, [range(chunk.extent.num_elements)])
            except CheckpointError as error:
                problems.append(str(error))
        return problems

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def _check_tiling(self) -> None:
        """Check that the chunks of every tensor cover it exactly once, before anything is written."""
        for name in self.manifest.shapes():
            for kind in self.manifest.kinds_of(name):
                chunks = self.manifest.chunks_of(name, kind)
                if len({(chunk.shape, chunk.dtype) for chunk in chunks}) > 1:
                    raise DamagedCheckpointError(f"the parts of {kind} of {name} differ in shape or type", "manifest")
                problem = tiling_problem(chunks[0].shape, [chunk.extent for chunk in chunks])
                if problem is not None:
                    raise DamagedCheckpointError(f"{kind} of {name}: {problem}", "manifest")

    def _copy(self, chunk: Chunk, shared: list[Overlap], target: Tensor, extent: Extent) -> None:
        if chunk.extent == extent:
            self._read(chunk, target, [range(extent.num_elements)])
            return
        # Pages of this buffer that are not touched take no memory.
        source = torch.empty(chunk.extent.num_elements, dtype=DTYPES[chunk.dtype])
        self._read(chunk, source, [overlap.source.span for overlap in shared])
        for overlap in shared:
            overlap.copy(source, target)

    def _read(self, chunk: Chunk, target: Tensor | None, spans: list[range]) -> None:
        """Read and check the pieces with `spans` of a chunk's elements; store them in `target` unless it is None."""
        file = self._file(chunk.file)
        width = DTYPES[chunk.dtype].itemsize
        num_bytes = chunk.extent.num_elements * width
        entry = file.entry(chunk.key)
        if entry.num_bytes != num_bytes or entry.dtype != chunk.dtype:
            raise DamagedCheckpointError(
                f"{file.path}: tensor {chunk.key!r} has {entry.num_bytes} bytes of "
                f"{entry.dtype}; the manifest has {num_bytes} bytes of {chunk.dtype}",
                "unreadable",
            )
        content = memoryview(bytearray(PIECE_BYTES)) if target is None else bytes_of(target)
        for piece in touched_pieces(spans, width):
            start, stop = piece * PIECE_BYTES, min((piece + 1) * PIECE_BYTES, num_bytes)
            part = content[: stop - start] if target is None else content[start:stop]
            file.read(chunk.key, part, start)
            check_piece(file.path, chunk.key, start, part, chunk.checksums[piece])

    def _file(self, name: str) -> TensorReader:
        if name not in self._files:
            path = inside(self.folder, name)
            if path.is_file():
                check_size(path, self.manifest.files[name])
            self._files[name] = TensorReader(path)
        return self._files[name]


def _tokenizer_of(folder: Path, data: Mapping[str, Any]) -> str | None:
    """Return the tokenizer in the checkpoint, or else the one that a BERT's run or a shard's manifest names.

    data: the run's data configuration as plain values.

    Return None if the shard no longer exists.
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
