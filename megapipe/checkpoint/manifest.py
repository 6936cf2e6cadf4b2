"""What a checkpoint says about itself: everything but the elements of its tensors.

The manifest is layout-free: tensors are told by global name, shape and extent, progress by steps and samples, random
state by named integers (docs/design.md, idea 3).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megapipe.checkpoint.extents import Extent

WEIGHTS = "weights"
"""Kind of the newest weights. Moments are kinds by their optimizer's names."""


def earlier_weights(age: int) -> str:
    """Kind of the weights `age` versions before the newest, which schedules that keep several versions go on from."""
    return f"weights_before_{age}"


@dataclass(frozen=True)
class Chunk:
    """Some elements of one tensor and where they lie.

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
class RunState:
    """Where a run stands after a step.

    step: optimizer steps done. consumed_samples: samples they took, the cursor into the data. random: named integers
    that all random numbers are functions of. precision: in use, `fp32`, `bf16` or `fp16`. losses: the last (step,
    loss) pairs.
    config: the whole configuration as plain values; `config["model"]` is always there.
    loss_scale: of an fp16 run, numbers by name; empty where the loss is not scaled.
    skipped: ranges (first, behind the last) of samples that the run leaves out because its loss jumped up there.
    """

    step: int
    consumed_samples: int
    random: Mapping[str, int]
    precision: str
    losses: tuple[tuple[int, float], ...]
    config: Mapping[str, Any]
    loss_scale: Mapping[str, float] = field(default_factory=dict)
    skipped: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint folder holds.

    code_version: of the megapipe that wrote it. applied_updates: parameter name -> optimizer updates that were really
    applied. files: name -> bytes.
    """

    code_version: str
    run: RunState
    applied_updates: Mapping[str, int]
    files: Mapping[str, int]
    chunks: tuple[Chunk, ...]

    def chunks_of(self, name: str, kind: str) -> list[Chunk]:
        """The parts of one tensor, in no order; empty when it is not stored."""
        return self._tensors.get(name, {}).get(kind, [])

    def kinds_of(self, name: str) -> set[str]:
        """What is stored of a parameter."""
        return set(self._tensors.get(name, {}))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter name -> global shape."""
        return {chunk.name: chunk.shape for chunk in self.chunks}

    @cached_property
    def _tensors(self) -> dict[str, dict[str, list[Chunk]]]:
        found: dict[str, dict[str, list[Chunk]]] = {}
        for chunk in self.chunks:
            found.setdefault(chunk.name, {}).setdefault(chunk.kind, []).append(chunk)
        return found
