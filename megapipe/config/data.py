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

    isolate_documents: bool = False
    """Attention sees the token's own document alone, and positions count from its beginning."""
    pack: Literal["concat", "best_fit"] = "concat"
    """concat: samples are cut out of the documents joined in order. best_fit: whole documents are put together so that
    only those longer than a sample are cut; predictions from one document into the next are left out of the loss, and
    the lengths of all documents are read at the start."""
    fim_rate: float = 0.0
    """Share of training documents that are rearranged for fill-in-the-middle, anew in every sample."""
    fim_suffix_first: float = 0.5
    """fim_rate: of those, the share whose suffix stands before the prefix."""
    fim_tokens: list[int] | None = None
    """fim_rate: ids of the tokens that mark prefix, suffix and middle, for example [50258, 50259, 50260]."""
    order: Literal["keyed", "megatron"] = "keyed"
    """Order of the training samples. keyed: computed as they are read, nothing to build, a run may be prolonged.
    megatron: Megatron-LM's batches, for comparisons with it; built at the start for exactly training.steps."""

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Every shard of the run."""
        return tuple(self.blend) if self.blend else (self.prefix,)

    def problems(self, vocabulary_size: int) -> list[str]:
        """Every rule that the fields break among themselves, one message each. vocabulary_size: the model's."""
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
        if self.order == "megatron" and self.pack != "concat":
            found.append(
                f"data.pack is {self.pack} but data.order is megatron, which joins documents; set data.pack to concat "
                "or data.order to keyed"
            )
        return found + self._fill_in_the_middle_problems(vocabulary_size)

    def _fill_in_the_middle_problems(self, vocabulary_size: int) -> list[str]:
        found = [
            f"data.{name} is {value}; it is a share, from 0 to 1"
            for name, value in (("fim_rate", self.fim_rate), ("fim_suffix_first", self.fim_suffix_first))
            if not 0 <= value <= 1
        ]
        if not self.fim_rate and self.fim_tokens is not None:
            found.append(f"data.fim_tokens is {self.fim_tokens} but data.fim_rate is 0; set a rate, or leave both out")
        if self.fim_rate:
            tokens = self.fim_tokens or []
            if len(set(tokens)) != 3 or len(tokens) != 3 or not all(0 <= each < vocabulary_size for each in tokens):
                found.append(
                    f"data.fim_tokens is {self.fim_tokens}; data.fim_rate {self.fim_rate} needs three different ids "
                    f"below model.vocabulary_size {vocabulary_size}, which mark prefix, suffix and middle"
                )
        return found
