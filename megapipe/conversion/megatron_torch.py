"""Megatron-LM's `torch` layout: one pickled archive for each tensor and pipeline rank.

`latest_checkpointed_iteration.txt` names the newest `iter_0000010/`. In it, `mp_rank_TT[_PPP]/model_optim_rng.pt`
contains the arguments and the state of that rank's layers, as `model` or, in an interleaved schedule, as `model0`,
`model1`..., with layers numbered from 0 in each.
"""

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megapipe.checkpoint.storage import DISK, on_failure, writing
from megapipe.checkpoint.tensor_file import DTYPES
from megapipe.config.model import ModelConfig
from megapipe.conversion.archive import DTYPE_NAMES, Archive, ArchiveWriter, Slot
from megapipe.conversion.formats import (
    ARCHIVE,
    WEIGHTS,
    Contents,
    Index,
    StoredTensor,
    TargetOptions,
    iteration_folder,
)
from megapipe.conversion.megatron_model import (
    IterationFolder,
    ParameterLocation,
    arguments_of,
    check_tensor_size,
    merged,
    merged_shape,
    model_of_arguments,
    padded_rows,
    places,
)
from megapipe.conversion.sandbox import Sandbox, TensorPlace

_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_TIED_COPY = "output_layer.weight"


class MegatronTorchSource:
    """Reads the weights of a folder. Optimizer and random states are ignored, because they depend on the layout."""

    def __init__(self, path: Path, allow_pickle: bool) -> None:
        self._folder = iteration_folder(path)
        self._sandbox = Sandbox(allow_pickle, self._folder)
        self._archives: dict[tuple[int, int], Archive] = {}
        with on_failure(self.close):
            self._open()
            self._check_version()
            model = model_of_arguments(self._archives[0, 0].value, self._archives[0, 0].path)
            self._tensor_size = max(tensor for tensor, _ in self._archives) + 1
            check_tensor_size(model, self._tensor_size)
            self._shards = self._found(places(model), model)
            self.contents = Contents(model, tuple(self._stored(places(model))))

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
        return [problem for archive, place in self._shards[tensor.name] for problem in archive.verify(place)]

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

    def _check_version(self) -> None:
        version = self._archives[0, 0].value.get("checkpoint_version", 0)
        if version != 3.0:
            raise CheckpointError(
                f"{self._archives[0, 0].path} has checkpoint_version {version}; only 3.0 can be read: load and save "
                "it with a newer Megatron-LM"
            )

    def _found(
        self, known: Mapping[str, ParameterLocation], model: ModelConfig
    ) -> dict[str, list[tuple[Archive, TensorPlace]]]:
        """Map each parameter to its shards, one for each tensor rank."""
        self._specs = known
        by_key = {(place.layer, key): name for name, place in known.items() for key in (place.key, place.fused_key)}
        shards_of: dict[str, list[tuple[Archive, TensorPlace]]] = {}
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
                shards = shards_of.setdefault(name, [])
                if len(shards) != tensor_rank:
                    raise CheckpointError(f"{archive.path} contains {name} twice, or another tensor rank lacks it")
                shards.append((archive, place))
        self._check(shards_of, known)
        return shards_of

    def _states(self, tensor_rank: int) -> Iterator[tuple[Archive, int | None, str, TensorPlace]]:
        """Yield (archive, global layer, key, tensor) for one tensor rank, in the order of the model's layers."""
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
        self, shards_of: Mapping[str, list[tuple[Archive, TensorPlace]]], known: Mapping[str, ParameterLocation]
    ) -> None:
        """Check that every parameter exists, with the shape that the model requires."""
        for name, place in known.items():
            shards = shards_of.get(name, [])
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


_VERSION = 3.0


