"""Megatron-LM's `torch` layout as a target: weights for any tensor and pipeline size; see `megatron_torch_source`."""

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.storage import DISK, explained, write_file
from megapipe.checkpoint.tensor_file import DTYPES
from megapipe.conversion.contents import WEIGHTS, Contents, StoredTensor
from megapipe.conversion.foreign.archive import ArchiveWriter, Slot
from megapipe.conversion.foreign.layouts import ARCHIVE, RELEASE, TRACKER
from megapipe.conversion.foreign.megatron_model import (
    ParameterLocation,
    arguments_of,
    check_tensor_size,
    merged,
    merged_shape,
    padded_rows,
    places,
)
from megapipe.conversion.fresh_folder import FreshFolder
from megapipe.conversion.target import TargetOptions

_VERSION = 3.0


class MegatronTorchTarget:
    """A run's folder with one iteration, or, of weights without a run, with a release."""

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
        run = contents.run
        self._iteration = 0 if run is None else run.step
        self._name = RELEASE if run is None else f"iter_{run.step:07d}"
        self._folder = FreshFolder(path)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._writers: dict[tuple[int, int], ArchiveWriter] = {}
        try:
            self._make(self._folder.partial / self._name)
            for tensor_rank in range(options.tensor):
                for stage in range(options.pipeline):
                    self._writers[tensor_rank, stage] = self._writer(contents, tensor_rank, stage)
        except BaseException:
            self.abandon()
            raise

    def add(self, tensor: StoredTensor, values: Tensor) -> None:
        for tensor_rank in range(self._options.tensor):
            place = self._places[tensor.name]
            shard = merged(place.spec, self._packed(self._shard(place, values, tensor_rank)))
            for stage, chunk, key in self._keys(place):
                self._writers[tensor_rank, stage].add(f"{chunk}.{key}", shard)

    def finish(self) -> list[str]:
        for writer in self._writers.values():
            writer.close()
        inner = self._folder.partial / self._name
        try:
            for folder in [*sorted(inner.iterdir()), inner]:
                DISK.flush_folder(folder)
        except OSError as error:
            raise CheckpointError(f"cannot write {inner}: {explained(error, inner.parent)}") from error
        tracked = RELEASE if self._name == RELEASE else str(self._iteration)
        write_file(DISK, self._folder.partial / TRACKER, [memoryview(tracked.encode())])
        self._folder.finish()
        return ["weights only: load them in Megatron-LM with --ckpt-format torch --no-load-optim --no-load-rng"]

    def abandon(self) -> None:
        for writer in self._writers.values():
            writer.abandon()
        self._folder.abandon()

    def _make(self, folder: Path) -> None:
        try:
            DISK.make_folder(folder)
        except OSError as error:
            raise CheckpointError(f"cannot write {folder}: {explained(error, folder.parent)}") from error

    def _shard(self, place: ParameterLocation, values: Tensor, tensor_rank: int) -> Tensor:
        spec, size = place.spec, self._options.tensor
        if spec.partition_axis is None:
            return values
        if spec.padded:
            missing = padded_rows(self._model, size) - values.shape[0]
            values = nn.functional.pad(values, (0, 0, 0, missing))
        return values.chunk(size, spec.partition_axis)[tensor_rank]

    def _packed(self, shard: Tensor) -> Tensor:
        """A contiguous copy in one buffer for all: fresh ones of many sizes leave the heap in holes."""
        if self._buffer.numel() < shard.nbytes:
            self._buffer = torch.empty(shard.nbytes, dtype=torch.uint8)
        return self._buffer[: shard.nbytes].view(shard.dtype).view(shard.shape).copy_(shard)

    def _keys(self, place: ParameterLocation) -> Iterator[tuple[int, int, str]]:
        """Stage, chunk and key of every copy of a parameter on a tensor rank."""
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
            "iteration": self._iteration,
            **dict(zip(names, chunks, strict=True)),
        }
        rank = f"mp_rank_{tensor_rank:02d}" + (f"_{stage:03d}" if self._options.pipeline > 1 else "")
        folder = self._folder.partial / self._name / rank
        self._make(folder)
        return ArchiveWriter(folder / ARCHIVE, value)
