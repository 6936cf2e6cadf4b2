"""Megatron-LM's `torch_dist` layout (megatron-core's dist_checkpointing): DCP's files, each parameter of all layers as
one tensor with the layer as its first axis, and beside them `common.pt` with the arguments and `metadata.json`.
"""

import json
from pathlib import Path

from torch import Tensor, nn

from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.storage import DISK, explained, write_file
from megapipe.checkpoint.tensor_file import DTYPES
from megapipe.checkpoint.untrusted import read_json
from megapipe.conversion.contents import WEIGHTS, Contents, StoredTensor
from megapipe.conversion.foreign.archive import Archive, ArchiveWriter
from megapipe.conversion.foreign.dcp_files import DcpFiles, DcpWriter
from megapipe.conversion.foreign.layouts import COMMON, CONFIG, RELEASE, TRACKER, iteration_folder
from megapipe.conversion.foreign.megatron_model import (
    LINEAR_LAYERS,
    ParameterLocation,
    arguments_of,
    merged,
    merged_shape,
    model_of_arguments,
    padded_rows,
    places,
)
from megapipe.conversion.foreign.sandbox import InertObject, Sandbox
from megapipe.conversion.fresh_folder import FreshFolder
from megapipe.conversion.source import Index

_BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_COMMON_BACKEND = {"common_backend": "torch", "common_backend_version": 1}
_MODEL_KEYS = ("embedding.", "decoder.", "output_layer.", "mtp.")
_CHECKPOINT_VERSION = 3.0


class TorchDistSource:
    """Weights of such a folder. Optimizer states are left alone: by default they are bound to their layout."""

    def __init__(self, path: Path, allow_pickle: bool) -> None:
        folder = iteration_folder(path)
        config = read_json(folder / CONFIG)
        told = {name: config.get(name) for name in _BACKEND}
        if told != _BACKEND:
            raise CheckpointError(f"{folder / CONFIG} has {told}; only {_BACKEND} can be read")
        self._sandbox = Sandbox(allow_pickle, folder)
        try:
            self._files = DcpFiles(folder, self._sandbox)
            common = Archive(folder / COMMON, self._sandbox)
            common.close()
            arguments = common.value.get("args") if isinstance(common.value, dict) else None
            if not isinstance(arguments, InertObject) or not isinstance(arguments.state, dict):
                raise CheckpointError(f"{folder / COMMON} contains no args, which describe the model")
            model = model_of_arguments(arguments.state, str(folder / COMMON))
            self._places = places(model)
            self._keys = {name: self._key(place, folder) for name, place in self._places.items()}
            used = {key for key, _ in self._keys.values()}
            unknown = [key for key in self._files.tensors if key.startswith(_MODEL_KEYS) and key not in used]
            if unknown:
                raise CheckpointError(
                    f"{folder} contains {unknown[0]!r}, which is not a parameter of the model that its args describe"
                )
            self.contents = Contents(
                model,
                tuple(
                    StoredTensor(name, WEIGHTS, place.spec.shape, self._files.tensors[self._keys[name][0]].dtype)
                    for name, place in self._places.items()
                ),
            )
        except BaseException:
            self.close()
            raise

    def read(self, tensor: StoredTensor, index: Index = ()) -> Tensor:
        spec = self._places[tensor.name].spec
        key, layer = self._keys[tensor.name]
        rows = tuple(slice(0, extent) for extent in merged_shape(spec, spec.shape))
        stacked = (slice(layer, layer + 1),) if layer is not None else ()
        whole = self._files.read(key, stacked + rows).reshape(spec.shape)
        return whole[index].clone() if index else whole

    def verify(self, tensor: StoredTensor) -> list[str]:
        key, layer = self._keys[tensor.name]
        return self._files.verify(key, layer)

    def close(self) -> None:
        self._sandbox.close()

    def _key(self, place: ParameterLocation, folder: Path) -> tuple[str, int | None]:
        """Where a parameter is: key, and place on the first axis where layers are stacked."""
        shape = merged_shape(place.spec, place.spec.shape)
        key = place.fused_key
        candidates: list[tuple[str, int | None]] = [(key, None)]
        if place.layer is not None:
            candidates = [(f"decoder.layers.{key}", place.layer), (f"decoder.layers.{place.layer}.{key}", None)]
        for name, layer in candidates:
            found = self._files.tensors.get(name)
            if found is None:
                continue
            has = found.shape if layer is None else found.shape[1:]
            fits = len(has) == len(shape) and has[1:] == shape[1:]
            fits = fits and (has[0] >= shape[0] if place.spec.padded else has[0] == shape[0])
            if not fits or (layer is not None and layer >= found.shape[0]):
                raise CheckpointError(f"{folder}: {name!r} has shape {found.shape}, but its args require {shape}")
            return name, layer
        raise CheckpointError(f"{folder} has no {candidates[0][0]!r}, which megapipe needs for {place.spec.name}")


class TorchDistTarget:
    """A run's folder with one iteration, or, of weights without a run, with a release."""

    def __init__(self, path: Path, contents: Contents) -> None:
        self._model, self._places = contents.model, places(contents.model)
        run = contents.run
        self._name = RELEASE if run is None else f"iter_{run.step:07d}"
        self._tracked = RELEASE if run is None else str(run.step)
        arguments = arguments_of(contents, 1, 1, 1, DTYPES[contents.tensors[0].dtype])
        self._folder = FreshFolder(path)
        self._writer: DcpWriter | None = None
        try:
            self._inner = self._folder.partial / self._name
            try:
                DISK.make_folder(self._inner)
            except OSError as error:
                raise CheckpointError(f"cannot write {self._inner}: {explained(error, self._inner.parent)}") from error
            value = {
                "args": arguments,
                "checkpoint_version": _CHECKPOINT_VERSION,
                "iteration": arguments.iteration,
                "num_floating_point_operations_so_far": 0,
            }
            ArchiveWriter(self._inner / COMMON, value).close()
            self._writer = DcpWriter(self._inner)
        except BaseException:
            self.abandon()
            raise

    def add(self, tensor: StoredTensor, values: Tensor) -> None:
        assert self._writer is not None
        place = self._places[tensor.name]
        rows = merged(place.spec, values)
        if place.spec.padded:
            rows = nn.functional.pad(rows, (0, 0, 0, padded_rows(self._model, 1) - rows.shape[0]))
        if place.layer is None:
            self._writer.add(place.key, rows.shape, (0,) * rows.ndim, rows)
            return
        shape, offsets = (self._model.num_layers, *rows.shape), (place.layer, *(0,) * rows.ndim)
        self._writer.add(f"decoder.layers.{place.fused_key}", shape, offsets, rows[None])

    def finish(self) -> list[str]:
        assert self._writer is not None
        # dist_checkpointing asks for what every linear layer keeps beside its weights; without FP8 it is nothing.
        count = self._model.num_layers
        for module in LINEAR_LAYERS:
            for layer in range(count):
                self._writer.add_object(f"decoder.layers.{module}._extra_state/shard_{layer}_{count}", [None])
        if not self._model.tie_embeddings:
            self._writer.add_object("output_layer._extra_state/shard_0_1", [None])
        self._writer.finish()
        text = json.dumps({**_BACKEND, **_COMMON_BACKEND})
        write_file(DISK, self._inner / CONFIG, [memoryview(text.encode())])
        write_file(DISK, self._folder.partial / TRACKER, [memoryview(self._tracked.encode())])
        self._folder.finish()
        return ["weights only: load them in Megatron-LM with --no-load-optim --no-load-rng"]

    def abandon(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._folder.abandon()