class MegatronTorchTarget:
    """Writes a new folder in this layout, for any tensor and pipeline size; see `IterationFolder`."""

    def __init__(self, path: Path, contents: Contents, options: TargetOptions) -> None:
        self._options, self._model = options, contents.model
        self._places = places(contents.model)
        check_tensor_size(contents.model, options.tensor)
        stages = options.pipeline * options.chunks
        if contents.model.num_layers % stages:
            raise CheckpointError(
                f"{contents.model.num_layers} layers cannot be divided evenly over {options.pipeline} stages of "
                f"{options.chunks} chunks; choose sizes whose product divides the number of layers"
            )
        self._layers = contents.model.num_layers // stages
        self._folder = IterationFolder(path, contents.run)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._writers: dict[tuple[int, int], ArchiveWriter] = {}
        with on_failure(self.abandon):
            for tensor_rank in range(options.tensor):
                for stage in range(options.pipeline):
                    self._writers[tensor_rank, stage] = self._writer(contents, tensor_rank, stage)

    def add(self, tensor: StoredTensor, values: Tensor) -> None:
        for tensor_rank in range(self._options.tensor):
            place = self._places[tensor.name]
            shard = merged(place.spec, self._packed(self._shard(place, values, tensor_rank)))
            for stage, chunk, key in self._keys(place):
                self._writers[tensor_rank, stage].add(f"{chunk}.{key}", shard)

    def finish(self) -> list[str]:
        for writer in self._writers.values():
            writer.close()
        inner = self._folder.inner
        with writing(inner):
            for folder in [*sorted(inner.iterdir()), inner]:
                DISK.flush_folder(folder)
        self._folder.finish()
        return ["weights only: load them in Megatron-LM with --ckpt-format torch --no-load-optim --no-load-rng"]

    def abandon(self) -> None:
        for writer in self._writers.values():
            writer.abandon()
        self._folder.abandon()

    def _shard(self, place: ParameterLocation, values: Tensor, tensor_rank: int) -> Tensor:
        spec, size = place.spec, self._options.tensor
        if spec.partition_axis is None:
            return values
        if spec.padded:
            missing = padded_rows(self._model, size) - values.shape[0]
            values = nn.functional.pad(values, (0, 0, 0, missing))
        return values.chunk(size, spec.partition_axis)[tensor_rank]

    def _packed(self, shard: Tensor) -> Tensor:
        """Return a contiguous copy in a buffer that is reused, because new buffers of many sizes fragment the heap."""
        if self._buffer.numel() < shard.nbytes:
            self._buffer = torch.empty(shard.nbytes, dtype=torch.uint8)
        return self._buffer[: shard.nbytes].view(shard.dtype).view(shard.shape).copy_(shard)

    def _keys(self, place: ParameterLocation) -> Iterator[tuple[int, int, str]]:
        """Yield (stage, chunk, key) of every copy of a parameter on a tensor rank."""
        last = self._options.pipeline - 1, self._options.chunks - 1
        if place.layer is not None:
            chunk, rest = divmod(place.layer, self._layers * self._options.pipeline)
            stage, local = divmod(rest, self._layers)
            key = place.key if self._options.layer_names == "local" else place.fused_key
            yield stage, chunk, f"decoder.layers.{local}.{key}"
            return
        is_head = place.spec.name.startswith("head.")
        yield *(last if is_head else (0, 0)), place.key
        tied = place.spec.name == "embedding.word.weight" and self._model.tie_embeddings
        if tied and last != (0, 0):
            yield *last, "output_layer.weight"

    def _writer(self, contents: Contents, tensor_rank: int, stage: int) -> ArchiveWriter:
        chunks: list[dict[str, Slot]] = [OrderedDict() for _ in range(self._options.chunks)]
        for tensor in contents.tensors:
            if tensor.kind != WEIGHTS:
                raise CheckpointError(f"{tensor.kind} of {tensor.name} cannot be stored in Megatron-LM's torch layout")
            place = self._places[tensor.name]
            shape = list(place.spec.local_shape(self._options.tensor))
            if place.spec.padded:
                shape[0] = padded_rows(self._model, self._options.tensor) // self._options.tensor
            for at, chunk, key in self._keys(place):
                if at == stage:
                    chunks[chunk][key] = Slot(f"{chunk}.{key}", tensor.dtype, merged_shape(place.spec, tuple(shape)))
        sizes = self._options.tensor, self._options.pipeline, self._options.chunks
        names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
        value: dict[str, Any] = {
            "args": arguments_of(contents, *sizes, DTYPES[contents.tensors[0].dtype]),
            "checkpoint_version": _VERSION,
            "iteration": 0 if contents.run is None else contents.run.step,
            **dict(zip(names, chunks, strict=True)),
        }
        rank = f"mp_rank_{tensor_rank:02d}" + (f"_{stage:03d}" if self._options.pipeline > 1 else "")
        return ArchiveWriter(self._folder.make_folder(f"{self._folder.name}/{rank}") / ARCHIVE, value)
