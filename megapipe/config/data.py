"""Where tokens come from and how they are cut into samples."""

import math
from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True)
class DataConfig:
    """Where tokens come from and how they are cut into samples."""

    prefix: str = ""
    """Path of a data shard without its .bin/.idx ending, as printed by megapipe preprocess."""
    blend: dict[str, float] = field(default_factory=dict)
    """Several shards with weights, instead of prefix: {data/web: 7, data/code: 2.5}. Samples are mixed in these
    proportions throughout the run. Weights need not sum to 1; a shard that is used up is repeated."""
    split: str = "949,50,1"
    """Relative sizes of the training, validation and test parts of every shard, counted in documents."""
    sequence_length: int = 1024
    """Tokens per sample."""
    mask_end_of_document: bool = False
    """Exclude the prediction after each end-of-document token from the loss."""

    isolate_documents: bool = False
    """Restrict attention to the token's own document, and count positions from its start."""
    pack: Literal["concat", "best_fit"] = "concat"
    """How documents fill samples. concat: join the documents in order and cut samples out of the result. best_fit:
    pack whole documents, so that only documents longer than a sample are cut; predictions across a document boundary
    are excluded from the loss. best_fit reads all document lengths at the start."""
    fim_rate: float = 0.0
    """Fraction of training documents that are rearranged for fill-in-the-middle, drawn separately for every sample."""
    fim_suffix_first: float = 0.5
    """Fraction of the rearranged documents whose suffix is placed before the prefix."""
    fim_tokens: list[int] | None = None
    """Ids of the tokens that mark prefix, suffix and middle, such as [50258, 50259, 50260]; required if fim_rate is
    above 0, else null."""
    order: Literal["keyed", "megatron"] = "keyed"
    """Order of the training samples. keyed: computed on the fly, so that nothing is built at the start and a run can
    be extended. megatron: the same batches as Megatron-LM, for comparisons; built at the start for exactly
    training.steps steps."""

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Paths of all shards of the run."""
        return tuple(self.blend) if self.blend else (self.prefix,)

    def problems(self, vocabulary_size: int) -> list[str]:
        """Return one message for each rule that the fields break. vocabulary_size: of the model."""
        found = []
        if self.prefix and self.blend:
            found.append(
                f"data.prefix is {self.prefix!r} and data.blend has {len(self.blend)} shards; leave one of them out"
            )
        if not self.prefix and not self.blend:
            found.append(
                "data.prefix is empty; set it to the path of a shard without its .bin/.idx ending, as printed by "
                "megapipe preprocess, or list several shards in data.blend"
            )
        found += [
            f"data.blend gives {prefix or 'a shard without a name'} the weight {weight}; a weight must be a finite "
            "number above 0"
            for prefix, weight in self.blend.items()
            if not (prefix and math.isfinite(weight) and weight > 0)
        ]
        if self.order == "megatron" and self.pack != "concat":
            found.append(
                f"data.pack is {self.pack} but data.order is megatron, which needs data.pack concat; set that, or "
                "data.order to keyed"
            )
        return found + self._fill_in_the_middle_problems(vocabulary_size)

    def _fill_in_the_middle_problems(self, vocabulary_size: int) -> list[str]:
        found = [
            f"data.{name} is {value}; it is a fraction, from 0 to 1"
            for name, value in (("fim_rate", self.fim_rate), ("fim_suffix_first", self.fim_suffix_first))
            if not 0 <= value <= 1
        ]
        if not self.fim_rate and self.fim_tokens is not None:
            found.append(
                f"data.fim_tokens is {self.fim_tokens} but data.fim_rate is 0; set data.fim_rate, or leave both out"
            )
        if self.fim_rate:
            tokens = self.fim_tokens or []
            if len(set(tokens)) != 3 or len(tokens) != 3 or not all(0 <= each < vocabulary_size for each in tokens):
                found.append(
                    f"data.fim_tokens is {self.fim_tokens}; data.fim_rate {self.fim_rate} needs three different ids "
                    f"below model.vocabulary_size {vocabulary_size}, for prefix, suffix and middle"
                )
        return found
