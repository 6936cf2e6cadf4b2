"""Initial weights from Hugging Face: our parameters as tensors of a family, and the folders that contain them.

Every conversion of a parameter is a permutation of elements, so it carries gradients and optimizer moments as well as
weights, in both directions.

A folder has config.json and safetensors files, one or several with an index. It is checked before a tensor is read:
its files, its tensors, and their model. It may come from an untrusted source, so no code in it is run, and no file
outside it is read.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from megapipe.checkpoint.shards import shards_of
from megapipe.checkpoint.storage import CheckpointError, agreed, check_counts, inside, read_json
from megapipe.checkpoint.tensor_file import TensorFile
from megapipe.config.files import DECODING_ERRORS
from megapipe.config.model import ModelConfig
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.spec.family import Family, FamilyError, Step, family_of, field_differences
from megapipe.spec.parameters import ParameterSpec

Join = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Correspondence:
    """One of our parameters and the tensors of a family that contain its elements.

    names: names of these tensors. steps: pairs of functions: a step from the family's tensors towards our
    parameter, and its inverse.
    """

    spec: ParameterSpec
    names: tuple[str, ...]
    steps: tuple[tuple[Join, Join], ...]

    def split(self, parameter: Tensor) -> Sequence[Tensor]:
        """Return the family's tensors, in the order of `names`, that our parameter becomes."""
        parts: Sequence[Tensor] = [parameter]
        for _, inverse in reversed(self.steps):
            parts = inverse(parts)
        return parts if self.steps else [_merged(self.spec, part) for part in parts]

    def check(self, shapes: Sequence[Sequence[int]]) -> None:
        """Raise FamilyError unless `shapes`, one for each of `names`, are the shapes of the tensors that form
        our parameter."""
        parts = self.split(torch.empty(self.spec.shape, device="meta"))
        for name, shape, part in zip(self.names, shapes, parts, strict=True):
            if tuple(shape) != tuple(part.shape):
                raise FamilyError(
                    f"{name} has the shape {tuple(shape)}, but the model configuration needs "
                    f"{tuple(part.shape)} for {self.spec.name}"
                )

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return our parameter, made of the family's tensors. Raises FamilyError for a part of another shape."""
        self.check([part.shape for part in parts])
        for step, _ in self.steps:
            parts = step(parts)
        (whole,) = parts
        return whole.reshape(self.spec.shape)


def correspondences(model: ModelConfig, family: Family) -> list[Correspondence]:
    """Return the correspondence of every parameter. Raises FamilyError if the family has no tensor for one."""
    return [
        Correspondence(spec, names, tuple(_step(step, spec, block, len(names)) for step in steps))
        for spec, block, names, steps in family.places(model)
    ]


def _step(step: Step, spec: ParameterSpec, model: ModelConfig, count: int) -> tuple[Join, Join]:
    """Return a step and its inverse. count: number of the family's tensors."""
    if step == "query_key_value":
        return _query_key_value(model, fused=count == 1)
    if step == "rotary_pairs":
        half = model.head_dim // 2
        return lambda parts: [_regrouped(parts[0], half, 2)], lambda parts: [_regrouped(parts[0], 2, half)]
    if step == "rotary_last":
        return rotary_last(model, spec)
    if step == "stacked":
        axes = next(n for n in range(1, len(spec.shape)) if math.prod(spec.shape[:n]) == count)
        return lambda parts: [torch.stack([*parts])], lambda parts: parts[0].flatten(0, axes - 1).unbind(0)
    if step == "input_first":
        return _swapped(3), _swapped(3)
    if step == "interleaved":
        return (
            lambda parts: [parts[0].unflatten(1, (-1, 2)).transpose(1, 2)],
            lambda parts: [parts[0].transpose(1, 2).flatten(1, 2)],
        )
    if step == "row":
        return lambda parts: [parts[0][0]], lambda parts: [parts[0][None]]
    return _swapped(2), lambda parts: _swapped(2)([_merged(spec, part) for part in parts])


