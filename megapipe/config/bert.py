"""Configuration that BERT runs add to GPT runs: model options, sentence pairs and masking."""

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal, Self

from megapipe.config.field_types import Bound, Fraction, NaturalInt, PositiveFloat, PositiveInt, Size, TokenCount
from megapipe.config.model import ACTIVATIONS, ActivationKind, ModelConfig
from megapipe.config.run import DataConfig, PretrainConfig

SHARED_DATA_FIELDS = ("prefix", "blend", "split", "sequence_length")
SPECIAL_TOKENS = 3
"""Special tokens of a sample: [CLS], and [SEP] after each of its two parts."""
PAIR_TOKENS = Bound(SPECIAL_TOKENS + 2, words=f"at least {SPECIAL_TOKENS + 2}, for a sentence pair, [CLS] and [SEP]")


@dataclass(kw_only=True)
class BertModelConfig(ModelConfig):
    """Shape of the model, a bidirectional encoder with a masked-token head and an optional sentence-pair head."""

    kind: ClassVar[str] = "bert"
    is_causal: ClassVar[bool] = False
    vocabulary_size: TokenCount = 30522
    """Number of token ids; at least the tokenizer's. Padding for tensor parallelism is added automatically."""
    max_positions: TokenCount = 512
    """Longest sequence in tokens. It sizes the learned position table and limits data.sequence_length."""
    first_position: NaturalInt = 0
    """Row of the learned position table for the first token of a sample; rows before it are not used. In RoBERTa it is
    2, one more than the id of its padding."""
    token_types: NaturalInt = 2
    """Number of learned vectors for the parts of a sample; each token adds the vector of its part: 2 for sentence
    pairs (BERT), 1 for the same vector everywhere (RoBERTa), 0 for none (ModernBERT)."""
    embedding_size: Size | None = None
    """Width of the embeddings, of their norm and of the masked-token head, if it is not hidden_size: a linear layer
    after the embeddings projects them to hidden_size (ALBERT); null means hidden_size without that layer."""
    shared_blocks: bool = False
    """Use the weights of one block for all blocks (ALBERT). Their gradients are summed."""
    norm_epsilon: PositiveFloat = 1e-12
    """Small constant added to the variance (for rms_norm, to the mean square)."""
    scale_residual_init: bool = False
    """Divide the initial standard deviation of matrices that write to the residual stream by sqrt(2 x num_layers), as
    in GPT-2."""
    norm_position: Literal["pre", "post"] = "post"
    """Where layers are normalized. post: after each residual sum and after the embeddings (Devlin et al.,
    transformers). pre: before attention and MLP, and once before the heads (Megatron-LM, needed above 400 million
    parameters)."""
    transform_bias: bool = True
    """Give the dense layer of the masked-token head a bias. The output after it always has one."""
    transform_activation: Literal["gelu", "gelu_tanh", "relu", "relu_squared", "silu"] | None = None
    """Activation function of the dense layer of the masked-token head; null means gelu_tanh if the blocks have it,
    else gelu. BERT uses the activation of the blocks, RoBERTa always gelu."""
    sentence_head: bool = True
    """Add a pooler and a two-way classifier that is trained on the sentence pairs of data.pairs."""

    @property
    def of_embedding(self) -> Self:
        if self.embedding_size is None:
            return self
        return replace(self, hidden_size=self.embedding_size, embedding_size=None)

    @property
    def shares_blocks(self) -> bool:
        return self.shared_blocks

    @property
    def usual_transform_activation(self) -> str:
        """The value that null means for `transform_activation`."""
        return "gelu_tanh" if self.activation == "gelu_tanh" else "gelu"

    @property
    def transform_kind(self) -> ActivationKind:
        """Properties of the activation function of the masked-token head."""
        return ACTIVATIONS[self.transform_activation or self.usual_transform_activation]

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.shared_blocks and self.layer_pattern:
            problems.append(
                "model.shared_blocks is true with model.layer_pattern; shared blocks are "
                "alike: leave model.layer_pattern out, or set model.shared_blocks to false"
            )
        if self.shared_blocks and self.num_experts is not None:
            problems.append(
                f"model.shared_blocks is true with model.num_experts {self.num_experts}; "
                "experts are not shared: set model.num_experts to null, or model.shared_blocks to false"
            )
        problems += [
            f"model.{name} is {getattr(self, name)}{rule}: set it to {neutral}"
            for name, neutral, rule in (
                ("logit_scale", 1.0, ", but the head of a BERT has none"),
                ("logit_softcap", "null", ", but the head of a BERT has none"),
                ("mtp_layers", 0, "; only a GPT predicts further tokens"),
                ("kv_latent_size", "null", "; only a GPT has multi-latent attention"),
                ("attention_chunk_size", "null", "; only a GPT attends in chunks"),
            )
            if getattr(self, name) not in (neutral, None)
        ]
        if self.sentence_head and self.token_types < 2:
            problems.append(
                f"model.sentence_head is true with model.token_types {self.token_types}; the parts of a pair need one "
                "type each: set model.token_types to 2, or model.sentence_head to false"
            )
        if self.first_position and self.positions != "learned":
            problems.append(
                f"model.first_position is {self.first_position} but model.positions is {self.positions!r}; "
                "set model.first_position to 0, or model.positions to 'learned'"
            )
        return problems


