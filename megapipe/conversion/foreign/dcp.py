"""A plain state dict in torch.distributed.checkpoint's files: `model.NAME` for weights, `optimizer.state.NAME.KIND`
for moments, as torch's get_state_dict names them, with NAME a parameter of megapipe; and `megapipe.json` beside them,
which tells the model and where its run stands.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from megapipe.checkpoint.errors import CheckpointError
from megapipe.checkpoint.manifest import RunState
from megapipe.checkpoint.storage import DISK, write_file
from megapipe.checkpoint.untrusted import read_json
from megapipe.config.errors import nearest
from megapipe.conversion.contents import WEIGHTS, Contents, StoredTensor
from megapipe.conversion.foreign.dcp_files import DcpFiles, DcpWriter
from megapipe.conversion.foreign.sandbox import Sandbox
from megapipe.conversion.fresh_folder import FreshFolder
from megapipe.conversion.model_fields import model_of, parameters_of
from megapipe.conversion.source import Index

CONFIG = "megapipe.json"
_MODEL, _OPTIMIZER = "model.", "optimizer.state."


class DcpSource:
    """Such a folder, written by any number of ranks. Without `megapipe.json` there is no telling the model."""

    def __init__(self, path: Path, allow_pickle: bool) -> None:
        if not (path / CONFIG).is_file():
            raise CheckpointError(
                f"{path} has no {CONFIG}, which describes the model of its tensors; write one with the `model` "
                'section of the configuration: {"model": {"num_layers": 12, ...}}'
            )
        told = read_json(path / CONFIG)
        if not isinstance(told.get("model"), dict):
            raise CheckpointError(f"{path / CONFIG} has no `model` section")
        model = model_of(told["model"])
        run, applied = _run_of(told, path / CONFIG)
        self._sandbox = Sandbox(allow_pickle, path)
        try:
            self._files = DcpFiles(path, self._sandbox)
            specs = parameters_of(model)
            self._keys: dict[tuple[str, str], str] = {}
            for key, tensor in self._files.tensors.items():
                name, kind = _parsed(key)
                if name not in specs:
                    raise CheckpointError(
                        f"{path} contains {key!r}, which is not a parameter of the model in {CONFIG}"
                        f"{nearest(name, specs)}; tensors need megapipe's names: rename or remove this one"
                    )
                if tensor.shape != specs[name].shape:
                    raise CheckpointError(f"{path}: {key!r} has shape {tensor.shape} instead of {specs[name].shape}")
                if (name, kind) in self._keys:
                    raise CheckpointError(
                        f"{path} contains {kind} of {name} twice: {key!r}, {self._keys[name, kind]!r}"
                    )
                self._keys[name, kind] = key
            missing = [name for name in specs if (name, WEIGHTS) not in self._keys]
            if missing:
                raise CheckpointError(f"{path} lacks {_MODEL}{missing[0]}")
        except BaseException:
            self.close()
            raise
        kinds = sorted({kind for _, kind in self._keys}, key=lambda kind: (kind != WEIGHTS, kind))
        self.contents = Contents(
            model,
            tuple(
                StoredTensor(name, kind, specs[name].shape, self._files.tensors[self._keys[name, kind]].dtype)
                for kind in kinds
                for name in specs
                if (name, kind) in self._keys
            ),
            run,
            applied,
        )

    def read(self, tensor: StoredTensor, index: Index = ()) -> Tensor:
        return self._files.read(self._keys[tensor.name, tensor.kind], index)

    def verify(self, tensor: StoredTensor) -> list[str]:
        return self._files.verify(self._keys[tensor.name, tensor.kind])

    def close(self) -> None:
        self._sandbox.close()


def _parsed(key: str) -> tuple[str, str]:
    """Parameter and kind that a key tells of."""
    if key.startswith(_OPTIMIZER):
        name, _, kind = key.removeprefix(_OPTIMIZER).rpartition(".")
        return name, kind
    return key.removeprefix(_MODEL), WEIGHTS


def _run_of(told: Mapping[str, Any], path: Path) -> tuple[RunState | None, dict[str, int]]:
    if told.get("run") is None:
        return None, {}
    try:
        stored = told["run"]
        run = RunState(
            step=int(stored["step"]),
            consumed_samples=int(stored["consumed_samples"]),
            random={str(name): int(value) for name, value in stored["random"].items()},
            precision=str(stored["precision"]),
            losses=tuple((int(step), math.nan if loss is None else float(loss)) for step, loss in stored["losses"]),
            config=dict(stored["config"]),
            loss_scale={str(name): float(value) for name, value in stored["loss_scale"].items()},
        )
        return run, {str(name): int(count) for name, count in told["applied_updates"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} has an unreadable training position in `run`: {error!r}; remove `run`"
        ) from error


class DcpTarget:
    """A folder that torch.distributed.checkpoint loads, on any number of ranks."""

    def __init__(self, path: Path, contents: Contents) -> None:
        self._contents = contents
        self._folder = FreshFolder(path)
        self._writer: DcpWriter | None = None
        try:
            self._writer = DcpWriter(self._folder.partial)
        except BaseException:
            self.abandon()
            raise

    def add(self, tensor: StoredTensor, values: Tensor) -> None:
        assert self._writer is not None
        nesting: tuple[str, ...] = ("model", tensor.name)
        if tensor.kind != WEIGHTS:
            nesting = ("optimizer", "state", tensor.name, tensor.kind)
        key = ".".join(nesting)
        self._writer.nesting[key] = nesting
        self._writer.add(key, values.shape, (0,) * values.ndim, values)

    def finish(self) -> list[str]:
        assert self._writer is not None
        self._writer.finish()
        document: dict[str, Any] = {"model": asdict(self._contents.model)}
        run = self._contents.run
        if run is not None:
            losses = [[step, loss if math.isfinite(loss) else None] for step, loss in run.losses]
            document["run"] = {**asdict(run), "losses": losses}
            document["applied_updates"] = dict(self._contents.applied_updates)
        text = json.dumps(document, indent=1, allow_nan=False)
        write_file(DISK, self._folder.partial / CONFIG, [memoryview(text.encode())])
        self._folder.finish()
        return [f"a state dict of model.NAME and optimizer.state.NAME.KIND; the model is described in {CONFIG}"]

    def abandon(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._folder.abandon()
