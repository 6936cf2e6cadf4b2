"""What a BERT run has beside a GPT's: the model's own choices, and how sentence pairs are made and masked."""

from dataclasses import dataclass, field, fields
from typing import Literal

from megapipe.config.data import DataConfig
from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig

SHARED_DATA_FIELDS = ("prefix", "blend", "split", "sequence_length")
SPECIAL_TOKENS = 3
"""Of a sample: [CLS], and a [SEP] behind each of its two parts."""


@dataclass(kw_only=True)
class BertModelConfig(ModelConfig):
    """A bidirectional encoder with a masked-token head and, if wanted, a head for pairs of sentences."""

    vocabulary_size: int = 30522
    """Number of token ids. At least the tokenizer's; padding for tensor parallelism is added out of sight."""
    max_positions: int = 512
    """Longest sequence in tokens: rows of the learned position table, bound on data.sequence_length."""
    norm_epsilon: float = 1e-12
    """Added to the variance (mean square for rms_norm)."""
    scale_residual_init: bool = False
    """Divide the standard deviation of matrices that write to the residual stream by sqrt(2 x num_layers) (GPT-2)."""
    norm_position: Literal["pre", "post"] = "post"
    """post: behind each residual sum and behind the embeddings (Devlin et al., transformers); pre: before attention
    and MLP, and once before the heads (Megatron-LM, whose BERTs beyond 400 million parameters need it)."""
    sentence_head: bool = True
    """A pooler and a two-way head that judges the pair of sentences, as data.pairs made it."""

    def problems(self) -> list[str]:
        found = super().problems()
        if self.sliding_window is not None:
            found.append(
                f"model.sliding_window is {self.sliding_window}; BERT's tokens see both ways and all of the sample: "
                "leave it null"
            )
        return found


@dataclass(kw_only=True)
class BertDataConfig(DataConfig):
    """Where sentences come from, how they are paired and what of them is hidden.

    The shard is split into sentences: a sequence is a sentence, a document its sentences (tools/preprocess.py
    --split-sentences).
    """

    sequence_length: int = 512
    """Tokens per sample, [CLS], [SEP] and padding included."""
    tokenizer: str = ""
    """The shard's WordPiece vocabulary: a vocab.txt, a tokenizer.json or a folder with one of them; empty takes the
    one that the shard's manifest names."""
    pairs: Literal["order", "next", "none"] = "order"
    """What model.sentence_head learns: order, whether two parts of a text were swapped (Lan et al., 1909.11942); next,
    whether the second part is of another document (Devlin et al., 1810.04805); none, one part and no head."""
    short_sequence_probability: float = 0.1
    """Share of the samples that are made shorter than they could be, down to two tokens."""
    mask_probability: float = 0.15
    """Share of a sample's tokens that are hidden and predicted."""
    whole_words: bool = True
    """Hide all pieces of a word or none."""
    max_ngram: int = 3
    """Most words in a row that are hidden together; 1 hides each by itself."""
    ngram_lengths: Literal["inverse", "geometric"] = "inverse"
    """How many words are hidden together: n with a probability proportional to 1/n, each token then replaced by itself
    (Megatron-LM); or geometric with p = 0.2, cut at max_ngram, all tokens replaced alike (SpanBERT, 1907.10529)."""

    @property
    def max_predictions(self) -> int:
        """Most tokens of a sample that are hidden."""
        return masking_budget(self.mask_probability, self.sequence_length)

    def sample_problems(self) -> list[str]:
        """Every rule that single fields break, one message each."""
        found = []
        shortest = SPECIAL_TOKENS + 2
        if self.sequence_length < shortest:
            found.append(
                f"data.sequence_length is {self.sequence_length}; a pair with its [CLS] and [SEP] needs at least "
                f"{shortest}"
            )
        if not 0 < self.mask_probability < 1:
            found.append(f"data.mask_probability is {self.mask_probability}; it must be above 0 and below 1")
        if not 0 <= self.short_sequence_probability <= 1:
            found.append(
                f"data.short_sequence_probability is {self.short_sequence_probability}; it must be at least 0 and at "
                "most 1"
            )
        if self.max_ngram < 1:
            found.append(f"data.max_ngram is {self.max_ngram}; it must be at least 1")
        found += [
            f"data.{each.name} is {getattr(self, each.name)!r}; it shapes GPT's samples and has no meaning for "
            "sentence pairs: leave it out"
            for each in fields(DataConfig)
            if each.name not in SHARED_DATA_FIELDS and getattr(self, each.name) != getattr(DataConfig(), each.name)
        ]
        return found

    @classmethod
    def own_fields(cls) -> list[str]:
        """What GPT's data have no field for."""
        shared = {each.name for each in fields(DataConfig)}
        return [each.name for each in fields(cls) if each.name not in shared]


def masking_budget(probability: float, length: int) -> int:
    """Tokens to hide of a sample of `length`: its share, and at least one."""
    return max(1, round(probability * length))


@dataclass(kw_only=True)
class BertPretrainConfig(PretrainConfig):
    """A whole BERT pretraining run."""

    model: BertModelConfig = field(default_factory=BertModelConfig)
    data: BertDataConfig = field(default_factory=BertDataConfig)

    def problems(self) -> list[str]:
        found = super().problems() + self.data.sample_problems()
        if self.model.sentence_head != (self.data.pairs != "none"):
            found.append(
                f"model.sentence_head is {self.model.sentence_head} and data.pairs is {self.data.pairs!r}: the head "
                "needs pairs to judge, and pairs a head; set model.sentence_head true with order or next, false with "
                "none"
            )
        return found
