"""The shape of a transformer language model: GPT-2/3 and Llama, Mistral, Qwen shapes from one set of fields."""

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

from megapipe.config.field_types import (
    NaturalFloat,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Share,
    Size,
    TokenCount,
    bound_problems,
    in_words,
    is_value_of,
    type_hints,
)
from megapipe.config.rope import RopeScaling


@dataclass(frozen=True)
class ActivationKind:
    """Properties of an activation function that the model, its costs and its kernels read.

    op: name of an op of the kernel registry, whose function `apply` takes the tensor and `arguments`. gated: the first
    matrix gives two halves, the gate first. biased: name of an op whose `apply` also adds the bias of the first
    matrix, or None. fields: fields of the model whose values are further arguments.
    """

    op: str
    gated: bool = False
    arguments: tuple[Any, ...] = ()
    biased: str | None = None
    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class NormKind:
    """Properties of a norm.

    op: name of an op of the kernel registry. centred: the norm subtracts the mean and saves it for the backward.
    biased: it has a bias. initial: initial value of its weight.
    """

    op: str
    centred: bool
    biased: bool = False
    initial: Literal["ones", "zeros"] = "ones"


ACTIVATIONS = {
    "gelu": ActivationKind("gelu", arguments=("none",), biased="bias_gelu"),
    "gelu_tanh": ActivationKind("gelu", arguments=("tanh",), biased="bias_gelu"),
    "swiglu": ActivationKind("swiglu", gated=True),
    "swiglu_clamped": ActivationKind("swiglu_clamped", gated=True, fields=("swiglu_alpha", "swiglu_limit")),
    "geglu": ActivationKind("geglu", gated=True, arguments=("none",)),
    "geglu_tanh": ActivationKind("geglu", gated=True, arguments=("tanh",)),
    "reglu": ActivationKind("reglu", gated=True, arguments=("relu",)),
    "reglu_squared": ActivationKind("reglu", gated=True, arguments=("squared",)),
    "relu": ActivationKind("relu"),
    "relu_squared": ActivationKind("relu_squared"),
    "silu": ActivationKind("silu"),
}
BASE_KIND = "base"
"""Entry of `model.layer_pattern` for blocks that have the fields of the model itself."""
BLOCK_FIELDS = frozenset(
    (
        "num_heads", "num_kv_heads", "head_size", "qk_norm", "qk_norm_over", "bias",
        "sliding_window", "query_latent_size", "kv_latent_size", "rotary_head_size", "value_head_size",
        "positions", "rotary_fraction", "rope_theta", "rope_scaling", "attention_scale",
        "attention_softcap", "attention_sinks", "attention_norm", "attention_chunk_size",
        "ffn_hidden_size", "activation", "swiglu_alpha", "swiglu_limit",
        "num_experts", "experts_per_token", "normalize_expert_shares",
        "expert_balance_rate", "expert_bias", "router_scores", "router_scale", "router_bias",
        "router_groups", "router_groups_chosen", "shared_expert_size", "shared_expert_gate",
    )
)  # fmt: skip
"""Fields of a model that only its blocks read, so that kinds of layers may differ in them."""
NORMS = {
    "layer_norm": NormKind("layer_norm", centred=True, biased=True),
    "layer_norm_without_bias": NormKind("layer_norm_without_bias", centred=True),
    "rms_norm": NormKind("rms_norm", centred=False),
    "rms_norm_unit_offset": NormKind("rms_norm_unit_offset", centred=False, initial="zeros"),
}
BIASED: Mapping[str, tuple[str, ...]] = {
    "all": ("attention", "mlp"),
    "attention": ("attention",),
    "qkv": ("attention.qkv",),
    "mlp": ("mlp",),
    "shared": ("mlp.shared",),
    "attention_shared": ("attention", "mlp.shared"),
    "none": (),
}
"""Value of `bias` -> first parts of the paths of a block's linear layers that have a bias."""


class Reach(NamedTuple):
    """The tokens that a token attends to, among itself and the earlier tokens.

    tokens: number of the last tokens or, if `in_chunks`, size of the chunks of a sample, in which a token attends only
    to its own chunk; None for all tokens.
    """

    tokens: int | None
    in_chunks: bool = False


