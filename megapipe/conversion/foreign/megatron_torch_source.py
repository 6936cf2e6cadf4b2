"""Megatron-LM's `torch` layout as a source: a pickled archive for each tensor and pipeline rank.

`latest_checkpointed_iteration.txt` names the newest `iter_0000010/`, in which `mp_rank_TT[_PPP]/model_optim_rng.pt`
holds the arguments and, as `model` or as `model0`, `model1`... of an interleaved schedule, the state of that rank's
layers, numbered from 0 in each.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megapipe.config.model import ModelConfig
from megapipe.conversion.contents import WEIGHTS, Contents, StoredTensor
from megapipe.conversion.foreign.archive import DTYPE_NAMES, Archive
from megapipe.conversion.foreign.layouts import ARCHIVE, iteration_folder
from megapipe.conversion.foreign.megatron_model import (
    ParameterLocation,
    check_tensor_size,
    merged_shape,
    model_of_arguments,
    places,
)
from megapipe.conversion.foreign.sandbox import InertObject, Sandbox, TensorPlace
from megapipe.conversion.source import Index

_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_TIED_COPY = "output_layer.weight"


class MegatronTorchSource:
    """Weights of such a folder. Optimizer and random states are left alone: they are bound to its layout."""

    def __init__(self, path: Path, allow_pickle: bool) -> None:
        self._folder = iteration_folder(path)
        self._sandbox = Sandbox(allow_pickle, self._folder)
        self._archives: dict[tuple[int, int], Archive] = {}
        try:
            self._open()
            model = model_of_arguments(self._arguments(), str(self._archives[0, 0].path))
            self._tensor_size = max(tensor for tensor, _ in self._archives) + 1
            check_tensor_size(model, self._tensor_size)
            self._shards = self._found(places(model), model)
            self.contents = Contents(model, tuple(self._stored(places(model))))
        except BaseException:
            self.close()
            raise

    def read(self, tensor: StoredTensor, index: Index = ()) -> Tensor:
        spec = self._specs[tensor.name].spec
        shards = self._shards[tensor.name]
        if spec.partition_axis is None:
            archive, place = shards[0]
            whole = archive.tensor(place).reshape(spec.shape)
        else:
            parts = []
            for archive, place in shards:
                rows = archive.tensor(place)
                shape = list(spec.shape)
                shape[spec.partition_axis] = -1
                parts.append(rows.reshape(shape))
            whole = torch.cat(parts, spec.partition_axis) if len(parts) > 1 else parts[0]
            whole = whole.narrow(spec.partition_axis, 0, spec.shape[spec.partition_axis])
        return whole[index].clone() if index else whole.contiguous()

    def verify(self, tensor: StoredTensor) -> list[str]:
        return [told for archive, place in self._shards[tensor.name] for told in archive.verify(place)]

    def close(self) -> None:
        for archive in self._archives.values():
            archive.close()
        self._sandbox.close()

    def _open(self) -> None:
        for folder in sorted(self._folder.glob("mp_rank_*")):
            match = _RANK.fullmatch(folder.name)
            if match is None:
                raise CheckpointError(f"{folder}: expert-parallel checkpoints cannot be converted")
            rank = int(match[1]), int(match[2] or 0)
            self._archives[rank] = Archive(folder / ARCHIVE, self._sandbox)
        if not self._archives:
            raise CheckpointError(f"{self._folder} contains no mp_rank_*/{ARCHIVE}")
        sizes = [max(place) + 1 for place in zip(*self._archives, strict=True)]
        for rank in ((tensor, pipeline) for tensor in range(sizes[0]) for pipeline in range(sizes[1])):
            if rank not in self._archives:
                raise CheckpointError(
                    f"{self._folder} has no file of tensor rank {rank[0]} of pipeline rank {rank[1]}; copy the whole "
                    "folder"
                )
            if not isinstance(self._archives[rank].value, dict):
                raise DamagedCheckpointError(f"{self._archives[rank].path} contains no model state", "unreadable")

    def _arguments(self) -> Mapping[str, Any]:
        path, value = self._archives[0, 0].path, self._archives[0, 0].value
        version = value.get("checkpoint_version", 0)
        if version != 3.0:
            raise CheckpointError(
                f"{path} has checkpoint_version {version}; only 3.0 can be read: load and save it with a "
                "newer Megatron-LM"
            )
        arguments = value.get("args")
        if not isinstance(arguments, InertObject) or not isinstance(arguments.state, dict):
            raise CheckpointError(f"{path} contains no args, which describe the model")
        return arguments.state

    def _found(
        self, known: Mapping[str, ParameterLocation], model: ModelConfig
    ) -> dict[str, list[tuple[Archive, TensorPlace]]]:
        """Parameter -> its shard on each tensor rank."""
        self._specs = known
        by_key = {(place.layer, key): name for name, place in known.items() for key in (place.key, place.fused_key)}
        found: dict[str, list[tuple[Archive, TensorPlace]]] = {}
        for tensor_rank in range(self._tensor_size):
            for archive, layer, key, place in self._states(tensor_rank):
                if key == _TIED_COPY and model.tie_embeddings:
                    continue
                name = by_key.get((layer, key))
                if name is None:
                    raise CheckpointError(
                        f"{archive.path} contains {key!r}{'' if layer is None else f' in layer {layer}'}, which is "
                        "not a parameter of the model that its args describe"
                    )
                shards = found.setdefault(name, [])
                if len(shards) != tensor_rank:
                    raise CheckpointError(f"{archive.path} contains {name} twice, or another tensor rank lacks it")
                shards.append((archive, place))
        self._check(found, known)
        return found

    def _states(self, tensor_rank: int) -> Iterator[tuple[Archive, int | None, str, TensorPlace]]:
        """Every tensor of a tensor rank with its global layer: chunks in the order in which a sample meets them."""
        ranks = [self._archives[rank] for rank in sorted(self._archives) if rank[0] == tensor_rank]
        keys = [key for key in ranks[0].value if re.fullmatch(r"model\d*", str(key))]
        names = sorted(keys, key=lambda key: int(key.removeprefix("model") or 0))
        first = 0
        for name in names:
            for archive in ranks:
                state, layers = archive.value.get(name), 0
                if not isinstance(state, dict):
                    raise CheckpointError(f"{archive.path} has no {name!r}, but other ranks have it")
                for key, place in state.items():
                    match = _LAYER.fullmatch(key)
                    if match is not None:
                        layers = max(layers, int(match[1]) + 1)
                    if isinstance(place, TensorPlace) and not key.endswith("_extra_state"):
                        layer = None if match is None else first + int(match[1])
                        yield archive, layer, key if match is None else match[2], place
                first += layers

    def _check(
        self, found: Mapping[str, list[tuple[Archive, TensorPlace]]], known: Mapping[str, ParameterLocation]
    ) -> None:
        """See that every parameter is there, of the shape that the model asks for."""
        for name, place in known.items():
            shards = found.get(name, [])
            if len(shards) != self._tensor_size:
                raise CheckpointError(
                    f"{self._folder} lacks {name} ({place.key}) on {self._tensor_size - len(shards)} tensor ranks"
                )
            spec = place.spec
            shape = merged_shape(spec, spec.local_shape(self._tensor_size))
            for archive, stored in shards:
                rows_fit = stored.shape[0] >= shape[0] if spec.padded and stored.shape else stored.shape == shape
                if not rows_fit or stored.shape[1:] != shape[1:] or stored.shape != shards[0][1].shape:
                    raise CheckpointError(
                        f"{archive.path}: {place.key} has shape {stored.shape}; the args require {shape}"
                    )
                if stored.dtype not in DTYPE_NAMES:
                    raise CheckpointError(f"{archive.path}: {place.key} is {stored.dtype}, which cannot be converted")

    def _stored(self, known: Mapping[str, ParameterLocation]) -> Iterator[StoredTensor]:
        for name, place in known.items():
            yield StoredTensor(name, WEIGHTS, place.spec.shape, DTYPE_NAMES[self._shards[name][0][1].dtype])
