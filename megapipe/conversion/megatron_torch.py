"""Megatron-LM's `torch` layout: one pickled archive for each tensor and pipeline rank.

`latest_checkpointed_iteration.txt` names the newest `iter_0000010/`. In it, `mp_rank_TT[_PPP]/model_optim_rng.pt`
contains the arguments and the state of that rank's layers, as `model` or, in an interleaved schedule, as `model0`,
`model1`..., with layers numbered from 0 in each. With expert parallelism, the folder's name ends with the expert rank,
whose experts are numbered from 0, too. The last stage has copies of the word embeddings: for a tied output matrix, and
for multi-token prediction (MTP).
"""

import itertools
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint.storage import DISK, CheckpointError, DamagedCheckpointError, on_failure, writing
from megapipe.checkpoint.tensor_file import DTYPES
from megapipe.config.model import ModelConfig
from megapipe.conversion.archive import Archive, ArchiveWriter, InertObject, Sandbox, Slot, TensorPlace
from megapipe.conversion.formats import (
    ARCHIVE,
    WEIGHTS,
    Contents,
    Index,
    StoredTensor,
    TargetOptions,
    iteration_folder,
)
from megapipe.conversion.megapipe_format import check_layers
from megapipe.conversion.megatron_arguments import (
    arguments_of,
    check_expressible,
    described_model,
)
from megapipe.conversion.megatron_model import (
    CHECKPOINT_VERSION,
    MTP_BLOCK,
    NEWER_MTP_BLOCK,
    WORD_KEY,
    IterationFolder,
    ParameterLocation,
    check_tensor_size,
    layers_prefix,
    merged,
    merged_shape,
    padded,
    padded_rows,
    parameter_locations,
)
from megapipe.spec.parameters import ParameterSpec

_RANK = re.compile(r"mp_rank_([0-9]{2})(?:_([0-9]{3}))?(?:_([0-9]{3}))?")
_EXPERT = re.compile(r"(.*mlp\.experts\.)(?:local_experts\.([0-9]+)\.(.+)|(.+[^0-9])([0-9]+))")
_TIED_COPY = "output_layer.weight"


