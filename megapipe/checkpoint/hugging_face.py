"""Initial weights from a Hugging Face folder: config.json and safetensors files, one or several with an index."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from megapipe.checkpoint.agreement import agreed
from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.hugging_face_files import (
    CONFIG,
    INDEX,
    SINGLE,
    fitting,
    is_hugging_face,
    joined,
    kind_of,
    stored_tensors,
)
from megapipe.checkpoint.hugging_face_heads import with_stored_head
from megapipe.checkpoint.shards import Shard, shards_of
from megapipe.checkpoint.tensor_file import TensorFile
from megapipe.checkpoint.untrusted import check_safetensors, inside, read_json
from megapipe.config.model import ModelConfig
from megapipe.models.gpt_hugging_face import Correspondence
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState

__all__ = ["CONFIG", "INDEX", "SINGLE", "is_hugging_face", "load_hugging_face"]


def load_hugging_face(folder: Path, states: Sequence[UnitState], model: ModelConfig, mesh: Mesh) -> None:
    """Take the weights of a folder as the weights before a first step; docs/conversion.md lists the families.

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


class _Weights:
    """The tensors of a folder by canonical name."""

    def __init__(self, places: Mapping[str, tuple[Path, str]]) -> None:
        self._places = places
        self._pairs: Mapping[str, Correspondence] = {}
        self._open: dict[Path, TensorFile] = {}

    @classmethod
    def fitting(cls, folder: Path, model: ModelConfig) -> "_Weights":
        """Open the folder and check that it holds the weights of `model` and no others."""
        config = read_json(inside(folder, CONFIG))
        stored = stored_tensors(folder, lambda path: _opened(path).keys)
        names = kind_of(model).names(stored)
        weights = cls({names[name]: (path, name) for name, path in stored.items()})
        config, note = with_stored_head(config, weights._places, weights._tensor)
        try:
            weights._pairs = fitting(folder, config, model, weights._places.keys())
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {note}" if note else str(error)) from error
        return weights

    def values(self, shard: Shard) -> Tensor:
        """The elements of a shard, in one dimension."""
        pair = self._pairs[shard.name]
        whole = joined([self._tensor(name) for name in pair.theirs], pair)
        box = shard.segment.box
        index = tuple(slice(start, stop) for start, stop in zip(box.starts, box.stops, strict=True))
        held = shard.extent
        return whole[index].reshape(-1)[held.start : held.stop]

    def _tensor(self, name: str) -> Tensor:
        """A whole tensor, mapped and not yet read."""
        path, key = self._places[name]
        if path not in self._open:
            self._open[path] = _opened(path)
        return self._open[path].tensor(key)


def _opened(path: Path) -> TensorFile:
    check_safetensors(path)
    return TensorFile(path)
