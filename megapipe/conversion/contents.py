"""What a checkpoint of any format holds, in megapipe's terms and without a tensor's elements."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from megapipe.config.model import ModelConfig

if TYPE_CHECKING:  # the manifest's module imports torch, which --help need not wait for
    from megapipe.checkpoint.manifest import RunState

WEIGHTS = "weights"
"""Kind of the newest weights, as in a manifest."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint.

    name: the parameter's global name, e.g. `blocks.3.attention.qkv.weight`. kind: `weights`, `weights_before_1`, or a
    moment by its optimizer's name. shape: global and canonical, without padding. dtype: as safetensors names it
    (`F32`, `BF16`, ...).
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        from megapipe.checkpoint.tensor_file import DTYPES  # imports torch, which --help need not wait for

        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds.

    model: a BertModelConfig for a BERT. tensors: every tensor, in the model's order; a tied weight once. run: where a
    run stands; None where the format keeps weights alone. applied_updates: parameter name -> optimizer updates that
    were applied; empty with weights alone. tokenizer: the model's, as `megapipe.data.tokenizers.open_tokenizer`
    takes it; None where it is not known. notes: lines for the user on how the checkpoint was read.
    """

    model: ModelConfig
    tensors: tuple[StoredTensor, ...]
    run: "RunState | None" = None
    applied_updates: Mapping[str, int] = field(default_factory=dict)
    tokenizer: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def kinds(self) -> list[str]:
        """What is stored of the parameters, weights first."""
        found = dict.fromkeys(tensor.kind for tensor in self.tensors)
        return sorted(found, key=lambda kind: (kind != WEIGHTS, kind))

    def weights_only(self) -> "Contents":
        """The same without moments and earlier weights; the run state stays, to tell where the weights are from."""
        return replace(
            self,
            tensors=tuple(tensor for tensor in self.tensors if tensor.kind == WEIGHTS),
            applied_updates={},
        )
