"""Hugging Face folders as a source and as a target. No code in a folder is run.

A source has config.json and safetensors or `.bin` files. A target gets safetensors files with an index, config.json,
and the tokenizer's files if it has any. The importer checks every export: config.json is read back, and a field that
changes cannot be expressed by that family of transformers.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint.directory import FreshFolder
from megapipe.checkpoint.hugging_face import (
    CONFIG,
    INDEX,
    SINGLE,
    HuggingFaceFolder,
    correspondences,
    family_errors,
    fields_of_config,
    read_family,
)
from megapipe.checkpoint.storage import CheckpointError, on_failure
from megapipe.checkpoint.tensor_file import DTYPES, TensorReader, TensorStream
from megapipe.config.model import ModelConfig
from megapipe.conversion.archive import PickledTensors, Sandbox
from megapipe.conversion.formats import WEIGHTS, Contents, Index, StoredTensor, TargetOptions
from megapipe.conversion.megapipe_format import check_layers, model_of
from megapipe.conversion.tokenizer_files import exported_tokenizer
from megapipe.spec.family import exporting_family, family_of


class HuggingFaceSource:
    """Reads the weights of a folder whose family is listed in docs/conversion.md.

    Raises CheckpointError for a folder that is incomplete or unreadable, an unsupported model, and hostile content.
    """

    def __init__(self, path: Path, allow_pickle: bool = False) -> None:
        self._sandbox: Sandbox | None = None
        self._allow_pickle = allow_pickle
        self._open_files = ExitStack()
        with on_failure(self.close):
            self._folder = folder = HuggingFaceFolder(path, self._open_file, allow_pickle=allow_pickle)
            model = _model(path, folder.config, folder.places)
            folder.fit(model)
            tensors = tuple(self._stored_tensor(name) for name in folder.pairs)
        notes = (f"{path}: {folder.note}",) if folder.note else ()
        self.contents = Contents(model, tensors, tokenizer=str(path), notes=notes)

    def read(self, tensor: StoredTensor, index: Index = ()) -> Tensor:
        """Return elements in canonical order; see `Source.read`. The folder's tensors that contain them are read
        completely."""
        whole = self._folder.parameter(tensor.name)
        return (whole[index].clone() if index else whole).contiguous()

    def verify(self, tensor: StoredTensor) -> list[str]:
        """Compare the checksums of `.bin` files. safetensors files have no checksums and are only read completely."""
        try:
            self.read(tensor)
        except CheckpointError as error:
            return [str(error)]
        problems = []
        for name in self._folder.pairs[tensor.name].names:
            path, key = self._folder.places[name]
            file = self._folder.file(path)
            if isinstance(file, PickledTensors):
                problems += file.verify(key)
        return problems

    def close(self) -> None:
        """Close all files, and end the process that read pickles, if there is one."""
        self._open_files.close()

    def _stored_tensor(self, name: str) -> StoredTensor:
        pair = self._folder.pairs[name]
        places = [self._folder.places[name] for name in pair.names]
        entries = [self._folder.file(file).entry(key) for file, key in places]
        with family_errors():
            pair.check([entry.shape for entry in entries])
        dtypes = {entry.dtype for entry in entries}
        if len(dtypes) > 1:
            raise CheckpointError(f"{', '.join(pair.names)} have different types, {', '.join(sorted(dtypes))}")
        return StoredTensor(name, WEIGHTS, pair.spec.shape, dtypes.pop())

    def _open_file(self, path: Path) -> TensorReader | PickledTensors:
        if path.suffix == ".bin" and self._sandbox is None:
            self._sandbox = self._open_files.enter_context(closing(Sandbox(self._allow_pickle, path.parent)))
        pickled = self._sandbox if path.suffix == ".bin" else None
        file = TensorReader(path) if pickled is None else PickledTensors(path, pickled)
        return self._open_files.enter_context(closing(file))


def _model(folder: Path, config: Mapping[str, Any], names: Collection[str]) -> ModelConfig:
    """Return the configuration of the folder's model."""
    run_fields = read_family(folder, config).run_fields(config)
    model = model_of({**run_fields, **fields_of_config(folder, config, names)})
    check_layers(folder, model, len(names))
    return model