def _swapped(axes: int) -> Join:
    """Return the step that exchanges the last two axes of the tensors that have this number of axes."""
    return lambda parts: [part.mT if part.ndim == axes else part for part in parts]


def _merged(spec: ParameterSpec, parameter: Tensor) -> Tensor:
    """Return a matrix with its leading axes merged, or a bias or norm as a vector."""
    return parameter.flatten(0, -2) if spec.decay else parameter.flatten()


def _query_key_value(model: ModelConfig, fused: bool) -> tuple[Join, Join]:
    """Return the step from query, key and value to one tensor (kv groups, query heads per group + 2, head_dim, ...),
    and its inverse. fused: whether query, key and value are in one tensor, instead of three."""
    groups, width = model.kv_heads, model.head_dim
    heads = model.num_heads // groups
    rows = [model.num_heads * width, groups * width, groups * width]

    def join(parts: Sequence[Tensor]) -> Sequence[Tensor]:
        pieces = parts[0].split(rows) if fused else parts
        shaped = [piece.reshape(groups, -1, width, *piece.shape[1:]) for piece in pieces]
        return [torch.cat(shaped, dim=1)]

    def split(parts: Sequence[Tensor]) -> Sequence[Tensor]:
        pieces = [piece.flatten(0, 2) for piece in parts[0].split([heads, 1, 1], dim=1)]
        return [torch.cat(pieces)] if fused else pieces

    return join, split