@dataclass(kw_only=True)
class BertDataConfig(DataConfig):
    """Where sentences come from, how they are paired and how tokens are masked.

    The shard is split into sentences: a sequence is a sentence, and a document is a list of sentences
    (megapipe preprocess --split-sentences).
    """

    sequence_length: Annotated[int, PAIR_TOKENS] = 512
    """Tokens per sample, including [CLS], [SEP] and padding."""
    tokenizer: str = ""
    """Path of the shard's vocabulary, BERT's or RoBERTa's: a vocab.txt, a tokenizer.json, or a folder with one. Empty
    means the vocabulary that the shard's manifest names."""
    pairs: Literal["order", "next", "none"] = "order"
    """Task of model.sentence_head. order: whether the two parts of a text were swapped (Lan et al., 1909.11942).
    next: whether the second part comes from another document (Devlin et al., 1810.04805). none: samples have one part
    and the model has no sentence head."""
    short_sequence_probability: Fraction = 0.1
    """Fraction of samples that are made shorter than sequence_length, at random, down to two tokens."""
    mask_probability: Annotated[float, Bound(above=0, below=1)] = 0.15
    """Fraction of a sample's tokens that are masked and predicted."""
    whole_words: bool = True
    """Mask either all pieces of a word or none of them."""
    max_ngram: PositiveInt = 3
    """Maximum number of consecutive words that are masked together; 1 masks each word independently."""
    ngram_lengths: Literal["inverse", "geometric"] = "inverse"
    """Distribution of the number n of words that are masked together. inverse: proportional to 1/n, and each token is
    replaced independently (Megatron-LM). geometric: p = 0.2, cut off at max_ngram, and all tokens are replaced the
    same way (SpanBERT, 1907.10529)."""

    @property
    def max_predictions(self) -> int:
        """Maximum number of masked tokens in a sample."""
        return masking_budget(self.mask_probability, self.sequence_length)

    def problems(self) -> list[str]:
        return super().problems() + [
            f"data.{name} is {getattr(self, name)!r}; it is an option "
            "for GPT samples and has no effect on sentence pairs: leave it out"
            for name, default in vars(DataConfig()).items()
            if name not in SHARED_DATA_FIELDS and getattr(self, name) != default
        ]


def masking_budget(probability: float, length: int) -> int:
    """Return the number of tokens to mask in a sample of `length` tokens; at least 1."""
    return max(1, round(probability * length))


@dataclass(kw_only=True)
class BertPretrainConfig(PretrainConfig):
    """A complete BERT pretraining run."""

    kind: ClassVar[str] = "bert"

    model: BertModelConfig = field(default_factory=BertModelConfig)
    data: BertDataConfig = field(default_factory=BertDataConfig)

    @property
    def predictions(self) -> int:
        return self.data.max_predictions

    @property
    def loss_terms(self) -> tuple[str, ...]:
        pairs = {"order": ("sop",), "next": ("nsp",), "none": ()}
        return ("mlm", *pairs[self.data.pairs])

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.model.sentence_head != (self.data.pairs != "none"):
            problems.append(
                f"model.sentence_head is {self.model.sentence_head} and data.pairs is "
                f"{self.data.pairs!r}; the head and the pairs need each other: set "
                "model.sentence_head to true with order or next, to false with none"
            )
        return problems
