"""Initial weights from a Hugging Face folder: config.json and safetensors files, one or several with an index.

The folder may come from anywhere, so nothing in it is run and no name in it leaves it.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megapipe.checkpoint import hugging_face_bert
from megapipe.checkpoint.agreement import agreed
from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.hugging_face_config import family_of, field_differences, model_fields
from megapipe.checkpoint.shards import Shard, shards_of
from megapipe.checkpoint.tensor_file import TensorFile
from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.models import bert_hugging_face
from megapipe.models.gpt_hugging_face import Correspondence, correspondences, is_redundant
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

_BODIES = ("transformer.", "model.")
"""What names begin with unless the folder holds the model without its language-modelling head."""
_NO_WEIGHT = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")


def is_hugging_face(folder: Path) -> bool:
    """Whether a folder is meant to be read by this module."""
    return (folder / CONFIG).is_file()


def load_hugging_face(folder: Path, states: Sequence[UnitState], model: ModelConfig, mesh: Mesh) -> None:
    """Take the weights of a GPT-2, Llama, Mistral, Qwen2 or Qwen3 folder as the weights before a first step; for a
    BERT those of a BERT or MegatronBert folder.

    A collective call. Each rank reads only the tensors that its shards come from, one at a time.

    Raises:
        CheckpointError: the folder is incomplete or unreadable, or the model configuration is not the folder's; the
            message names the fields to set. The same on every rank; states are then not to be used.
    """
    agreed(mesh.world, lambda: _read(folder, states, model))
    for state in states:
        state.gather_versions(mesh.shard_group(state.sharding.count))


def _read(folder: Path, states: Sequence[UnitState], model: ModelConfig) -> None:
    weights = _Weights.fitting(folder, model)
    for shard in shards_of(states):
        shard.of(shard.state.master).copy_(weights.values(shard))
    for state in states:
        state.restore(len(state.weights) - 1)


@dataclass(frozen=True)
class _Kind:
    """How folders of a kind of model are read.

    names: stored names -> the canonical name of each. fields: config.json and canonical names -> what
    `field_differences` takes. pairs: config.json -> where every parameter lives. redundant: whether a canonical name
    may be left over.
    """

    names: Callable[[Collection[str]], Mapping[str, str]]
    fields: Callable[[Mapping[str, Any], Collection[str]], Mapping[str, Any]]
    pairs: Callable[[Mapping[str, Any]], Sequence[Correspondence]]
    redundant: Callable[[str], bool]


def _kind_of(model: ModelConfig) -> _Kind:
    if isinstance(model, BertModelConfig):
        return _Kind(
            hugging_face_bert.canonical_names,
            lambda config, names: hugging_face_bert.model_fields(config, names, model),
            lambda config: bert_hugging_face.correspondences(model),
            lambda name: hugging_face_bert.is_redundant(name, model),
        )
    return _Kind(
        _gpt_names,
        model_fields,
        lambda config: correspondences(model, family_of(config)),
        lambda name: is_redundant(name, model),
    )


def _gpt_names(stored: Collection[str]) -> Mapping[str, str]:
    bare = not any(name.startswith(_BODIES) for name in stored)
    body = "transformer." if any(name.startswith("h.") for name in stored) else "model."
    return {name: body + name if bare and name != "lm_head.weight" else name for name in stored}


class _Weights:
    """A folder's tensors by canonical name."""

    def __init__(self, files: "_Files", pairs: Sequence[Correspondence]) -> None:
        self._files = files
        self._pairs = {pair.spec.name: pair for pair in pairs}

    @classmethod
    def fitting(cls, folder: Path, model: ModelConfig) -> "_Weights":
        """Open the folder and see that it holds the weights of `model` and no others."""
        kind = _kind_of(model)
        config = _object(folder / CONFIG)
        files = _Files(folder, kind.names)
        try:
            differences = field_differences(model, kind.fields(config, files.names))
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / CONFIG} lacks what its model_type needs: {error}") from error
        except CheckpointError as error:
            raise CheckpointError(f"{folder / CONFIG}: {error}") from error
        if differences:
            raise CheckpointError(f"the model of {folder} is another one: {'; '.join(differences)}")
        pairs = kind.pairs(config)
        used = {name for pair in pairs for name in pair.theirs}
        missing = sorted(name for name in used if name not in files.names)
        unused = sorted(name for name in files.names - used if not kind.redundant(name))
        if missing or unused:
            told = [f"no tensor {name!r}" for name in missing[:3]] + [
                f"an unknown tensor {name!r}" for name in unused[:3]
            ]
            raise CheckpointError(f"{folder} does not hold the model of its {CONFIG}: {', '.join(told)}")
        return cls(files, pairs)

    def values(self, shard: Shard) -> Tensor:
        """The elements of a shard, in one dimension."""
        pair = self._pairs[shard.name]
        whole = pair.join([self._files.tensor(name) for name in pair.theirs])
        if tuple(whole.shape) != pair.spec.shape:
            raise CheckpointError(
                f"{', '.join(pair.theirs)} give {shard.name} the shape {tuple(whole.shape)} and not {pair.spec.shape}"
            )
        box = shard.segment.box
        index = tuple(slice(start, stop) for start, stop in zip(box.starts, box.stops, strict=True))
        held = shard.extent
        return whole[index].reshape(-1)[held.start : held.stop]


class _Files:
    """The safetensors files of a folder. names: of their tensors, as the model with its head has them."""

    def __init__(self, folder: Path, canonical: Callable[[Collection[str]], Mapping[str, str]]) -> None:
        self._folder = folder
        self._open: dict[str, TensorFile] = {}
        places = self._places()
        names = canonical(places.keys())
        self._places_by_name = {names[name]: (file, name) for name, file in places.items()}
        self.names = set(self._places_by_name)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, mapped and not yet read."""
        file, key = self._places_by_name[name]
        return self._file(file).tensor(key)

    def _places(self) -> dict[str, str]:
        """Tensor -> file."""
        if (self._folder / INDEX).is_file():
            places = _object(self._folder / INDEX).get("weight_map")
            if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
                raise CheckpointError(f"{self._folder / INDEX} has no weight_map from tensors to files")
            return places
        if (self._folder / SINGLE).is_file():
            return dict.fromkeys(self._file(SINGLE).keys, SINGLE)
        others = [path.name for pattern in ("*.bin", "*.pt") for path in self._folder.glob(pattern)]
        told = (
            f"; {others[0]} is a pickle, which can run code: have transformers save it as safetensors"
            if others
            else ""
        )
        raise CheckpointError(f"{self._folder} holds neither {SINGLE} nor {INDEX}{told}")

    def _file(self, name: str) -> TensorFile:
        if name not in self._open:
            if not name or name != Path(name).name or name in (".", ".."):
                raise CheckpointError(f"{self._folder / INDEX} names the file {name!r}, which is not in its folder")
            self._open[name] = TensorFile(self._folder / name)
        return self._open[name]


def _object(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return found
