"""The formats of checkpoints that can be read and written: contents, sources, targets, and the table of formats.

Modules that import torch are imported only when a checkpoint is opened, so that --help does not wait for them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from megapipe.config import InputError
from megapipe.config.files import read_bytes
from megapipe.config.model import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from megapipe.checkpoint.manifest import RunState


WEIGHTS = "weights"
"""The kind of the newest weights, as in a manifest."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint.

    name: the parameter's global name, e.g. `blocks.3.attention.qkv.weight`. kind: `weights`, `weights_before_1`, or a
    moment by its optimizer's name. shape: global and canonical, without padding. dtype: its name in safetensors
    (`F32`, `BF16`, ...).
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        from megapipe.checkpoint.tensor_file import DTYPES  # imports torch, for which --help should not wait

        return self.num_elements * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Contents:
    """Contents of a checkpoint.

    model: a BertModelConfig for a BERT. tensors: all tensors, in the model's order; a tied weight appears once. run:
    state of the run; None if the format contains only weights. applied_updates: number of optimizer updates of each
    parameter; empty without moments. tokenizer: name of the model's tokenizer for
    `megapipe.data.tokenizers.open_tokenizer`; None if it is not known. notes: lines for the user about how the
    checkpoint was read.
    """

    model: ModelConfig
    tensors: tuple[StoredTensor, ...]
    run: "RunState | None" = None
    applied_updates: Mapping[str, int] = field(default_factory=dict)
    tokenizer: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def kinds(self) -> list[str]:
        """Kinds of tensors that are stored, weights first."""
        kinds = dict.fromkeys(tensor.kind for tensor in self.tensors)
        return sorted(kinds, key=lambda kind: (kind != WEIGHTS, kind))


Index = tuple[slice, ...]
"""Part of a tensor: a slice with start and stop for each axis; an empty tuple means the whole tensor."""


class Source(Protocol):
    """An open checkpoint.

    contents: its contents, which are known without reading elements.
    """

    contents: Contents

    def read(self, tensor: StoredTensor, index: Index = ()) -> "Tensor":
        """Return the elements of one of `contents.tensors`, in its dtype, contiguous, in newly allocated memory.

        This reads and holds at most a few times the requested bytes, or one tensor as the format stores it. Raises
        CheckpointError, with file and tensor, if bytes cannot be read or have changed since they were written.
        """

    def verify(self, tensor: StoredTensor) -> list[str]:
        """Read one of `contents.tensors` completely; return one message for each problem, an empty list if there are
        none."""

    def close(self) -> None:
        """Close its files."""


SHARD_BYTES = 5 * 10**9
"""Default size of the largest file of a Hugging Face folder."""


LayerNames = Literal["local", "transformer_engine"]
"""Implementation of Megatron-LM's layers, which determines the names of norms and experts."""


@dataclass(frozen=True)
class TargetOptions:
    """Options for formats that have several layouts.

    max_shard_bytes: largest file of weights (one tensor may exceed it). tensor, pipeline, chunks: tensor-parallel
    ranks and pipeline stages of a Megatron-LM `torch` checkpoint, and model chunks per stage. layer_names: the
    implementation of layers from which norms and experts get their names.
    """

    max_shard_bytes: int = SHARD_BYTES
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    layer_names: LayerNames = "local"


class Target(Protocol):
    """A checkpoint that is being written, opened with its Contents.

    `finish` makes it durable and gives it its name. Until then, and after `abandon`, nothing exists at its path.
    """

    def add(self, tensor: StoredTensor, values: "Tensor") -> None:
        """Write the next tensor, in the order of the Contents. values: its elements, in its shape and dtype.

        Raises CheckpointError if it cannot be written.
        """

    def finish(self) -> list[str]:
        """Complete the folder. Return lines of information for the user."""

    def abandon(self) -> None:
        """Remove everything that was written."""


TRACKER = "latest_checkpointed_iteration.txt"
ARCHIVE = "model_optim_rng.pt"
RELEASE = "release"
"""Name of weights without a training state, in place of the name of an iteration."""
COMMON, DIST_CONFIG = "common.pt", "metadata.json"
"""Files next to the tensors of Megatron-LM's `torch_dist` layout."""
METADATA = ".metadata"
"""The file that torch.distributed.checkpoint writes last."""