class MegatronTorchSource:
    """Reads the weights of a folder. Optimizer and random states are ignored, because they depend on the layout."""

    def __init__(self, path: Path, allow_pickle: bool) -> None:
        self._folder = iteration_folder(path)
        self._sandbox = Sandbox(allow_pickle, self._folder)
        self._archives: dict[tuple[int, int, int], Archive] = {}
        with on_failure(self.close):
            self._open()
            first = self._archives[0, 0, 0]
            version = first.value.get("checkpoint_version", 0)
            if version != CHECKPOINT_VERSION:
                raise CheckpointError(
                    f"{first.path} has checkpoint_version {version}; only "
                    f"{CHECKPOINT_VERSION} is read: save it with a newer Megatron-LM"
                )
            states = (each.value[name] for each in self._archives.values() for name in _states_of(each))
            keys = [key for state in states for key in state if isinstance(key, str)]
            model, arguments, notes = described_model(first.value, first.path, keys)
            check_layers(self._folder, model, len(keys))
            check_tensor_size(model, self._sizes[0])
            self._check_experts(model, arguments)
            self._locations = parameter_locations(model)
            self._shards = self._map_shards(model)
            tensors = tuple(
                StoredTensor(name, WEIGHTS, location.spec.shape, self._shards[name, 0][0][1].dtype)
                for name, location in self._locations.items()
            )
            self.contents = Contents(model, tensors, notes=notes)

    def read(self, tensor: StoredTensor, index: Index = ()) -> Tensor:
        location = self._locations[tensor.name]
        if location.expert is None:
            whole = location.to_megapipe(self._piece(tensor.name, 0))
        else:
            first = index[0] if index else slice(0, location.num_pieces)
            whole = torch.stack([self._piece(tensor.name, piece) for piece in range(first.start, first.stop)])
            index = (slice(0, len(whole)), *index[1:])
        return whole[index].clone() if index else whole.contiguous()

    def verify(self, tensor: StoredTensor) -> list[str]:
        pieces = range(self._locations[tensor.name].num_pieces)
        shards = (shard for piece in pieces for shard in self._shards[tensor.name, piece])
        return [problem for archive, place in shards for problem in archive.verify(place)]

    def close(self) -> None:
        for archive in self._archives.values():
            archive.close()
        self._sandbox.close()

    def _piece(self, name: str, piece: int) -> Tensor:
        """Return a parameter, or the part of one expert, from its shards."""
        shards = self._shards[name, piece]
        spec = self._locations[name].shards(self._is_divided(name, shards))
        if spec.partition_axis is None:
            archive, place = shards[0]
            return archive.tensor(place).reshape(spec.shape)
        shape = list(spec.shape)
        shape[spec.partition_axis] = -1
        parts = [archive.tensor(place).reshape(shape) for archive, place in shards]
        whole = torch.cat(parts, spec.partition_axis) if len(parts) > 1 else parts[0]
        return whole.narrow(spec.partition_axis, 0, spec.shape[spec.partition_axis])

    def _is_divided(self, name: str, shards: list[tuple[Archive, TensorPlace]]) -> bool:
        """Return whether Megatron-LM's tensor ranks have parts of a parameter that is whole on megapipe's ranks."""
        return bool(shards) and shards[0][1].shape[:1] != self._locations[name].spec.shape[:1]

    def _open(self) -> None:
        by_experts = False
        for folder in sorted(self._folder.glob("mp_rank_*")):
            match = _RANK.fullmatch(folder.name)
            if match is None:
                raise CheckpointError(f"{folder} is not the folder of a tensor, pipeline and expert rank")
            archive = Archive(folder / ARCHIVE, self._sandbox)
            if not self._archives and isinstance(archive.value, dict) and match[2] is not None and match[3] is None:
                described = archive.value.get("args")
                sizes = described.state if isinstance(described, InertObject) else {}
                by_experts = (
                    sizes.get("pipeline_model_parallel_size") == 1 != sizes.get("expert_model_parallel_size", 1)
                )
            stage, expert = (None, match[2]) if by_experts else (match[2], match[3])
            self._archives[int(match[1]), int(stage or 0), int(expert or 0)] = archive
        if not self._archives:
            raise CheckpointError(f"{self._folder} contains no mp_rank_*/{ARCHIVE}")
        self._sizes = [max(ranks) + 1 for ranks in zip(*self._archives, strict=True)]
        for rank in itertools.product(*map(range, self._sizes)):
            if rank not in self._archives:
                expert = f" of expert rank {rank[2]}" if self._sizes[2] > 1 else ""
                raise CheckpointError(
                    f"{self._folder} has no file of tensor rank {rank[0]} of pipeline rank "
                    f"{rank[1]}{expert}; copy the whole folder"
                )
            if not isinstance(self._archives[rank].value, dict):
                raise DamagedCheckpointError(f"{self._archives[rank].path} contains no model state", "unreadable")

    def _check_experts(self, model: ModelConfig, arguments: Mapping[str, Any]) -> None:
        """Check that experts are divided evenly over expert ranks, and each expert over all tensor ranks."""
        tensor, _, experts = self._sizes
        size = arguments.get("expert_tensor_parallel_size")
        if model.num_experts is not None and size not in (None, tensor):
            raise CheckpointError(
                f"{self._folder}: expert_tensor_parallel_size is {size}, but there are "
                f"{tensor} tensor ranks; save it in Megatron-LM with --ckpt-format torch_dist"
            )
        if (model.num_experts or 1) % experts:
            raise CheckpointError(f"{self._folder}: {model.num_experts} experts are not divisible by {experts} ranks")

    def _map_shards(self, model: ModelConfig) -> dict[tuple[str, int], list[tuple[Archive, TensorPlace]]]:
        """Map each parameter, or part of one expert (name, number), to its shards, one for each tensor rank."""
        by_key = {
            (location.layer, key): (name, piece)
            for name, location in self._locations.items()
            for piece in range(location.num_pieces)
            for key in location.keys(piece)
        }
        shards_of: dict[tuple[str, int], list[tuple[Archive, TensorPlace]]] = {}
        for tensor_rank in range(self._sizes[0]):
            for archive, layer, key, place in self._states(tensor_rank, model):
                if key == _TIED_COPY and model.tie_embeddings:
                    continue
                name = by_key.get((layer, key))
                if key == WORD_KEY and model.mtp_layers and len(shards_of.get(by_key[None, key], [])) > tensor_rank:
                    continue  # the copy for MTP on the last stage
                if name is None:
                    raise CheckpointError(
                        f"{archive.path} contains {key!r}{'' if layer is None else f' in layer {layer}'}, which is "
                        "not a parameter of the model that its args describe"
                    )
                shards = shards_of.setdefault(name, [])
                if len(shards) != tensor_rank:
                    raise CheckpointError(f"{archive.path} contains {name[0]} twice, or another tensor rank lacks it")
                shards.append((archive, place))
        self._check(shards_of)
        return shards_of

    def _states(self, tensor_rank: int, model: ModelConfig) -> Iterator[tuple[Archive, int | None, str, TensorPlace]]:
        """Yield (archive, global layer, key, tensor) for one tensor rank, in the order of the model's layers.

        Keys of experts contain the global number of the expert. All other parameters are read from the first expert
        rank.
        """
        _, stages, expert_ranks = self._sizes
        experts, first = (model.num_experts or 1) // expert_ranks, 0
        in_layer = re.compile(re.escape(layers_prefix(model)) + r"([0-9]+)\.(.+)")
        for name in _states_of(self._archives[tensor_rank, 0, 0]):
            for stage in range(stages):
                layers = 0
                for expert_rank in range(expert_ranks):
                    archive = self._archives[tensor_rank, stage, expert_rank]
                    state = archive.value.get(name)
                    if not isinstance(state, dict):
                        raise CheckpointError(f"{archive.path} has no {name!r}, but other ranks have it")
                    for key, place in state.items():
                        key = key.replace(NEWER_MTP_BLOCK, MTP_BLOCK)
                        match = in_layer.fullmatch(key)
                        if match is not None:
                            layers = max(layers, int(match[1]) + 1)
                        full_key, is_expert = _global_key(key if match is None else match[2], experts * expert_rank)
                        if not isinstance(place, TensorPlace) or key.endswith("_extra_state"):
                            continue
                        if is_expert or expert_rank == 0:
                            yield archive, None if match is None else first + int(match[1]), full_key, place
                first += layers

    def _check(self, shards_of: Mapping[tuple[str, int], list[tuple[Archive, TensorPlace]]]) -> None:
        """Check that every parameter exists, with the shape that the model requires."""
        tensor_size = self._sizes[0]
        pieces = ((name, piece) for name, location in self._locations.items() for piece in range(location.num_pieces))
        for name, piece in pieces:
            location = self._locations[name]
            shards, key = shards_of.get((name, piece), []), location.keys(piece)[0]
            spec = location.shards(self._is_divided(name, shards) and location.spec.shape[0] % tensor_size == 0)
            if len(shards) != tensor_size:
                raise CheckpointError(f"{self._folder} lacks {name} ({key}) on {tensor_size - len(shards)} ranks")
            shape = merged_shape(spec, spec.local_shape(tensor_size))
            for archive, stored in shards:
                rows_fit = stored.shape[0] >= shape[0] if spec.padded and stored.shape else stored.shape == shape
                if not rows_fit or stored.shape[1:] != shape[1:] or stored.shape != shards[0][1].shape:
                    raise CheckpointError(f"{archive.path}: {key} has shape {stored.shape}; the args require {shape}")
                if stored.dtype not in DTYPES:
                    raise CheckpointError(f"{archive.path}: {key} is {stored.dtype}, which cannot be converted")