def rotary_last(model: ModelConfig, spec: ParameterSpec) -> tuple[Join, Join]:
    """Return the step that moves the rotated rows of queries to the front of each head and regroups their pairs, and
    its inverse. In both formats, the rows of the shared key follow the rows of the latent."""
    rotated = model.rotary_dim
    shared = spec.name.rpartition(".")[0].endswith("kv_down")
    heads = 1 if shared else model.num_heads

    def moved(from_front: bool, to_front: bool, *pairs: int) -> Join:
        def step(parts: Sequence[Tensor]) -> Sequence[Tensor]:
            rows = parts[0].unflatten(0, (heads, -1))
            plain_rows = rows.shape[1] - rotated
            turned = rows[:, :rotated] if from_front else rows[:, plain_rows:]
            plain = rows[:, rotated:] if from_front else rows[:, :plain_rows]
            turned = turned.unflatten(1, pairs).transpose(1, 2).flatten(1, 2)
            ordered = [turned, plain] if to_front else [plain, turned]
            return [torch.cat(ordered, dim=1).flatten(0, 1)]

        return step

    return moved(False, not shared, rotated // 2, 2), moved(not shared, False, 2, rotated // 2)


def _regrouped(qkv: Tensor, *pairs: int) -> Tensor:
    """Return `qkv`, (kv groups, query heads + 2, head_dim, ...), with regrouped channels of queries and keys.

    pairs: two sizes, into which head_dim is split; the two axes are then exchanged.
    """
    rotated, values = qkv.split([qkv.shape[1] - 1, 1], dim=1)
    return torch.cat([rotated.unflatten(2, pairs).transpose(2, 3).flatten(2, 3), values], dim=1)


CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TIED = "tie_word_embeddings"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def is_hugging_face(folder: Path) -> bool:
    """Return whether this module can read a folder."""
    return (folder / CONFIG).is_file()


def stored_tensors(
    folder: Path, keys: Callable[[Path], Collection[str]], *, allow_pickle: bool = False
) -> dict[str, Path]:
    """Map the name of each tensor to the file that contains it.

    keys: returns the names of a file's tensors. allow_pickle: read `.bin` files if there are no safetensors files.

    Raises CheckpointError for a folder without readable weights, and for an index with files outside the folder.
    """
    for single, index in ((SINGLE, INDEX), PICKLED)[: 1 + allow_pickle]:
        if (folder / index).is_file():
            return _indexed(folder, index)
        if (folder / single).is_file():
            path = inside(folder, single)
            return dict.fromkeys(keys(path), path)
    pickles = sorted(path.name for kind in ("*.bin", "*.pt") for path in folder.glob(kind))
    hint = ""
    if pickles:
        hint = (
            f"; {pickles[0]} is a pickle, which can carry code: convert the folder first, "
            "with megapipe convert convert FOLDER TARGET --to megapipe --allow-pickle"
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


@contextmanager
def family_errors(place: str = "") -> Iterator[None]:
    """Raise CheckpointError, with `place` in front, for a FamilyError in the block."""
    try:
        yield
    except FamilyError as error:
        raise CheckpointError(f"{place}{error}") from error


def read_family(folder: Path, config: Mapping[str, Any], kind: str | None = None) -> Family:
    """Return the family of a config.json. Raises CheckpointError, with the path, if it is unknown or its kind is not
    `kind`."""
    with family_errors(f"{folder / CONFIG}: "):
        return family_of(config.get("model_type"), kind)


def fields_of_config(folder: Path, config: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """Return the model fields that a config.json sets. Raises CheckpointError, with the path, for an invalid file."""
    with family_errors(f"{folder / CONFIG}: "):
        return read_family(folder, config).model_fields(config, names)


def match_parameters(
    folder: Path, config: Mapping[str, Any], model: ModelConfig, names: Collection[str]
) -> dict[str, Correspondence]:
    """Map each parameter to the folder's tensors that form it. names: the canonical names of the tensors.

    Raises CheckpointError unless the folder contains exactly the weights of `model`.
    """
    fields = fields_of_config(folder, config, names)
    try:
        differences = field_differences(model, fields)
    except DECODING_ERRORS as error:
        raise CheckpointError(f"{folder / CONFIG} has a value that its model_type cannot have: {error}") from error
    if differences:
        raise CheckpointError(f"the model in {folder} differs from the configuration: {'; '.join(differences)}")
    family = read_family(folder, config)
    if model.mtp_layers and not family.mtp:
        raise CheckpointError(
            f"model.mtp_layers is {model.mtp_layers}, but weights of {family.model_type} have "
            "no layers that predict further tokens; set model.mtp_layers to 0"
        )
    pairs = correspondences(model, family)
    used = {name for pair in pairs for name in pair.names}
    missing = sorted(name for name in used if name not in names)
    unused = sorted(name for name in set(names) - used if not family.is_redundant(name, model))
    if missing or unused:
        problems = [f"{name!r} is missing" for name in missing[:3]] + [f"{name!r} is unknown" for name in unused[:3]]
        raise CheckpointError(f"the tensors in {folder} do not match its {CONFIG}: {', '.join(problems)}")
    return {pair.spec.name: pair for pair in pairs}


_PIECE = 1 << 22
"""Number of bytes that are compared at once."""


def with_stored_head(
    family: Family, config: Mapping[str, Any], names: Collection[str], read: Callable[[str], Tensor]
) -> tuple[Mapping[str, Any], str]:
    """Return the configuration, untied if the folder's output matrix differs from its embedding, and a note about it.

    transformers 5 uses the stored matrix of such a folder. names: canonical names of the folder's tensors. read:
    returns a tensor by its canonical name. The note is empty if nothing was changed.

    Raises CheckpointError if a tied model stores a tensor twice with different values, because the model has only one.
    """
    head, embedding = family.output, family.embedding
    tied = is_tied(family, config)
    for second, first in family.repeats.items():
        if tied and second in names and first in names and not _equal(read(second), read(first)):
            raise CheckpointError(f"{first} and {second} differ, but the model has only one; remove the wrong tensor")
    if not tied or head not in names or embedding not in names or _equal(read(head), read(embedding)):
        return config, ""
    note = f"tie_word_embeddings is true, but {head} differs from {embedding}; the model is read as untied"
    return {**config, TIED: False}, note


def is_tied(family: Family, config: Mapping[str, Any]) -> Any:
    """Return whether a config.json ties the output matrix to the embedding."""
    return config.get(TIED, family.defaults.get(TIED, False))


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same type, shape and bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    one, other = (each.reshape(-1).view(torch.uint8) for each in (one, other))
    return all(map(torch.equal, one.split(_PIECE), other.split(_PIECE)))


def load_hugging_face(folder: Path, states: Sequence[UnitState], model: ModelConfig, mesh: Mesh) -> None:
    """Load the weights of a folder as initial weights; docs/conversion.md lists the families.

    A collective call. Each rank reads only the tensors that its shards come from, one at a time.

    Raises:
        CheckpointError: the folder is incomplete or unreadable, or its model differs from the configuration; the
            message names the fields to set. Every rank raises the same error; do not use the states afterwards.
    """
    agreed(mesh.world, lambda: _read(folder, states, model))
    for state in states:
        state.gather_versions(mesh.shard_group(state.sharding.count))


def _read(folder: Path, states: Sequence[UnitState], model: ModelConfig) -> None:
    source = HuggingFaceFolder(folder, TensorFile, kind=model.kind)
    source.fit(model)
    for shard in shards_of(states):
        box, extent = shard.segment.box, shard.extent
        index = tuple(map(slice, box.starts, box.stops))
        values = source.parameter(shard.name)[index].reshape(-1)[extent.start : extent.stop]
        shard.of(shard.state.master).copy_(values)
    for state in states:
        state.restore(len(state.weights) - 1)


Reader = TypeVar("Reader", bound="_Reader")


class _Reader(Protocol):
    """An open file of tensors. entries: names of its tensors."""

    @property
    def entries(self) -> Collection[str]: ...

    def whole(self, key: str) -> Tensor:
        """Return a tensor."""


class HuggingFaceFolder(Generic[Reader]):
    """An open Hugging Face folder. `opener` opens its files.

    config: its config.json, untied if `note` says so. places: file and stored name of each tensor, by canonical name.
    pairs: the tensors of each parameter, set by `fit`.

    Raises CheckpointError for an unreadable folder, and for a family whose kind is not `kind`.
    """

    def __init__(
        self, path: Path, opener: Callable[[Path], Reader], *, kind: str | None = None, allow_pickle: bool = False
    ) -> None:
        self.path, self._opener = path, opener
        self.files: dict[Path, Reader] = {}
        self.pairs: Mapping[str, Correspondence] = {}
        config = read_json(inside(path, CONFIG))
        family = read_family(path, config, kind)
        stored = stored_tensors(path, lambda file: self.file(file).entries, allow_pickle=allow_pickle)
        with family_errors(f"{path}: "):
            names = family.canonical_names(stored)
        self.places = {names[name]: (file, name) for name, file in stored.items()}
        self.config, self.note = with_stored_head(family, config, self.places, self.whole)
        if not is_tied(family, self.config):
            # If the output matrix is untied, transformers reads the bias next to it, not the bias that ties copy.
            self.places |= {first: self.places[copy] for copy, first in family.repeats.items() if copy in self.places}

    def file(self, path: Path) -> Reader:
        """Return the open file at `path`. The first call opens it."""
        if path not in self.files:
            self.files[path] = self._opener(path)
        return self.files[path]

    def whole(self, name: str) -> Tensor:
        """Return a tensor by its canonical name."""
        path, key = self.places[name]
        return self.file(path).whole(key)

    def fit(self, model: ModelConfig) -> None:
        """Check that the folder contains exactly the weights of `model`. Raises CheckpointError."""
        try:
            self.pairs = match_parameters(self.path, self.config, model, self.places.keys())
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {self.note}" if self.note else str(error)) from error

    def parameter(self, name: str) -> Tensor:
        """Return a parameter. Raises CheckpointError for a tensor with an unexpected shape."""
        pair = self.pairs[name]
        with family_errors():
            return pair.join([self.whole(each) for each in pair.names])
