"""The shape of a transformer language model: GPT-2/3 and Llama, Mistral, Qwen shapes from one set of fields."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from megapipe.config.field_types import (
    NaturalFloat,
    PositiveFloat,
    PositiveInt,
    Probability,
    Size,
    TokenCount,
    bound_problems,
)


@dataclass(frozen=True)
class ActivationKind:
    """Properties of an activation function that the model, its costs and its kernels read.

    op: of the kernel registry; its function `apply` takes the tensor and `arguments`. gated: the first matrix gives
    two halves, the gate first. biased: op whose `apply` adds the bias of the first matrix too, if there is one.
    """

    op: str
    gated: bool = False
    arguments: tuple[str, ...] = ()
    biased: str | None = None


@dataclass(frozen=True)
class NormKind:
    """Properties of a norm. op: of the kernel registry. centred: the norm subtracts the mean, saves it for the
    backward, and has a bias."""

    op: str
    centred: bool


ACTIVATIONS = {
    "gelu": ActivationKind("gelu", arguments=("none",), biased="bias_gelu"),
    "gelu_tanh": ActivationKind("gelu", arguments=("tanh",), biased="bias_gelu"),
    "swiglu": ActivationKind("swiglu", gated=True),
}
NORMS = {"layer_norm": NormKind("layer_norm", centred=True), "rms_norm": NormKind("rms_norm", centred=False)}


@dataclass(kw_only=True)
class RopeScaling:
    """How rotary position frequencies are stretched for contexts longer than the original one."""

    kind: Literal["none", "linear", "llama3"] = "none"
    """Kind of stretching. none: no stretching. linear: divide every frequency by `factor`. llama3: divide only the
    frequencies of long wavelengths (Llama 3.1)."""
    factor: PositiveFloat = 1.0
    """Ratio of the new context length to the original one."""
    low_frequency_factor: PositiveFloat = 1.0
    """Only for llama3: wavelengths above original_length / low_frequency_factor are stretched fully."""
    high_frequency_factor: PositiveFloat = 4.0
    """Only for llama3: wavelengths below original_length / high_frequency_factor are not stretched."""
    original_length: PositiveInt = 8192
    """Only for llama3: context length in tokens for which the frequencies were chosen."""


@dataclass(kw_only=True)
class ModelConfig:
    """Shape of the model."""

    kind: ClassVar[str] = "gpt"
    """Kind of model, as in --kind."""
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
    """Channels per attention head; null means hidden_size / num_heads."""
    ffn_hidden_size: Size | None = None
    """Inner width of the MLP; null means 4 x hidden_size, or 8/3 x hidden_size rounded up to a multiple of 64 for
    swiglu."""
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
    """Number of groups of equal size that the experts are divided into, in order. A token uses experts of its best
    `router_groups_chosen` groups only. For softmax a group is as good as its best expert (DeepSeek-V2), for sigmoid as
    the sum of its two best (DeepSeek-V3)."""
    router_groups_chosen: PositiveInt = 1
    """Number of groups from which a token's experts are chosen."""
    shared_expert_size: Size | None = None
    """Inner width of an additional MLP that every token uses in blocks with experts (shared experts of DeepSeek and
    Qwen2-MoE; several shared experts are one of their total width); null means none."""
    shared_expert_gate: bool = False
    """Multiply the shared expert's output by the sigmoid of a linear layer of the token (Qwen2-MoE)."""
    max_positions: TokenCount = 1024
    """Longest sequence in tokens. It sizes the learned position table and limits data.sequence_length."""
    normalization: Literal["layer_norm", "rms_norm"] = "layer_norm"
    """Normalization before attention, before the MLP and before the output head."""
    norm_epsilon: PositiveFloat = 1e-5
    """Small constant added to the variance (for rms_norm, to the mean square)."""
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    """Activation function of the MLP. gelu: the exact form. gelu_tanh: its approximation, as in GPT-2. swiglu: gated,
    with a first matrix of twice the width, as in Llama."""
    positions: Literal["learned", "rotary", "none"] = "learned"
    """Position encoding."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    """How rotary position frequencies are stretched for long contexts."""
    bias: Literal["all", "qkv", "none"] = "all"
    """Which linear layers have a bias: all (GPT-2), only query, key and value (Qwen2), or none (Llama)."""
    qk_norm: bool = False
    """Apply RMS normalization to queries and keys, per head, before the rotation (Qwen3)."""
    sliding_window: TokenCount | None = None
    """Number of tokens that each token attends to, itself included (Mistral); null means all earlier tokens."""
    tie_embeddings: bool = True
    """Use the word embedding's matrix as the output head's matrix."""
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
    attention: Literal["auto", "sdpa", "unfused", "flex"] = "auto"
    """Attention implementation. auto: choose by device, precision and length (unfused for attention_dropout; flex,
    which is torch's flex_attention, for data.isolate_documents on GPUs)."""

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads, with the default resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Channels per head, with the default resolved."""
        return self.hidden_size // self.num_heads if self.head_size is None else self.head_size

    @property
    def activation_kind(self) -> ActivationKind:
        """Properties of the activation function."""
        return ACTIVATIONS[self.activation]

    @property
    def norm_kind(self) -> NormKind:
        """Properties of the norms."""
        return NORMS[self.normalization]

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
        """Number of experts, from the best, whose values say how good a group of experts is."""
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
        return bound_problems(self, "model") or self._head_problems() + self._expert_problems() + self._path_problems()

    def _head_problems(self) -> list[str]:
        found = []
        if self.head_size is None and self.hidden_size % self.num_heads:
            found.append(
                f"model.hidden_size {self.hidden_size} is not divisible by model.num_heads "
                f"{self.num_heads}; change one of them, or set model.head_size"
            )
        if self.num_heads % self.kv_heads:
            found.append(
                f"model.num_heads {self.num_heads} is not divisible by "
                f"model.num_kv_heads {self.kv_heads}; pick a divisor of {self.num_heads}"
            )
        if self.positions == "rotary" and self.head_dim % 2:
            found.append(f"model.head_size is {self.head_dim}; rotary positions need an even number of channels")
        return found

    def _expert_problems(self) -> list[str]:
        if self.num_experts is None:
            return []
        if self.experts_per_token > self.num_experts:
            return [
                f"model.experts_per_token is {self.experts_per_token}; it must "
                f"be at least 1 and at most model.num_experts {self.num_experts}"
            ]
        if self.experts_per_token == 1 < self.num_experts and self.normalize_expert_shares:
            return [
                "model.experts_per_token is 1 with model.normalize_expert_shares true: the weight of the only expert "
                "would always be 1, and the router would learn nothing; set model.normalize_expert_shares false"
            ]
        return self._router_problems(self.num_experts)

    def _router_problems(self, num_experts: int) -> list[str]:
        found = []
        groups, chosen = self.router_groups, self.router_groups_chosen
        size, least = num_experts // groups, self.best_of_group
        if num_experts % groups or (groups > 1 and size < least):
            found.append(
                f"model.router_groups {groups} does not divide model.num_experts {num_experts} into equal groups of "
                f"at least {least}; pick a divisor of {num_experts} that is at most {max(1, num_experts // least)}"
            )
        elif chosen > groups or self.experts_per_token > chosen * size:
            found.append(
                f"model.router_groups_chosen is {chosen}; it must be at most model.router_groups {groups}, and the "
                f"chosen groups, of {size} experts each, must have model.experts_per_token {self.experts_per_token}"
            )
        if self.expert_bias == "scores" and self.router_scores != "softmax" and self.balances_experts:
            found.append(
                f"model.expert_bias is 'scores' with model.router_scores {self.router_scores!r}; that rule of version "
                "0.1 is for softmax: set model.expert_bias to 'shares'"
            )
        if self.shared_expert_gate and self.shared_expert_size is None:
            found.append(
                "model.shared_expert_gate is true, but there is no shared expert; set model.shared_expert_size"
            )
        return found

    def _path_problems(self) -> list[str]:
        found = []
        if self.attention in ("sdpa", "flex") and self.attention_dropout > 0:
            found.append(
                f"model.attention is {self.attention!r} with model.attention_dropout {self.attention_dropout}; "
                "only unfused attention supports attention dropout: set model.attention to 'unfused' (or 'auto'), or "
                "model.attention_dropout to 0"
            )
        if self.rope_scaling.kind != "none" and self.positions != "rotary":
            found.append(
                f"model.rope_scaling.kind is {self.rope_scaling.kind!r} but model.positions is {self.positions!r}; "
                "set model.positions to 'rotary' or model.rope_scaling.kind to 'none'"
            )
        return found