def _states_of(archive: Archive) -> list[str]:
    """Return the names of the model chunks of a rank, in order."""
    value = archive.value if isinstance(archive.value, dict) else {}
    names = [key for key in value if re.fullmatch(r"model[0-9]*", str(key))]
    return sorted(names, key=lambda key: int(key.removeprefix("model") or 0))


def _global_key(key: str, first: int) -> tuple[str, bool]:
    """Return a key with the global number of its expert, and whether the key belongs to an expert. first: global
    number of the rank's first expert."""
    match = _EXPERT.fullmatch(key)
    if match is None:
        return key, False
    if match[2] is not None:
        return f"{match[1]}local_experts.{int(match[2]) + first}.{match[3]}", True
    return f"{match[1]}{match[4]}{int(match[5]) + first}", True


class MegatronTorchTarget:
    """Writes a new folder in this layout, for any tensor and pipeline size; see `IterationFolder`."""

    def __init__(self, path: Path, contents: Contents, options: TargetOptions) -> None:
        self._options, self._model = options, contents.model
        check_expressible(contents.model)
        self._locations = parameter_locations(contents.model)
        check_tensor_size(contents.model, options.tensor)
        self._check_rows()
        stages = options.pipeline * options.chunks
        if contents.model.num_layers % stages:
            raise CheckpointError(
                f"{contents.model.num_layers} layers cannot be divided evenly over "
                f"{options.pipeline} stages of {options.chunks} chunks; choose other sizes"
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
        location = self._locations[tensor.name]
        for tensor_rank in range(self._options.tensor):
            for piece, each in enumerate([location.to_megatron(values)] if location.expert is None else values):
                shard = merged(location.piece, self._packed(self._shard(self._spec(location), each, tensor_rank)))
                for stage, chunk, key in self._keys(location, piece):
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

    def _spec(self, location: ParameterLocation) -> ParameterSpec:
        return location.shards(self._options.layer_names in location.divided)

    def _check_rows(self) -> None:
        """Raise CheckpointError if tensor ranks cannot divide the rows of a matrix that only Megatron-LM divides."""
        size = self._options.tensor
        for name, location in self._locations.items():
            if self._options.layer_names in location.divided and location.spec.shape[0] % size:
                whole = "--layer-names transformer_engine, whose ranks all have the whole, or "
                raise CheckpointError(
                    f"{name} has {location.spec.shape[0]} rows, which {size} tensor ranks cannot divide evenly; "
                    f"choose {whole if location.divided == ('local',) else ''}another --tensor"
                )

    def _shard(self, spec: ParameterSpec, values: Tensor, tensor_rank: int) -> Tensor:
        size = self._options.tensor
        if spec.partition_axis is None:
            return values
        if spec.padded:
            values = padded(values, padded_rows(self._model, size))
        return values.chunk(size, spec.partition_axis)[tensor_rank]

    def _packed(self, shard: Tensor) -> Tensor:
        """Return a contiguous copy in a buffer that is reused, because new buffers of many sizes fragment the heap."""
        if self._buffer.numel() < shard.nbytes:
            self._buffer = torch.empty(shard.nbytes, dtype=torch.uint8)
        return self._buffer[: shard.nbytes].view(shard.dtype).view(shard.shape).copy_(shard)

    def _keys(self, location: ParameterLocation, piece: int) -> Iterator[tuple[int, int, str]]:
        """Yield (stage, chunk, key) of every copy of a piece of a parameter on a tensor rank."""
        last = self._options.pipeline - 1, self._options.chunks - 1
        key = location.keys(piece)[self._options.layer_names == "transformer_engine"]
        if location.layer is not None:
            chunk, rest = divmod(location.layer, self._layers * self._options.pipeline)
            stage, local = divmod(rest, self._layers)
            yield stage, chunk, f"{layers_prefix(self._model)}{local}.{key}"
            return
        yield *(last if location.spec.name.startswith("head.") else (0, 0)), key
        if key != WORD_KEY or last == (0, 0):
            return
        if self._model.tie_embeddings:
            yield *last, _TIED_COPY
        if self._model.mtp_layers:
            yield *last, WORD_KEY

    def _writer(self, contents: Contents, tensor_rank: int, stage: int) -> ArchiveWriter:
        chunks: list[dict[str, Slot]] = [OrderedDict() for _ in range(self._options.chunks)]
        for tensor in contents.tensors:
            if tensor.kind != WEIGHTS:
                raise CheckpointError(f"{tensor.kind} of {tensor.name} cannot be stored in Megatron-LM's torch layout")
            location = self._locations[tensor.name]
            shape = list(self._spec(location).local_shape(self._options.tensor))
            if location.spec.padded:
                shape[0] = padded_rows(self._model, self._options.tensor) // self._options.tensor
            piece_shape = merged_shape(location.piece, tuple(shape))
            for piece in range(location.num_pieces):
                for key_stage, chunk, key in self._keys(location, piece):
                    if key_stage == stage:
                        chunks[chunk][key] = Slot(f"{chunk}.{key}", tensor.dtype, piece_shape)
        names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
        value: dict[str, Any] = {
            "args": arguments_of(contents, self._options, DTYPES[contents.tensors[0].dtype]),
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": 0 if contents.run is None else contents.run.step,
            **dict(zip(names, chunks, strict=True)),
        }
        rank = f"mp_rank_{tensor_rank:02d}" + (f"_{stage:03d}" if self._options.pipeline > 1 else "")
        return ArchiveWriter(self._folder.make_folder(f"{self._folder.name}/{rank}") / ARCHIVE, value)
