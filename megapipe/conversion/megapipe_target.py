"""megapipe's own checkpoints as a target: a step's folder that training resumes from, or takes weights from."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from torch import Tensor

import megapipe
from megapipe.checkpoint.extents import Extent
from megapipe.checkpoint.hugging_face_files import CONFIG
from megapipe.checkpoint.manifest import Chunk, Manifest, RunState
from megapipe.checkpoint.manifest_file import MANIFEST, check_files, encoded
from megapipe.checkpoint.storage import DISK, write_file
from megapipe.config.bert import BertDataConfig, BertModelConfig, BertPretrainConfig
from megapipe.config.data import DataConfig
from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.conversion.contents import WEIGHTS, Contents, StoredTensor
from megapipe.conversion.fresh_folder import FreshFolder
from megapipe.conversion.tensor_stream import TensorStream
from megapipe.conversion.tokenizer_files import copied_files, token_ids
from megapipe.spec.parameters import Box

Data = TypeVar("Data", bound=DataConfig)

_PRECISIONS = {"F32": "fp32", "F64": "fp32", "BF16": "bf16", "F16": "fp16"}


TOKENIZER = "tokenizer"
"""The folder in a checkpoint with the tokenizer's files of a Hugging Face model."""


class MegapipeTarget:
    """A checkpoint with a file for each kind of tensor and type, named by number: names come from anywhere."""

    def __init__(self, path: Path, contents: Contents) -> None:
        self._contents = contents
        self._folder = FreshFolder(path)
        self._chunks: list[Chunk] = []
        self._streams: dict[tuple[str, str], tuple[str, TensorStream]] = {}
        try:
            # One type a file, so that every tensor starts at a multiple of its element size.
            for number, group in enumerate(dict.fromkeys((each.kind, each.dtype) for each in contents.tensors)):
                file = f"part-{number:05d}.safetensors"
                tensors = [
                    (_key(each), each.dtype, each.shape)
                    for each in contents.tensors
                    if (each.kind, each.dtype) == group
                ]
                self._streams[group] = file, TensorStream(self._folder.partial / file, tensors)
        except BaseException:
            self.abandon()
            raise

    def add(self, tensor: StoredTensor, values: Tensor) -> None:
        file, stream = self._streams[tensor.kind, tensor.dtype]
        checksums = stream.add(_key(tensor), values)
        whole = Extent.whole(Box((0,) * len(tensor.shape), tensor.shape))
        self._chunks.append(
            Chunk(tensor.name, tensor.kind, tensor.shape, whole, file, _key(tensor), tensor.dtype, checksums)
        )

    def finish(self) -> list[str]:
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
        self._keep_tokenizer()
        write_file(DISK, self._folder.partial / MANIFEST, [memoryview(encoded(manifest))])
        self._folder.finish()
        if self._contents.applied_updates:
            return [f"to resume from it, move it to RUN/checkpoints/step-{run.step:08d}"]
        return [f"weights for a new run: --init_from {self._folder.path}"]

    def _keep_tokenizer(self) -> None:
        """Copy the tokenizer's files of a Hugging Face folder, so that a later export writes them unchanged."""
        if self._contents.tokenizer is None:
            return
        folder = Path(self._contents.tokenizer)
        if not (folder / CONFIG).is_file():
            return
        ids = json.dumps(token_ids(folder), indent=2).encode()
        kept = self._folder.partial / TOKENIZER
        DISK.make_folder(kept)
        for name, content in {**copied_files(folder), CONFIG: ids}.items():
            write_file(DISK, kept / name, [memoryview(content)])
        DISK.flush_folder(kept)

    def abandon(self) -> None:
        for _, stream in self._streams.values():
            stream.abandon()
        self._folder.abandon()


def _key(tensor: StoredTensor) -> str:
    return f"{tensor.kind}/{tensor.name}"


def _fresh_run(contents: Contents) -> RunState:
    """A run that has not begun, with weights from elsewhere."""
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
    """One that holds for the model; what a run reads and does is for its user to say."""
    if isinstance(model, BertModelConfig):
        pairs = BertDataConfig(pairs="order" if model.sentence_head else "none")
        return BertPretrainConfig(model=model, data=_fitting(pairs, model))
    return PretrainConfig(model=model, data=_fitting(DataConfig(), model))


def _fitting(data: Data, model: ModelConfig) -> Data:
    return replace(data, sequence_length=min(data.sequence_length, model.max_positions))