@dataclass(kw_only=True)
class ModelConfig:
    """Shape of the model."""

    kind: ClassVar[str] = "gpt"
    """Kind of model, as in --kind."""
    is_causal: ClassVar[bool] = True
    """Whether a token attends only to itself and the tokens before it."""
    vocabulary_size: TokenCount = 50257
    """Number of token ids; at least the tokenizer's. Padding for tensor parallelism is added automatically."""
    num_layers: Size = 12
    """Number of transformer blocks."""
    hidden_size: Size = 768
    """Width of the residual stream."""
    num_heads: Size = 12
    """Number of attention heads (query heads)."""
    num_kv_heads: Size | None = None
    """Number of key and value heads, for grouped-query attention; null means num_heads."""
    head_size: Size | None = None
    """Channels per attention head; null means hidden_size / num_heads. With kv_latent_size: the channels that are
    not rotated."""
    kv_latent_size: Size | None = None
    """Channels of the latent that keys and values of all heads are computed from (multi-latent attention, DeepSeek's
    kv_lora_rank); null means ordinary attention."""
    query_latent_size: Size | None = None
    """Channels of the latent that queries are computed from, only with kv_latent_size (DeepSeek's q_lora_rank); null
    means that they are computed from the hidden states."""
    rotary_head_size: Size | None = None
    """Rotated channels per head in addition to head_size, only with kv_latent_size (DeepSeek's qk_rope_head_dim). All
    heads have the same rotated key; null means none, which is ordinary attention."""
    value_head_size: Size | None = None
    """Channels of each head's values, only with kv_latent_size (DeepSeek's v_head_dim); null means head_size."""
    ffn_hidden_size: Size | None = None
    """Inner width of the MLP; null means 4 x hidden_size, or 8/3 x hidden_size rounded up to a multiple of 64 for
    gated activations (swiglu, swiglu_clamped, geglu, geglu_tanh, reglu, reglu_squared)."""
    num_experts: Size | None = None
    """Number of expert MLPs in every block (mixture of experts); null means one ordinary MLP."""
    experts_per_token: PositiveInt = 2
    """Number of experts that process each token. No token is ever dropped."""
    normalize_expert_shares: bool = True
    """How the results of a token's experts are weighted. true: by a softmax over the scores of the chosen experts
    (Mixtral). false: by a softmax over the scores of all experts (Switch)."""
    expert_balance_rate: NaturalFloat = 0.001
    """Step size of the biases that balance the experts: after each step, an expert's bias falls if it received more
    than its share of the tokens and rises if it received less. The bias affects only which experts are chosen. 0 turns
    balancing off."""
    expert_bias: Literal["shares", "scores"] = "shares"
    """Values that the balancing biases are added to when a token's experts are chosen. shares: the values of
    `router_scores` over all experts (Wang et al. 2024). scores: the scores themselves, as in version 0.1."""
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns a token's scores into the shares of its experts. softmax: over all experts, as in Mixtral.
    sigmoid: of each score by itself, as in DeepSeek-V3."""
    router_scale: PositiveFloat = 1.0
    """Factor of the shares, after they are normalized (DeepSeek's routed_scaling_factor)."""
    router_bias: bool = False
    """Give the router's linear layer a trained bias, which is part of the scores (gpt-oss)."""
    router_groups: PositiveInt = 1
    """Number of groups of equal size that the experts are divided into, in order. A token uses only experts of its
    best `router_groups_chosen` groups. With softmax, groups are ranked by their best expert (DeepSeek-V2), with
    sigmoid by the sum of their two best experts (DeepSeek-V3)."""
    router_groups_chosen: PositiveInt = 1
    """Number of groups from which a token's experts are chosen."""
    shared_expert_size: Size | None = None
    """Inner width of an additional MLP that every token uses in blocks with experts (shared experts of DeepSeek and
    Qwen2-MoE; several shared experts count as one of their total width); null means none."""
    shared_expert_gate: bool = False
    """Multiply the shared expert's output by the sigmoid of a linear layer of the token (Qwen2-MoE)."""
    max_positions: TokenCount = 1024
    """Longest sequence in tokens. It sizes the learned position table and limits data.sequence_length."""
    normalization: Literal["layer_norm", "layer_norm_without_bias", "rms_norm", "rms_norm_unit_offset"] = "layer_norm"
    """Normalization of hidden states. layer_norm_without_bias: layer_norm with only a weight (ModernBERT).
    rms_norm_unit_offset: rms_norm whose factor is 1 + its weight, which starts at 0 (Gemma)."""
    norm_position: Literal["pre", "post", "sandwich", "output", "stream"] = "pre"
    """Where blocks are normalized. pre: the inputs of attention and MLP. output: their outputs, before these are added
    to the residual stream (OLMo 2). sandwich: inputs and outputs (Gemma 2). stream: the residual stream; attention and
    MLP read the normalized stream, and their outputs are added to it (BLOOM's
    apply_residual_connection_post_layernorm). post: each sum of the residual stream and an output (only in a BERT)."""
    attention_norm: bool = True
    """Normalize the input of attention, if norm_position is pre. false: attention reads the residual stream itself
    (ModernBERT's first block, whose input the embedding has normalized)."""
    parallel_residual: bool = False
    """Compute attention and MLP from the same hidden states, each with its own norm, and add both (GPT-NeoX)."""
    embedding_norm: bool | None = None
    """Normalize the sum of the embeddings (BLOOM, ModernBERT); null means only if norm_position is post."""
    norm_epsilon: PositiveFloat = 1e-5
    """Small constant added to the variance (for rms_norm, to the mean square)."""
    activation: Literal[
        "gelu", "gelu_tanh", "swiglu", "swiglu_clamped", "geglu", "geglu_tanh", "reglu",
        "reglu_squared", "relu", "relu_squared", "silu",
    ] = "gelu"  # fmt: skip
    """Activation function of the MLP. gelu: the exact form. gelu_tanh: its approximation, as in GPT-2. swiglu, geglu,
    geglu_tanh, reglu, reglu_squared: silu, gelu, gelu_tanh, relu or relu_squared of a gate, with a first matrix of
    twice the width (Llama, Gemma, BitNet). swiglu_clamped: swiglu with limited inputs, as in gpt-oss."""
    swiglu_alpha: PositiveFloat = 1.702
    """Factor of the gate in the sigmoid of swiglu_clamped."""
    swiglu_limit: PositiveFloat = 7.0
    """Largest gate, and largest magnitude of the other half of the inputs, in swiglu_clamped."""
    positions: Literal["learned", "rotary", "alibi", "none"] = "learned"
    """Position encoding. alibi: attention scores decrease with the distance between query and key, with a different
    slope in each head (Press et al. 2022; BLOOM)."""
    rotary_fraction: Share = 1.0
    """Fraction of each head's channels that rotary positions rotate, the first ones (GPT-NeoX, Phi)."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    """How rotary position frequencies are stretched for long contexts."""
    bias: Literal["all", "attention", "qkv", "mlp", "shared", "attention_shared", "none"] = "all"
    """Which linear layers have a bias. all: every one (GPT-2). attention: query, key, value and output projection.
    qkv: query, key and value (Qwen2). mlp: only those of the MLP, all experts included. shared: only those of the
    shared expert. attention_shared: those of attention and of shared (DeepSeek-V2's mlp_bias). none: no layer
    (Llama)."""
    qk_norm: bool = False
    """Apply RMS normalization to queries and keys before the rotation (Qwen3)."""
    qk_norm_over: Literal["head", "projection"] = "head"
    """Channels that qk_norm normalizes together. head: those of each head, with one weight for all heads (Qwen3).
    projection: those of all query heads, and those of all key heads, with a weight for every channel (OLMo 2)."""
    attention_scale: PositiveFloat | None = None
    """Factor of attention scores (Gemma's query_pre_attn_scalar ** -0.5, Granite's attention_multiplier); null means
    head_size ** -0.5."""
    attention_softcap: PositiveFloat | None = None
    """Largest magnitude of attention scores: they become cap * tanh(score / cap) before the mask (Gemma 2); null means
    no limit. It needs the slower unfused attention."""
    attention_sinks: bool = False
    """Give every head a trained number that is added to its scores when the softmax is computed, so that a token can
    attend to nothing (gpt-oss)."""
    sliding_window: TokenCount | None = None
    """Number of tokens that each token attends to, itself included (Mistral); null means all earlier tokens. In a
    BERT, it is the number on each side, itself included, so that the window has 2 x sliding_window - 1 tokens
    (ModernBERT)."""
    attention_chunk_size: TokenCount | None = None
    """Cut samples into chunks of this number of tokens; each token attends to itself and to the earlier tokens of its
    chunk (Llama 4). null means whole samples."""
    mtp_layers: NaturalInt = 0
    """Number of further tokens that every token predicts in training, each through one more block (multi-token
    prediction, DeepSeek-V3's num_nextn_predict_layers). These blocks have the fields of the last one. 0 means none."""
    mtp_loss_weight: PositiveFloat = 0.1
    """Factor of the mean loss of the further tokens, which is added to the loss (DeepSeek-V3's lambda)."""
    tie_embeddings: bool = True
    """Use the word embedding's matrix as the output head's matrix."""
    embedding_scale: PositiveFloat = 1.0
    """Factor of the word embeddings, which is rounded to the compute dtype (Gemma: the square root of hidden_size)."""
    residual_scale: PositiveFloat = 1.0
    """Factor of the outputs of attention and MLP, before they are added to the residual stream (Granite)."""
    logit_scale: PositiveFloat = 1.0
    """Factor of the logits (Granite: 1 / logits_scaling)."""
    logit_softcap: PositiveFloat | None = None
    """Bound c of the logits, which become c x tanh(logits / c) (Gemma 2); null means no bound."""
    embedding_dropout: Probability = 0.0
    """Dropout probability after the sum of the embeddings."""
    attention_dropout: Probability = 0.0
    """Dropout probability of attention weights. It needs the slower unfused attention."""
    hidden_dropout: Probability = 0.0
    """Dropout probability of the outputs of attention and MLP, before they are added to the residual stream."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial matrices and embeddings."""
    scale_residual_init: bool = True
    """Divide the initial standard deviation of matrices that write to the residual stream by sqrt(2 x num_layers), as
    in GPT-2."""
    family: str = ""
    """Hugging Face family (model_type of config.json) that an export of this model belongs to; empty means the first
    one that can express the model."""
    attention: Literal["auto", "sdpa", "unfused", "flex"] = "auto"
    """Attention implementation. auto: choose by device, precision and length (unfused for attention_dropout and
    attention_softcap; flex, which is torch's flex_attention, for data.isolate_documents on GPUs)."""

    layer_kinds: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Kinds of blocks that differ from the rest of the model: a name, and the fields that blocks of this kind have
    instead of the model's, for example {local: {sliding_window: 512}, dense: {num_experts: null}}. They are used by
    model.layer_pattern."""
    layer_pattern: tuple[str, ...] = ()
    """Kind of each block, in order: names of model.layer_kinds, or base for the model's own fields. A pattern that is
    shorter than model.num_layers repeats, for example [local, local, base]. Empty means that all blocks are alike."""

    def kind_of_layer(self, index: int) -> str:
        """Return the name of the kind of a block, by its index; base if its fields are those of the model."""
        name = self.layer_pattern[index % len(self.layer_pattern)] if self.layer_pattern else BASE_KIND
        return name if self.layer_kinds.get(name) else BASE_KIND

    def of_kind(self, name: str) -> Self:
        """Return a model whose blocks all are of one kind: the model itself if it has no pattern."""
        if not self.layer_pattern:
            return self
        overrides = dict(self.layer_kinds.get(name, {}))
        if overrides.get("positions") in ("none", "alibi"):
            overrides.setdefault("rope_scaling", {})
        if isinstance(overrides.get("rope_scaling"), Mapping):
            overrides["rope_scaling"] = RopeScaling(**overrides["rope_scaling"])
        return replace(self, layer_kinds={}, layer_pattern=(), **overrides)

    @property
    def kind_of_head(self) -> str:
        """The kind of the blocks that predict further tokens; base if there are none."""
        return self.kind_of_layer(self.num_layers - 1) if self.mtp_layers else BASE_KIND

    @property
    def kinds_of_layers(self) -> dict[str, Self]:
        """The models of the kinds that blocks have, by name, in order of their first block; the model alone if its
        kinds are not valid."""
        if not self.layer_pattern or self._kind_problems():
            return {BASE_KIND: self}
        names = dict.fromkeys(map(self.kind_of_layer, range(min(len(self.layer_pattern), self.num_layers))))
        return {name: self.of_kind(name) for name in names}

    @property
    def of_embedding(self) -> Self:
        """A model that is as wide as the embeddings of this one."""
        return self

    @property
    def shares_blocks(self) -> bool:
        """Whether all blocks have the same weights."""
        return False

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads, with the default resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def own_head_size(self) -> int:
        """`head_size`, with the default resolved."""
        return self.hidden_size // self.num_heads if self.head_size is None else self.head_size

    @property
    def head_dim(self) -> int:
        """Channels per head of queries and keys."""
        return self.own_head_size + (self.rotary_head_size or 0)

    @property
    def value_dim(self) -> int:
        """Channels per head of values."""
        return self.own_head_size if self.value_head_size is None else self.value_head_size

    @property
    def rotary_dim(self) -> int:
        """Channels of each head that rotary positions rotate."""
        return self.rotary_head_size or int(self.head_dim * self.rotary_fraction)

    @property
    def score_scale(self) -> float:
        """Factor of attention scores, with the default resolved."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def why_unfused(self) -> str | None:
        """The field that only unfused attention supports, with its value; None if there is none."""
        if self.attention_dropout > 0:
            return f"model.attention_dropout {self.attention_dropout}"
        return None if self.attention_softcap is None else f"model.attention_softcap {self.attention_softcap}"

    @property
    def why_pieces(self) -> str | None:
        """The field that only attention in pieces supports (layers/attention_pieces.py); None if there is none."""
        if self.positions == "alibi":
            return "model.positions 'alibi'"
        return "model.attention_sinks" if self.attention_sinks else None

    @property
    def attention_reach(self) -> "Reach":
        """The tokens that a token attends to."""
        chunk = self.attention_chunk_size
        return Reach(self.sliding_window) if chunk is None else Reach(chunk, in_chunks=True)

    def chunk_sizes(self, length: int) -> list[int]:
        """Return the values of `attention_chunk_size` of all blocks that cut a sample of `length` tokens."""
        sizes = {each.attention_chunk_size for each in self.kinds_of_layers.values()}
        return sorted(each for each in sizes if each and each < length)

    def has_bias(self, path: str) -> bool:
        """Whether a linear layer of a block has a bias. path: in the block, such as `attention.qkv` or `mlp.up`."""
        return path.startswith(BIASED[self.bias])

    @property
    def activation_kind(self) -> ActivationKind:
        """Properties of the activation function."""
        kind = ACTIVATIONS[self.activation]
        if not kind.fields:
            return kind
        return replace(kind, arguments=(*kind.arguments, *(getattr(self, name) for name in kind.fields)))

    @property
    def norm_kind(self) -> NormKind:
        """Properties of the norms."""
        return NORMS[self.normalization]

    @property
    def head_norm_kind(self) -> NormKind:
        """Properties of the norms of queries and keys, which are rms norms."""
        return NORMS["rms_norm"] if self.norm_kind.centred else self.norm_kind

    @property
    def normalizes_embeddings(self) -> bool:
        """Whether a norm follows the sum of the embeddings, with the default resolved."""
        return self.norm_position == "post" if self.embedding_norm is None else self.embedding_norm

    @property
    def normalizes_outputs(self) -> bool:
        """Whether norms follow attention and MLP, before their outputs are added to the residual stream."""
        return self.norm_position in ("sandwich", "output")

    @property
    def changes_updates(self) -> bool:
        """Whether an operation between a matrix product and the residual sum changes the gradient of the product."""
        return self.normalizes_outputs or self.residual_scale != 1 or bool(self.hidden_dropout)

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP, with the default resolved."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.activation_kind.gated:
            return -(-8 * self.hidden_size // 3 // 64) * 64
        return 4 * self.hidden_size

    @property
    def best_of_group(self) -> int:
        """Number of a group's best experts that determine how the group is ranked."""
        return 1 if self.router_scores == "softmax" else 2

    @property
    def balances_experts(self) -> bool:
        """Whether experts have biases that balance their load. They have none if every token uses all experts."""
        return (
            self.num_experts is not None
            and self.experts_per_token < self.num_experts
            and bool(self.expert_balance_rate)
        )

    def problems(self) -> list[str]:
        """Return one message for each rule that the fields break; empty if the model is valid."""
        problems = bound_problems(self, "model") or self._kind_problems()
        if problems or not self.layer_pattern:
            return problems or self._head_problems() + self._expert_problems() + self._path_problems()
        for name, model in self.kinds_of_layers.items():
            where = "" if name == BASE_KIND else f" (in model.layer_kinds {name})"
            problems += [problem + where for problem in model.problems()]
        return list(dict.fromkeys(problems))

    def _kind_problems(self) -> list[str]:
        """Return one message for each rule that kinds of layers and their pattern break."""
        kinds = [BASE_KIND, *self.layer_kinds]
        problems = [
            f"model.layer_pattern has {name!r}, which is not a kind of layer; use one of "
            f"{', '.join(map(str, kinds))}, or add it to model.layer_kinds"
            for name in dict.fromkeys(self.layer_pattern)
            if name not in kinds
        ]
        if len(self.layer_pattern) > self.num_layers:
            problems.append(
                f"model.layer_pattern has {len(self.layer_pattern)} entries, but model.num_layers is "
                f"{self.num_layers}; leave the last ones out, or raise model.num_layers"
            )
        for name, overrides in self.layer_kinds.items():
            if not isinstance(name, str):
                problems.append(f"model.layer_kinds has the name {name!r}; names of kinds are text: use another name")
            elif name == BASE_KIND:
                problems += [f"model.layer_kinds has {name!r}, the name of the model's own fields; use another name"]
            elif name not in self.layer_pattern:
                problems.append(
                    f"model.layer_kinds has {name!r}, which model.layer_pattern does not use; "
                    "add it there, or leave it out"
                )
            problems += filter(None, (self._field_problem(name, *each) for each in overrides.items()))
        return problems

    def _field_problem(self, kind: str, name: str, value: Any) -> str | None:
        """Return why the blocks of a kind cannot have a value instead of the model's; None if they can."""
        where = f"model.layer_kinds {kind}"
        if name not in BLOCK_FIELDS:
            allowed = ", ".join(sorted(BLOCK_FIELDS))
            return f"{where} sets {name!r}, which cannot differ between blocks; use any of {allowed}"
        hint = type_hints(type(self))[name]
        if is_dataclass(hint):
            mapping = value if isinstance(value, Mapping) else {}
            hints = type_hints(hint)
            wrong = next((key for key in mapping if key not in hints), None)
            if wrong is not None or mapping is not value:
                return f"{where}: {name} is {value!r}, but must be a mapping of any of {', '.join(hints)}"
            for key, each in mapping.items():
                if not is_value_of(hints[key], each):
                    return f"{where}: {name}.{key} is {each!r}, but must be {in_words(hints[key])}"
            return None
        if not is_value_of(hint, value):
            return f"{where}: {name} is {value!r}, but must be {in_words(hint)}"
        if name == "positions" and value != self.positions and "learned" in (value, self.positions):
            return (
                f"{where}: positions is {value!r} and model.positions is {self.positions!r}; "
                "blocks can differ only in rotary, alibi or none: set both to one of them"
            )
        return None

    def _head_problems(self) -> list[str]:
        problems = []
        if self.head_size is None and self.hidden_size % self.num_heads:
            problems.append(
                f"model.hidden_size {self.hidden_size} is not divisible by model.num_heads "
                f"{self.num_heads}; change one of them, or set model.head_size"
            )
        if self.num_heads % self.kv_heads:
            problems.append(
                f"model.num_heads {self.num_heads} is not divisible by "
                f"model.num_kv_heads {self.kv_heads}; pick a divisor of {self.num_heads}"
            )
        return problems + (self._latent_problems() or self._rotary_problems()) + self._chunk_problems()

    def _latent_problems(self) -> list[str]:
        """Return one message for each rule of multi-latent attention that the fields break."""
        if self.kv_latent_size is None:
            return [
                f"model.{name} is {getattr(self, name)} but model.kv_latent_size is null; only multi-latent attention "
                f"has it: set model.kv_latent_size, or model.{name} to null"
                for name in ("query_latent_size", "rotary_head_size", "value_head_size")
                if getattr(self, name) is not None
            ]
        needed = {
            "num_kv_heads": (None, self.num_heads),
            "positions": ("rotary",),
            "rotary_fraction": (1.0,),
            "qk_norm": (False,),
            "attention_sinks": (False,),
            "bias": tuple(each for each in BIASED if each != "qkv"),
        }
        problems = [
            f"model.{name} is {getattr(self, name)!r} with model.kv_latent_size {self.kv_latent_size}; multi-latent "
            f"attention needs {' or '.join('null' if each is None else repr(each) for each in values)}"
            for name, values in needed.items()
            if getattr(self, name) not in values
        ]
        if self.rotary_head_size is None or self.rotary_head_size % 2:
            problems.append(
                f"model.rotary_head_size is {self.rotary_head_size or 'null'} with "
                f"model.kv_latent_size {self.kv_latent_size}; set it to an even number"
            )
        elif self.value_dim > self.head_dim:
            problems.append(
                f"model.value_head_size is {self.value_dim}; it must be at most "
                f"model.head_size + model.rotary_head_size, {self.head_dim}"
            )
        return problems

    def _rotary_problems(self) -> list[str]:
        if self.positions != "rotary":
            return [
                f"model.{name} is {value!r} but model.positions is {self.positions!r}; "
                f"set model.positions to 'rotary' or model.{name} to {default!r}"
                for name, value, default in (
                    ("rope_scaling.kind", self.rope_scaling.kind, "none"),
                    ("rotary_fraction", self.rotary_fraction, 1.0),
                )
                if value != default
            ]
        if self.rotary_fraction == 1.0 and self.rotary_dim % 2:
            return [f"model.head_size is {self.head_dim}; rotary positions need an even number of channels"]
        if self.rotary_dim % 2 or not self.rotary_dim:
            return [
                f"model.rotary_fraction {self.rotary_fraction} rotates {self.rotary_dim} of {self.head_dim} channels; "
                "the number must be even and at least 2: change model.rotary_fraction"
            ]
        return self.rope_scaling.problems(self.rope_theta, self.rotary_dim)

    def _chunk_problems(self) -> list[str]:
        """Return one message for each field that attention in chunks of samples does not support."""
        if self.attention_chunk_size is None:
            return []
        neutral = {"sliding_window": None, "attention_dropout": 0.0}
        problems = [
            f"model.{name} is {getattr(self, name)} with model.attention_chunk_size "
            f"{self.attention_chunk_size}; attention in chunks has none: set model.{name} "
            f"to {'null' if each is None else each}, or model.attention_chunk_size to null"
            for name, each in neutral.items()
            if getattr(self, name) != each
        ]
        if self.attention == "flex":
            problems.append(
                "model.attention is 'flex', which does not support "
                "model.attention_chunk_size; set model.attention to 'auto'"
            )
        return problems

    def _expert_problems(self) -> list[str]:
        if self.num_experts is None:
            return []
        if self.experts_per_token > self.num_experts:
            return [
                f"model.experts_per_token is {self.experts_per_token}; it must "
                f"be at least 1 and at most model.num_experts {self.num_experts}"
            ]
        if self.experts_per_token == 1 < self.num_experts and self.normalize_expert_shares and not self.family:
            return [
                "model.experts_per_token is 1 with model.normalize_expert_shares true: the weight of the only expert "
                "would always be 1, and the router would learn nothing; set model.normalize_expert_shares false, or "
                "model.family to a family whose models are like that"
            ]
        return self._router_problems(self.num_experts)

    def _router_problems(self, num_experts: int) -> list[str]:
        problems = []
        groups, chosen = self.router_groups, self.router_groups_chosen
        size, least = num_experts // groups, self.best_of_group
        if num_experts % groups or (groups > 1 and size < least):
            problems.append(
                f"model.router_groups {groups} does not divide model.num_experts {num_experts} into equal groups of "
                f"at least {least}; pick a divisor of {num_experts} that is at most {max(1, num_experts // least)}"
            )
        elif chosen > groups or self.experts_per_token > chosen * size:
            problems.append(
                f"model.router_groups_chosen is {chosen}; it must be at most model.router_groups {groups}, and the "
                f"chosen groups, of {size} experts each, must have model.experts_per_token {self.experts_per_token}"
            )
        if self.expert_bias == "scores" and self.router_scores != "softmax" and self.balances_experts:
            problems.append(
                f"model.expert_bias is 'scores' with model.router_scores {self.router_scores!r}; that rule of version "
                "0.1 is for softmax: set model.expert_bias to 'shares'"
            )
        if self.shared_expert_gate and self.shared_expert_size is None:
            problems.append("model.shared_expert_gate is true without a shared expert; set model.shared_expert_size")
        return problems

    def _activation_problems(self) -> list[str]:
        """Return one message for each field of another activation that is set."""
        return [
            f"model.{name} is {getattr(self, name)} with model.activation {self.activation!r}, which has none; "
            f"set model.{name} to {getattr(type(self), name)}, or model.activation to {activation!r}"
            for activation, kind in ACTIVATIONS.items()
            for name in kind.fields
            if activation != self.activation and getattr(self, name) != getattr(type(self), name)
        ]

    def _mtp_problems(self) -> list[str]:
        """Return one message for each field that the prediction of further tokens does not support."""
        if not self.mtp_layers:
            return []
        supported = {
            "positions": ("rotary", "alibi", "none"),
            "embedding_norm": (None, False),
            "embedding_dropout": (0.0,),
        }
        return [
            f"model.{name} is {getattr(self, name)!r} with model.mtp_layers {self.mtp_layers}, whose embeddings are "
            f"those of words alone: set model.{name} to {values[0]!r}, or model.mtp_layers to 0"
            for name, values in supported.items()
            if getattr(self, name) not in values
        ]

    def _path_problems(self) -> list[str]:
        problems = self._mtp_problems() + self._activation_problems()
        if self.norm_position == "post" and self.kind == "gpt":
            problems.append(
                "model.norm_position is 'post', which only a BERT has; set it to 'pre', "
                "'sandwich', 'output' or 'stream'"
            )
        if not self.attention_norm and self.norm_position != "pre":
            problems.append(
                f"model.attention_norm is false with model.norm_position {self.norm_position!r}; only in 'pre' it can "
                "be left out: set model.norm_position to 'pre' or model.attention_norm to true"
            )
        if self.parallel_residual and self.norm_position != "pre":
            problems.append(
                f"model.parallel_residual is true with model.norm_position {self.norm_position!r}; parallel branches "
                "have a norm before each: set model.norm_position to 'pre' or model.parallel_residual to false"
            )
        if self.attention in ("sdpa", "flex") and self.why_unfused is not None:
            field = self.why_unfused.split()[0]
            neutral = "0" if self.attention_dropout > 0 else "null"
            problems.append(
                f"model.attention is {self.attention!r} with {self.why_unfused}; only unfused attention "
                f"supports it: set model.attention to 'unfused' (or 'auto'), or {field} to {neutral}"
            )
        if self.attention_softcap is not None and self.positions == "alibi":
            problems.append(
                f"model.attention_softcap is {self.attention_softcap} with model.positions "
                "'alibi', whose scores have no limit; set model.attention_softcap to null, or other model.positions"
            )
        if self.attention == "flex" and self.why_pieces is not None:
            problems.append(f"model.attention is 'flex', which does not support {self.why_pieces}; set it to 'auto'")
        if self.qk_norm_over == "projection" and self.normalization == "rms_norm_unit_offset":
            problems.append(
                "model.qk_norm_over is 'projection', which has no norm with a unit offset; "
                "set model.normalization to 'rms_norm', or model.qk_norm_over to 'head'"
            )
        if self.qk_norm_over != "head" and not self.qk_norm:
            problems.append(
                f"model.qk_norm_over is {self.qk_norm_over!r} but model.qk_norm is false; "
                "set model.qk_norm to true, or model.qk_norm_over to 'head'"
            )
        return problems
