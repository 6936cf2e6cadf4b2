"""Contents of a checkpoint's manifest: everything but the elements of its tensors.

The manifest does not depend on the layout: tensors are identified by global name, shape and extent, progress by steps
and samples, random state by named integers (docs/design.md, idea 3).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megapipe.checkpoint.extents import Extent
from megapipe.data.identity import DataIdentity

WEIGHTS = "weights"
"""Kind of the newest weights. Moments are kinds by their optimizer's names."""


def earlier_weights(age: int) -> str:
    """Kind of the weights `age` versions before the newest, which schedules with several versions resume from."""
    return f"weights_before_{age}"


@dataclass(frozen=True)
class Chunk:
    """Some elements of one tensor and the place of their bytes.

    name, kind: which tensor: a parameter's global name; its weights or one of its moments. shape: global.
    file, key: where. dtype: as safetensors names it. checksums: of each PIECE_BYTES of its bytes, hexadecimal.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    extent: Extent
    file: str
    key: str
    dtype: str
    checksums: tuple[str, ...]


@dataclass(frozen=True)
class DataChange:
    """A resume on other samples that checkpoint.accept_other_data accepted.

    step: the last step on the samples before the change. differences: one sentence for each field or shard.
    """

    step: int
    differences: tuple[str, ...]


@dataclass(frozen=True)
class RunState:
    """State of a run after a step, without tensors.

    step: optimizer steps done. consumed_samples: samples they took, the cursor into the data. random: named integers,
    of which all random numbers are functions. precision: in use, `fp32`, `bf16` or `fp16`. losses: the last (step,
    loss) pairs.
    config: the whole configuration as plain values; `config["model"]` is always there.
    loss_scale: of an fp16 run, numbers by name; empty where the loss is not scaled.
    skipped: half-open ranges [first, end) of samples that the run leaves out because its loss jumped up there.
    data: identity of the data that the run was trained on last; None in checkpoints of versions that did not store it.
    data_changes: accepted changes of the samples, oldest first.
    """

    step: int
    consumed_samples: int
    random: Mapping[str, int]
    precision: str
    losses: tuple[tuple[int, float], ...]
    config: Mapping[str, Any]
    loss_scale: Mapping[str, float] = field(default_factory=dict)
    skipped: tuple[tuple[int, int], ...] = ()
    data: DataIdentity | None = None
    data_changes: tuple[DataChange, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint folder.

    code_version: of the megapipe that wrote it. applied_updates: parameter name -> optimizer updates that were
    applied, skipped steps left out. files: name -> bytes.
    """

    code_version: str
    run: RunState
    applied_updates: Mapping[str, int]
    files: Mapping[str, int]
    chunks: tuple[Chunk, ...]

    def chunks_of(self, name: str, kind: str) -> list[Chunk]:
        """Return the parts of one tensor, in any order; an empty list when it is not stored."""
        return self._tensors.get(name, {}).get(kind, [])

    def kinds_of(self, name: str) -> set[str]:
        """Return the kinds of tensors that are stored for a parameter."""
        return set(self._tensors.get(name, {}))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter name -> global shape."""
        return {chunk.name: chunk.shape for chunk in self.chunks}

    @cached_property
    def _tensors(self) -> dict[str, dict[str, list[Chunk]]]:
        tensors: dict[str, dict[str, list[Chunk]]] = {}
        for chunk in self.chunks:
            tensors.setdefault(chunk.name, {}).setdefault(chunk.kind, []).append(chunk)
        return tensors
