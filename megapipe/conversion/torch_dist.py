"""Megatron-LM's `torch_dist` layout (megatron-core's dist_checkpointing), which uses the files of DCP.

A parameter of the layers is one tensor for all layers, whose first axis is the layer. If only some layers have
experts, each layer has separate tensors. `common.pt`, with the arguments, and `metadata.json` are in the same folder.
"""

import json
from pathlib import Path

from torch import Tensor

from megapipe.checkpoint.storage import CheckpointError, on_failure, read_json
from megapipe.checkpoint.tensor_file import DTYPES
from megapipe.config.model import ModelConfig
from megapipe.conversion.archive import Archive, ArchiveWriter, Sandbox
from megapipe.conversion.dcp import DcpFiles, DcpWriter
from megapipe.conversion.formats import (
    COMMON,
    DIST_CONFIG,
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
    IterationFolder,
    ParameterLocation,
    layers_prefix,
    models_of_layers,
    mtp_prefix,
    padded,
    padded_rows,
    parameter_locations,
    stateful_modules,
)

_BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_COMMON_BACKEND = {"common_backend": "torch", "common_backend_version": 1}
_MODEL_KEYS = ("embedding.", "decoder.", "encoder.", "output_layer.", "lm_head.", "pooler.", "binary_head.", "mtp.")


class TorchDistSource:
    """Reads the weights of a folder. Optimizer states are ignored, because by default they depend on the layout."""

    def __init__(self, path: Path, allow_pickle: bool) -> None:
        folder = iteration_folder(path)
        config = read_json(folder / DIST_CONFIG)
        backend = {name: config.get(name) for name in _BACKEND}
        if backend != _BACKEND:
            raise CheckpointError(f"{folder / DIST_CONFIG} has {backend}; only {_BACKEND} can be read")
        self._sandbox = Sandbox(allow_pickle, folder)
        with on_failure(self.close):
            self._files = DcpFiles(folder, self._sandbox)
            common = Archive(folder / COMMON, self._sandbox)
            common.close()
            model, _, notes = described_model(common.value, common.path, self._files.tensors)
            stacked = (each.shape[0] for each in self._files.tensors.values() if each.shape)
            check_layers(folder, model, sum(stacked))
            self._locations, self._prefix = parameter_locations(model), layers_prefix(model)
            self._keys = {name: self._key(location, folder) for name, location in self._locations.items()}
            used = {key for key, _ in self._keys.values()}
            unknown = [key for key in self._files.tensors if key.startswith(_MODEL_KEYS) and key not in used]
            if unknown:
                raise CheckpointError(
                    f"{folder} contains {unknown[0]!r}, which is not a parameter of the model that its args describe"
                )
            self.contents = Contents(
                model,
                tuple(
                    StoredTensor(name, WEIGHTS, location.spec.shape, self._files.tensors[self._keys[name][0]].dtype)
                    for name, location in self._locations.items()
                ),
                notes=notes,
            )

    def read(self, tensor: StoredTensor, index: Index = ()) -> Tensor:
        location = self._locations[tensor.name]
        key, layer = self._keys[tensor.name]
        rows = tuple(slice(0, extent) for extent in location.dist_shape)
        stacked = (slice(layer, layer + 1),) if layer is not None else ()
        whole = location.to_megapipe(self._files.read(key, stacked + rows).reshape(location.spec.shape))
        return whole[index].clone() if index else whole

    def verify(self, tensor: StoredTensor) -> list[str]:
        key, layer = self._keys[tensor.name]
        return self._files.verify(key, layer)

    def close(self) -> None:
        self._sandbox.close()

    def _key(self, location: ParameterLocation, folder: Path) -> tuple[str, int | None]:
        """Return the key of a parameter, and its index on the first axis if layers are stacked."""
        shape, prefix = location.dist_shape, self._prefix
        candidates: list[tuple[str, int | None]] = [(key, None) for key in location.dist_keys]
        if location.layer is not None:
            separate = [(f"{prefix}{location.layer}.{key}", None) for key in location.dist_keys]
            candidates = [*((f"{prefix}{key}", location.layer) for key in location.dist_keys), *separate]
        for name, layer in candidates:
            stored = self._files.tensors.get(name)
            if stored is None:
                continue
            stored_shape = stored.shape if layer is None else stored.shape[1:]
            fits = len(stored_shape) == len(shape) and stored_shape[1:] == shape[1:]
            fits = fits and (stored_shape[0] >= shape[0] if location.spec.padded else stored_shape[0] == shape[0])
            if not fits or (layer is not None and layer >= stored.shape[0]):
                raise CheckpointError(f"{folder}: {name!r} has shape {stored.shape}, but its args require {shape}")
            return name, layer
        raise CheckpointError(f"{folder} has no {candidates[0][0]!r}, which megapipe needs for {location.spec.name}")


