"""What a Hugging Face folder holds, judged before a tensor is read: which files, which tensors, of which model.

The folder may come from anywhere, so nothing in it is run and no name in it leaves it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megapipe.checkpoint import hugging_face_bert
from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.hugging_face_config import family_of, field_differences, model_fields
from megapipe.checkpoint.untrusted import check_counts, inside, read_json
from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.config.untrusted import DECODING_ERRORS
from megapipe.models import bert_hugging_face
from megapipe.models.gpt_hugging_face import (
    Correspondence,
    WeightMappingError,
    correspondences,
    is_redundant,
)

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")

_BODIES = ("transformer.", "model.")
"""What names begin with unless the folder holds the model without its language-modelling head."""


def is_hugging_face(folder: Path) -> bool:
    """Whether a folder is meant to be read by this module."""
    return (folder / CONFIG).is_file()


def stored_tensors(
    folder: Path, keys: Callable[[Path], Collection[str]], *, allow_pickle: bool = False
) -> dict[str, Path]:
    """Return tensor -> the file that contains it.

    keys: returns the tensors of a file. allow_pickle: read `.bin` files if there are no safetensors.

    Raises CheckpointError for a folder without readable weights, and for an index that names files outside it.
    """
    for single, index in ((SINGLE, INDEX), PICKLED)[: 1 + allow_pickle]:
        if (folder / index).is_file():
            return _indexed(folder, index)
        if (folder / single).is_file():
            path = inside(folder, single)
            return dict.fromkeys(keys(path), path)
    others = sorted(path.name for pattern in ("*.bin", "*.pt") for path in folder.glob(pattern))
    hint = ""
    if others:
        hint = (
            f"; {others[0]} is a pickle, which can carry code: convert the folder first, with "
            "megapipe convert convert FOLDER TARGET --to megapipe --allow-pickle"
        )
    raise CheckpointError(f"{folder} contains neither {SINGLE} nor {INDEX}{hint}")


def _indexed(folder: Path, name: str) -> dict[str, Path]:
    index = folder / name
    places = read_json(inside(folder, name)).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files")
    check_counts(index, len(set(places.values())), len(places))
    paths = {file: inside(folder, file) for file in set(places.values())}
    return {tensor: paths[file] for tensor, file in places.items()}


@dataclass(frozen=True)
class FolderReader:
    """How folders of a kind of model are read.

    names: stored names -> the canonical name of each. fields: config.json and canonical names -> what
    `field_differences` takes. pairs: config.json -> where every parameter lives. redundant: whether a canonical name
    may be left over.
    """

    names: Callable[[Collection[str]], Mapping[str, str]]
    fields: Callable[[Mapping[str, Any], Collection[str]], Mapping[str, Any]]
    pairs: Callable[[Mapping[str, Any]], Sequence[Correspondence]]
    redundant: Callable[[str], bool]


def kind_of(model: ModelConfig) -> FolderReader:
    """Return how Hugging Face folders of a model like this one are read: a BERT's, or those of a GPT's family."""
    if isinstance(model, BertModelConfig):
        return FolderReader(
            hugging_face_bert.canonical_names,
            lambda config, names: hugging_face_bert.model_fields(config, names, model),
            lambda config: bert_hugging_face.correspondences(model),
            lambda name: hugging_face_bert.is_redundant(name, model),
        )
    return FolderReader(
        _gpt_names,
        model_fields,
        lambda config: correspondences(model, family_of(config)),
        lambda name: is_redundant(name, model),
    )


def _gpt_names(stored: Collection[str]) -> Mapping[str, str]:
    bare = not any(name.startswith(_BODIES) for name in stored)
    body = "transformer." if any(name.startswith("h.") for name in stored) else "model."
    return {name: body + name if bare and name != "lm_head.weight" else name for name in stored}


def fitting(
    folder: Path, config: Mapping[str, Any], model: ModelConfig, names: Collection[str]
) -> dict[str, Correspondence]:
    """Parameter -> the folder's tensors that it comes from. names: the canonical ones.

    Raises CheckpointError unless the folder holds the weights of `model` and no others.
    """
    kind = kind_of(model)
    differences = field_differences(model, fields_of_config(folder, kind, config, names))
    if differences:
        raise CheckpointError(f"the model in {folder} differs from the configuration: {'; '.join(differences)}")
    pairs = kind.pairs(config)
    used = {name for pair in pairs for name in pair.theirs}
    missing = sorted(name for name in used if name not in names)
    unused = sorted(name for name in set(names) - used if not kind.redundant(name))
    if missing or unused:
        problems = [f"{name!r} is missing" for name in missing[:3]] + [f"{name!r} is unknown" for name in unused[:3]]
        raise CheckpointError(f"the tensors in {folder} do not match its {CONFIG}: {', '.join(problems)}")
    return {pair.spec.name: pair for pair in pairs}


def fields_of_config(
    folder: Path, kind: FolderReader, config: Mapping[str, Any], names: Collection[str]
) -> Mapping[str, Any]:
    """Return `kind.fields`. Raises CheckpointError, with the file, for a config.json of another structure."""
    try:
        return kind.fields(config, names)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}") from error
    except KeyError as error:
        raise CheckpointError(f"{folder / CONFIG} lacks the key {error}, which its model_type needs") from error
    except DECODING_ERRORS as error:
        raise CheckpointError(f"{folder / CONFIG} has a value that its model_type cannot have: {error}") from error


def joined(parts: Sequence[Tensor], pair: Correspondence) -> Tensor:
    """A parameter from its tensors. Raises CheckpointError for a tensor of another shape."""
    try:
        return pair.joined(parts)
    except WeightMappingError as error:
        raise CheckpointError(str(error)) from error