_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def exported_config(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the content of config.json. dtype: type of the weights, by its name in safetensors.

    Raises CheckpointError with every field of `model` that its family, or the nearest one, cannot express.
    """
    with family_errors("model.family: "):
        family, differences = exporting_family(model)
    if differences:
        which = "its family" if model.family else "the nearest family"
        raise CheckpointError(
            f"this model cannot be exported to transformers; {which}, {family.model_type}, "
            f"would need another model: {'; '.join(differences)}"
        )
    return {**family.config(model), "dtype": _DTYPES[dtype], "torch_dtype": _DTYPES[dtype]}


_MTP_PREFIX = "head.mtp."
"""Start of the names of the parameters for multi-token prediction (MTP)."""
GENERATION = "generation_config.json"
_FileEntry = tuple[str, str, tuple[int, ...]]
"""Name, type and shape of a tensor in the folder."""


class HuggingFaceTarget:
    """Writes a folder that transformers loads by its path, without rows that only pad the vocabulary."""

    def __init__(self, path: Path, contents: Contents, options: TargetOptions) -> None:
        dtypes = {tensor.dtype for tensor in contents.tensors if tensor.kind == WEIGHTS}
        if len(dtypes) != 1:
            raise CheckpointError(
                f"weights are stored as {', '.join(sorted(dtypes))}; a Hugging Face folder "
                "has one type: choose it with --precision"
            )
        self._config = exported_config(contents.model, dtypes.pop())
        family = family_of(self._config["model_type"])
        with family_errors(f"this model cannot be exported as {family.model_type}: "):
            pairs = correspondences(contents.model, family)
        self._pairs = {pair.spec.name: pair for pair in pairs}
        # transformers stores a repeated tensor under both names, and reads the second one if the model is untied.
        copies = {first: copy for copy, first in family.repeats.items()}
        self._copies = {} if contents.model.tie_embeddings else copies
        self._names = [tensor.name for tensor in contents.tensors]
        self._check(contents)
        self._shards = self._plan_shards(contents, options.max_shard_bytes)
        count = len(self._shards)
        numbered = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        self._files = [SINGLE] if count == 1 else numbered
        self._tokenizer = exported_tokenizer(contents.tokenizer, contents.model)
        self._ids = self._agreed_ids()
        self._generates = contents.model.kind == "gpt"
        self._folder = FreshFolder(path)
        self._stream: TensorStream | None = None
        self._planned = zip(self._files, self._shards, strict=True)

    def add(self, tensor: StoredTensor, values: Tensor) -> None:
        """Write the tensors of a parameter; open the next file when one is full."""
        for name, part in self._parts(tensor, values):
            if self._stream is None or self._stream.full:
                if self._stream is not None:
                    self._stream.close()
                file, entries = next(self._planned)
                self._stream = TensorStream(self._folder.partial / file, entries)
            self._stream.add(name, part)

    def finish(self) -> list[str]:
        """Write the index, config.json and the tokenizer's files, and rename the folder."""
        if self._stream is not None:
            self._stream.close()
        if len(self._files) > 1:
            self._write(INDEX, self._index())
        # Without this, transformers takes the family's own padding token, which may be beyond the vocabulary.
        self._write(CONFIG, {"pad_token_id": None, **self._config, **self._ids})
        if self._generates and GENERATION not in self._tokenizer.files:
            self._write(GENERATION, self._ids)
        for name, content in self._tokenizer.files.items():
            self._folder.write(name, content)
        self._folder.finish()
        notes = [self._tokenizer.note] if self._tokenizer.note else []
        if any(tensor.startswith(_MTP_PREFIX) and tensor not in self._pairs for tensor in self._names):
            notes.append(f"left out: layers that predict further tokens, which {self._config['model_type']} lacks")
        return notes

    def _agreed_ids(self) -> dict[str, Any]:
        """Return the tokenizer's ids of special tokens. Raises CheckpointError if the model needs a different id of
        padding."""
        fixed = self._config.get("pad_token_id")
        padding = self._tokenizer.ids.get("pad_token_id")
        if None not in (fixed, padding) and fixed != padding:
            raise CheckpointError(
                f"the tokenizer's padding has the id {padding}, but the model's positions "
                f"count from the row after {fixed}, which is the id of padding in this "
                "family: name another tokenizer (--tokenizer), or --tokenizer none"
            )
        return {**self._tokenizer.ids, **({} if fixed is None else {"pad_token_id": fixed})}

    def abandon(self) -> None:
        """Remove everything that was written."""
        if self._stream is not None:
            self._stream.abandon()
        self._folder.abandon()

    def _check(self, contents: Contents) -> None:
        """Check that the tensors are the model's parameters."""
        shapes = {tensor.name: tensor.shape for tensor in contents.tensors}
        for name, pair in self._pairs.items():
            if shapes.get(name) != pair.spec.shape:
                state = f"of shape {shapes[name]}" if name in shapes else "missing"
                raise CheckpointError(f"{name} is {state} in the checkpoint; its model needs shape {pair.spec.shape}")
        unknown = [name for name in shapes if name not in self._pairs and not name.startswith(_MTP_PREFIX)]
        if unknown:
            raise CheckpointError(f"the checkpoint contains {', '.join(unknown[:4])}, which its model does not have")

    def _plan_shards(self, contents: Contents, max_bytes: int) -> list[list[_FileEntry]]:
        """Return the tensors of each file."""
        shards: list[list[_FileEntry]] = [[]]
        filled = 0
        for tensor in contents.tensors:
            for name, part in self._parts(tensor, torch.empty(tensor.shape, device="meta")):
                num_bytes = part.numel() * DTYPES[tensor.dtype].itemsize
                if shards[-1] and filled + num_bytes > max_bytes:
                    shards.append([])
                    filled = 0
                shards[-1].append((name, tensor.dtype, tuple(part.shape)))
                filled += num_bytes
        return shards

    def _parts(self, tensor: StoredTensor, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the names of a parameter's tensors in the folder, and these tensors."""
        pair = self._pairs.get(tensor.name)
        if pair is None:  # the family has no MTP layers
            return
        for name, part in zip(pair.names, pair.split(values), strict=True):
            yield name, part
            if name in self._copies:
                yield self._copies[name], part

    def _index(self) -> dict[str, Any]:
        places = {name: file for file, shard in zip(self._files, self._shards, strict=True) for name, *_ in shard}
        stored = [each for shard in self._shards for each in shard]
        size = sum(math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in stored)
        return {"metadata": {"total_size": size}, "weight_map": places}

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        self._folder.write(name, json.dumps(content, indent=2, sort_keys=True) + "\n")