class TorchDistTarget:
    """Writes a new folder in this layout; see `IterationFolder`."""

    def __init__(self, path: Path, contents: Contents, options: TargetOptions) -> None:
        check_expressible(contents.model)
        self._model, self._locations = contents.model, parameter_locations(contents.model)
        self._layers = models_of_layers(contents.model)
        self._mixed = len({each.num_experts for each in self._layers}) > 1
        self._prefix, self._names = layers_prefix(contents.model), options.layer_names
        whole = TargetOptions(layer_names=options.layer_names)
        arguments = arguments_of(contents, whole, DTYPES[contents.tensors[0].dtype])
        self._folder = IterationFolder(path, contents.run)
        with on_failure(self._folder.abandon):
            value = {
                "args": arguments,
                "checkpoint_version": CHECKPOINT_VERSION,
                "iteration": arguments.iteration,
                "num_floating_point_operations_so_far": 0,
            }
            ArchiveWriter(self._folder.inner / COMMON, value).close()
            self._writer = DcpWriter(self._folder.inner)

    def add(self, tensor: StoredTensor, values: Tensor) -> None:
        location = self._locations[tensor.name]
        rows = location.to_megatron(values).reshape(location.dist_shape)
        if location.spec.padded:
            rows = padded(rows, padded_rows(self._model, 1))
        key = location.dist_keys[self._names == "transformer_engine"]
        if location.layer is None or self._mixed:  # layers that differ are not stacked
            first = "" if location.layer is None else f"{self._prefix}{location.layer}."
            self._writer.add(first + key, rows.shape, (0,) * rows.ndim, rows)
            return
        shape, offsets = (self._model.num_layers, *rows.shape), (location.layer, *(0,) * rows.ndim)
        self._writer.add(f"{self._prefix}{key}", shape, offsets, rows[None])

    def finish(self) -> list[str]:
        # dist_checkpointing requires the extra state of every linear layer; without FP8 it is None.
        count = self._model.num_layers
        for layer, block in enumerate(self._layers):
            if self._mixed:
                self._add_extra_states(f"{self._prefix}{layer}.", block)
            else:
                self._add_extra_states(self._prefix, block, (layer,), (count,))
        for depth in range(self._model.mtp_layers):
            prefix = mtp_prefix(depth)
            self._writer.add_object(f"{prefix}eh_proj._extra_state/shard_0_1", [None])
            self._add_extra_states(prefix + MTP_BLOCK, self._layers[-1])
        if not self._model.tie_embeddings or self._model.kind == "bert":
            self._writer.add_object("output_layer._extra_state/shard_0_1", [None])
        self._writer.finish()
        self._folder.write(f"{self._folder.name}/{DIST_CONFIG}", json.dumps({**_BACKEND, **_COMMON_BACKEND}))
        self._folder.finish()
        return ["weights only: load them in Megatron-LM with --no-load-optim --no-load-rng"]

    def abandon(self) -> None:
        self._writer.abandon()
        self._folder.abandon()

    def _add_extra_states(
        self, prefix: str, model: ModelConfig, at: tuple[int, ...] = (), of: tuple[int, ...] = ()
    ) -> None:
        """Write the extra states of a layer. model: configuration of the layer's kind. at, of: index of the layer and
        number of layers if layers are stacked, else empty."""
        for module in stateful_modules(model, self._names):
            experts = model.num_experts if ".experts." in module else None
            shards = [(at, of)] if experts is None else [((*at, each), (*of, experts)) for each in range(experts)]
            for offsets, sizes in shards:
                first, all_of = (".".join(map(str, each)) for each in (offsets or (0,), sizes or (1,)))
                self._writer.add_object(f"{prefix}{module}._extra_state/shard_{first}_{all_of}", [None])