def iteration_folder(path: Path) -> Path:
    """Return the folder of an iteration: the iteration that the tracker in `path` names, or else `path` itself."""
    try:
        iteration = read_bytes(path / TRACKER, ValueError, 100).decode("ascii").strip()
    except (OSError, ValueError):
        return path
    if iteration == RELEASE:
        return path / RELEASE
    return path / f"iter_{int(iteration):07d}" if iteration.isdecimal() and len(iteration) < 20 else path


class UnknownFormatError(InputError, ValueError):
    """A folder whose format cannot be identified. The message lists all formats."""


@dataclass(frozen=True)
class Format:
    """One format.

    title: description for users. recognizes: whether a folder has this format, by its file names only. keeps_run:
    whether it can contain moments, step, random state and data position; otherwise it contains only weights. module,
    source, target: names of the module and of the classes of its Source and Target; the module imports torch, so
    --help does not load it. options: the flags of `convert` and `average` that only some formats have, as attributes.
    """

    title: str
    recognizes: Callable[[Path], bool]
    keeps_run: bool
    module: str
    source: str
    target: str
    options: tuple[str, ...] = ()

    def open_source(self, path: Path, allow_pickle: bool) -> Source:
        """Open a folder. Raises CheckpointError if it is not a valid folder of this format.

        allow_pickle: pickles may be read, in a confined process that accepts only listed classes.
        """
        return getattr(import_module(self.module), self.source)(path, allow_pickle)

    def open_target(self, path: Path, contents: Contents, options: TargetOptions) -> Target:
        """Start to write a folder. Raises CheckpointError for contents that the format cannot store."""
        return getattr(import_module(self.module), self.target)(path, contents, options)


def _is_megapipe(path: Path) -> bool:
    """Return whether `path` is a step's folder, or the folder of a run with at least one step."""
    steps = (*path.glob("checkpoints/step-*"), *path.glob("step-*"))
    return (path / "manifest.json").is_file() or any(step.is_dir() for step in steps)


def _is_megatron_torch(path: Path) -> bool:
    return next(iteration_folder(path).glob(f"mp_rank_*/{ARCHIVE}"), None) is not None


def _is_torch_dist(path: Path) -> bool:
    folder = iteration_folder(path)
    return all((folder / name).is_file() for name in (DIST_CONFIG, COMMON))


FORMATS = {
    "megapipe": Format(
        *("a megapipe checkpoint", _is_megapipe, True),
        *("megapipe.conversion.megapipe_format", "MegapipeSource", "MegapipeTarget"),
        options=("tokenizer",),
    ),
    "hf": Format(
        *("a Hugging Face folder", lambda path: (path / "config.json").is_file(), False),
        *("megapipe.conversion.hugging_face", "HuggingFaceSource", "HuggingFaceTarget"),
        options=("tokenizer", "max_shard_bytes"),
    ),
    "megatron": Format(
        *("a Megatron-LM folder, layout torch", _is_megatron_torch, False),
        *("megapipe.conversion.megatron_torch", "MegatronTorchSource", "MegatronTorchTarget"),
        options=("tensor", "pipeline", "chunks", "layer_names"),
    ),
    "megatron-dist": Format(
        *("a Megatron-LM folder, layout torch_dist", _is_torch_dist, False),
        *("megapipe.conversion.torch_dist", "TorchDistSource", "TorchDistTarget"),
        options=("layer_names",),
    ),
    "dcp": Format(
        *("a state dict of torch.distributed.checkpoint", lambda path: (path / METADATA).is_file(), True),
        *("megapipe.conversion.dcp", "DcpSource", "DcpTarget"),
    ),
}
"""Formats by their names on the command line."""


def format_of(path: Path, name: str | None = None) -> Format:
    """Return the format `name`, one of FORMATS, or else the format that a folder's files indicate. Raises
    UnknownFormatError."""
    if name is not None:
        return FORMATS[name]
    if not path.is_dir():
        raise UnknownFormatError(f"{path} is not a folder; give the folder of a checkpoint")
    for candidate in FORMATS.values():
        if candidate.recognizes(path):
            return candidate
    raise UnknownFormatError(f"the files of {path} identify no format; name it with --from: {', '.join(FORMATS)}")
