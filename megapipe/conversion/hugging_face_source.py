"""Hugging Face folders as a source: config.json and safetensors or `.bin` files. Nothing in them is run."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.hugging_face_bert import NORM_POSITIONS
from megapipe.checkpoint.hugging_face_files import CONFIG, fields_of_config, fitting, joined, kind_of, stored_tensors
from megapipe.checkpoint.hugging_face_heads import with_stored_head
from megapipe.checkpoint.untrusted import inside, read_json
from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.conversion.contents import WEIGHTS, Contents, StoredTensor
from megapipe.conversion.foreign.pickled_tensors import PickledTensors
from megapipe.conversion.foreign.sandbox import Sandbox
from megapipe.conversion.model_fields import check_layers, model_of
from megapipe.conversion.source import Index
from megapipe.conversion.tensor_stream import TensorReader
from megapipe.models.gpt_hugging_face import WeightMappingError


class HuggingFaceSource:
    """The model of a folder of a family that docs/conversion.md lists, weights alone.

    Raises CheckpointError for a folder that is incomplete, unreadable or of another model, and for what a hostile one
    may try.
    """

    def __init__(self, path: Path, allow_pickle: bool = False) -> None:
        self._files: dict[Path, TensorReader | PickledTensors] = {}
        self._sandbox: Sandbox | None = None
        self._allow_pickle = allow_pickle
        config = read_json(inside(path, CONFIG))
        try:
            stored = stored_tensors(path, lambda file: self._file(file).entries, allow_pickle=allow_pickle)
            names = kind_of(_blank(config)).names(stored)
            self._places = {names[name]: (file, name) for name, file in stored.items()}
            config, note = with_stored_head(config, self._places, self._whole)
            model = _model(path, config, self._places)
            self._pairs = fitting(path, config, model, self._places)
            tensors = tuple(self._described(name) for name in self._pairs)
        except BaseException:
            self.close()
            raise
        self.contents = Contents(model, tensors, tokenizer=str(path), notes=(f"{path}: {note}",) if note else ())

    def read(self, tensor: StoredTensor, index: Index = ()) -> Tensor:
        pair = self._pairs[tensor.name]
        whole = joined([self._whole(name) for name in pair.theirs], pair)
        return (whole[index].clone() if index else whole).contiguous()

    def verify(self, tensor: StoredTensor) -> list[str]:
        """Compare the checksums of `.bin` files; safetensors have none, and are only read completely."""
        try:
            self.read(tensor)
        except CheckpointError as error:
            return [str(error)]
        places = [self._places[name] for name in self._pairs[tensor.name].theirs]
        pickled = [(file, key) for path, key in places if isinstance(file := self._file(path), PickledTensors)]
        return [problem for file, key in pickled for problem in file.verify(key)]

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}
        if self._sandbox is not None:
            self._sandbox.close()

    def _whole(self, name: str) -> Tensor:
        file, key = self._places[name]
        return self._file(file).whole(key)

    def _described(self, name: str) -> StoredTensor:
        pair = self._pairs[name]
        entries = []
        for theirs in pair.theirs:
            file, key = self._places[theirs]
            entries.append(self._file(file).entry(key))
        try:
            pair.check([entry.shape for entry in entries])
        except WeightMappingError as error:
            raise CheckpointError(str(error)) from error
        dtypes = {entry.dtype for entry in entries}
        if len(dtypes) > 1:
            raise CheckpointError(f"{', '.join(pair.theirs)} have different types, {', '.join(sorted(dtypes))}")
        return StoredTensor(name, WEIGHTS, pair.spec.shape, dtypes.pop())

    def _file(self, path: Path) -> TensorReader | PickledTensors:
        if path not in self._files:
            self._files[path] = self._pickled(path) if path.suffix == ".bin" else TensorReader(path)
        return self._files[path]

    def _pickled(self, path: Path) -> PickledTensors:
        if self._sandbox is None:
            self._sandbox = Sandbox(self._allow_pickle, path.parent)
        return PickledTensors(path, self._sandbox)


def _blank(config: Mapping[str, Any]) -> ModelConfig:
    """Any model of the folder's kind."""
    return BertModelConfig() if config.get("model_type") in tuple(NORM_POSITIONS) else ModelConfig()


def _model(folder: Path, config: Mapping[str, Any], names: Collection[str]) -> ModelConfig:
    """The configuration of the folder's model."""
    told = dict(fields_of_config(folder, kind_of(_blank(config)), config, names))
    told.setdefault("max_positions", config.get("max_position_embeddings", ModelConfig().max_positions))
    fields: dict[str, Any] = {name: value for name, value in told.items() if not name.startswith("rope_scaling.")}
    prefix = "rope_scaling."
    fields["rope_scaling"] = {
        name.removeprefix(prefix): value for name, value in told.items() if name.startswith(prefix)
    }
    model = model_of(fields)
    check_layers(folder, model, len(names))
    return model
