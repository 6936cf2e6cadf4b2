"""Where tokens come from and how they become samples."""

import math
from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True)
class DataConfig:
    """Where tokens come from and how they are cut into samples."""

    prefix: str = ""
    """Path of a shard without .bin/.idx, as tools/preprocess.py wrote it, relative to the working folder."""
    blend: dict[str, float] = field(default_factory=dict)
    """Several shards in place of prefix, each with its weight: {data/web: 7, data/code: 2.5}. Samples come in these
    proportions at every moment of the run, weights of any sum; a shard that is used up begins again."""
    split: str = "949,50,1"
    """Shares of the documents for training, validation and test, of every shard."""
    sequence_length: int = 1024
    """Tokens per sample."""
    mask_end_of_document: bool = False
    """Leave the prediction that follows an end-of-document token out of the loss."""

    order: Literal["keyed", "megatron"] = "keyed"
    """Order of the training samples. keyed: computed as they are read, nothing to build, a run may be prolonged.
    megatron: Megatron-LM's batches, for comparisons with it; built at the start for exactly training.steps."""

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Every shard of the run."""
        return tuple(self.blend) if self.blend else (self.prefix,)

    def problems(self) -> list[str]:
        """Every rule that the fields break among themselves, one message each."""
        found = []
        if self.prefix and self.blend:
            found.append(
                f"data.prefix is {self.prefix!r} beside a data.blend of {len(self.blend)} shards; leave one out"
            )
        if not self.prefix and not self.blend:
            found.append(
                "data.prefix is empty; give the path of a shard without .bin/.idx, as tools/preprocess.py wrote it, "
                "or several in data.blend"
            )
        found += [
            f"data.blend gives {prefix or 'a shard without a name'} the weight {weight}; a weight is a number above 0"
            for prefix, weight in self.blend.items()
            if not (prefix and math.isfinite(weight) and weight > 0)
        ]
        return found
