"""Hugging Face folders as a target: safetensors files with an index, config.json, the tokenizer where it can be."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.hugging_face_files import CONFIG, INDEX, SINGLE
from megapipe.checkpoint.storage import DISK, write_file
from megapipe.checkpoint.tensor_file import DTYPES
from megapipe.config.bert import BertModelConfig
from megapipe.conversion.contents import WEIGHTS, Contents, StoredTensor
from megapipe.conversion.fresh_folder import FreshFolder
from megapipe.conversion.hugging_face_config import exported_config, exported_pairs
from megapipe.conversion.target import TargetOptions
from megapipe.conversion.tensor_stream import TensorStream
from megapipe.conversion.tokenizer_files import exported_tokenizer

GENERATION = "generation_config.json"
_Described = tuple[str, str, tuple[int, ...]]
"""Name, type and shape of one of their tensors."""


class HuggingFaceTarget:
    """A folder that transformers loads by its path. Rows that pad a vocabulary are not in it."""

    def __init__(self, path: Path, contents: Contents, options: TargetOptions) -> None:
        dtypes = {tensor.dtype for tensor in contents.tensors if tensor.kind == WEIGHTS}
        if len(dtypes) != 1:
            raise CheckpointError(
                f"weights are stored as {', '.join(sorted(dtypes))}; a Hugging Face folder has one type: choose it "
                "with --precision"
            )
        self._config = exported_config(contents.model, dtypes.pop())
        self._pairs = exported_pairs(contents.model, self._config)
        self._check(contents)
        self._shards = self._planned(contents, options.max_shard_bytes)
        self._files = [_file_name(number, len(self._shards)) for number in range(len(self._shards))]
        self._tokenizer = exported_tokenizer(contents.tokenizer, contents.model)
        self._is_bert = isinstance(contents.model, BertModelConfig)
        self._folder = FreshFolder(path)
        self._stream: TensorStream | None = None
        self._next = 0

    def add(self, tensor: StoredTensor, values: Tensor) -> None:
        pair = self._pairs[tensor.name]
        for name, part in zip(pair.theirs, pair.part(values), strict=True):
            if self._stream is None or self._stream.full:
                self._open_next()
            assert self._stream is not None
            self._stream.add(name, part)

    def finish(self) -> list[str]:
        if self._stream is not None:
            self._stream.close()
        if len(self._files) > 1:
            self._write(INDEX, self._index())
        self._write(CONFIG, {**self._config, **self._tokenizer.ids})
        if not self._is_bert and GENERATION not in self._tokenizer.files:
            self._write(GENERATION, self._tokenizer.ids)
        for name, content in self._tokenizer.files.items():
            write_file(DISK, self._folder.partial / name, [memoryview(content)])
        self._folder.finish()
        return [self._tokenizer.note] if self._tokenizer.note else []

    def abandon(self) -> None:
        if self._stream is not None:
            self._stream.abandon()
        self._folder.abandon()

    def _check(self, contents: Contents) -> None:
        """See that the tensors are the model's parameters."""
        shapes = {tensor.name: tensor.shape for tensor in contents.tensors}
        for name, pair in self._pairs.items():
            if shapes.get(name) != pair.spec.shape:
                state = f"of shape {shapes[name]}" if name in shapes else "missing"
                raise CheckpointError(f"{name} is {state} in the checkpoint; its model needs shape {pair.spec.shape}")
        unknown = [name for name in shapes if name not in self._pairs]
        if unknown:
            raise CheckpointError(f"the checkpoint contains {', '.join(unknown[:4])}, which its model does not have")

    def _planned(self, contents: Contents, max_bytes: int) -> list[list[_Described]]:
        """Their tensors, file by file."""
        shards: list[list[_Described]] = [[]]
        filled = 0
        for tensor in contents.tensors:
            pair = self._pairs[tensor.name]
            for name, part in zip(pair.theirs, pair.part(torch.empty(tensor.shape, device="meta")), strict=True):
                num_bytes = part.numel() * DTYPES[tensor.dtype].itemsize
                if shards[-1] and filled + num_bytes > max_bytes:
                    shards.append([])
                    filled = 0
                shards[-1].append((name, tensor.dtype, tuple(part.shape)))
                filled += num_bytes
        return shards

    def _open_next(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = TensorStream(self._folder.partial / self._files[self._next], self._shards[self._next])
        self._next += 1

    def _index(self) -> dict[str, Any]:
        size = 0
        places = {}
        for file, shard in zip(self._files, self._shards, strict=True):
            for name, dtype, shape in shard:
                places[name] = file
                size += torch.Size(shape).numel() * DTYPES[dtype].itemsize
        return {"metadata": {"total_size": size}, "weight_map": places}

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        text = (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
        write_file(DISK, self._folder.partial / name, [memoryview(text)])


def _file_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
