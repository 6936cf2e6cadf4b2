"""The shape of a transformer language model: GPT-2/3 and Llama, Mistral, Qwen shapes from one set of fields."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than the original one."""

    kind: Literal["none", "linear", "llama3"] = "none"
    """none; linear divides every frequency by `factor`; llama3 divides only the long wavelengths."""
    factor: float = 1.0
    """Ratio of the new context length to the original one."""
    low_frequency_factor: float = 1.0
    """llama3: wavelengths above original_length / low_frequency_factor are divided in full."""
    high_frequency_factor: float = 4.0
    """llama3: wavelengths below original_length / high_frequency_factor are kept."""
    original_length: int = 8192
    """llama3: context length in tokens that the frequencies were first meant for."""


@dataclass(kw_only=True)
class ModelConfig:
    """Architecture. Optional sizes left at null take the value that their description names."""

    vocabulary_size: int = 50257
    """Number of token ids. At least the tokenizer's; padding for tensor parallelism is added out of sight."""
    num_layers: int = 12
    """Transformer blocks."""
    hidden_size: int = 768
    """Width of the residual stream."""
    num_heads: int = 12
    """Query heads."""
    num_kv_heads: int | None = None
    """Key and value heads (grouped-query attention); null means num_heads."""
    head_size: int | None = None
    """Channels per head; null means hidden_size / num_heads."""
    ffn_hidden_size: int | None = None
    """Inner width of the MLP; null means 4 x hidden_size, and for swiglu 8/3 x hidden_size rounded up to 64."""
    num_experts: int | None = None
    """MLPs beside each other in every block, of which a token uses a few (mixture of experts); null has one MLP."""
    experts_per_token: int = 2
    """Experts that each token goes to; none is ever left out."""
    normalize_expert_shares: bool = True
    """A token's experts share its result by a softmax over their scores alone (Mixtral); false: by their part of a
    softmax over all experts' scores (Switch)."""
    expert_balance_rate: float = 0.001
    """How far each step moves an expert's bias, which counts when experts are chosen and in nothing else: down where
    the expert got more than its share of the step's tokens, up where it got less (0: no biases)."""
    max_positions: int = 1024
    """Longest sequence in tokens: rows of the learned position table, bound on data.sequence_length."""
    normalization: Literal["layer_norm", "rms_norm"] = "layer_norm"
    """Normalisation before attention, before the MLP and before the head."""
    norm_epsilon: float = 1e-5
    """Added to the variance (mean square for rms_norm)."""
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    """gelu is the exact (erf) form; gelu_tanh its approximation, as in GPT-2; swiglu doubles the first MLP matrix."""
    positions: Literal["learned", "rotary", "none"] = "learned"
    """How attention learns about order."""
    rope_theta: float = 10000.0
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    """Stretching of the rotary wavelengths."""
    bias: Literal["all", "qkv", "none"] = "all"
    """Which linear layers have a bias: all (GPT-2), only query/key/value (Qwen2), none (Llama)."""
    qk_norm: bool = False
    """RMS-normalise queries and keys per head before the rotation (Qwen3)."""
    sliding_window: int | None = None
    """Each token sees itself and this many minus one tokens before it (Mistral); null sees all."""
    tie_embeddings: bool = True
    """The head's matrix is the word embedding's."""
    embedding_dropout: float = 0.0
    """Probability of zeroing a channel of the summed embeddings."""
    attention_dropout: float = 0.0
    """Probability of zeroing an attention weight. Needs the unfused attention path."""
    hidden_dropout: float = 0.0
    """Probability of zeroing a channel of what attention and MLP add to the residual stream."""
    init_std: float = 0.02
    """Standard deviation of initial matrices and embeddings."""
    scale_residual_init: bool = True
    """Divide the standard deviation of matrices that write to the residual stream by sqrt(2 x num_layers) (GPT-2)."""
    attention: Literal["auto", "sdpa", "unfused", "flex"] = "auto"
    """Attention path; auto picks by device, dtype and length, unfused where attention_dropout asks for it, and flex
    (torch's flex_attention) for data.isolate_documents on GPUs."""

    @property
    def kv_heads(self) -> int:
        """Key and value heads, resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Channels per head, resolved."""
        return self.hidden_size // self.num_heads if self.head_size is None else self.head_size

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP, resolved."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.activation == "swiglu":
            return -(-8 * self.hidden_size // 3 // 64) * 64
        return 4 * self.hidden_size

    @property
    def balances_experts(self) -> bool:
        """Whether experts have biases that even out how often they are chosen: not where a token goes to all."""
        return (
            self.num_experts is not None
            and self.experts_per_token < self.num_experts
            and bool(self.expert_balance_rate)
        )

    def problems(self) -> list[str]:
        """Every rule that the fields break among themselves, one message each; empty when all is well."""
        found = []
        for name in ("vocabulary_size", "num_layers", "hidden_size", "num_heads", "max_positions"):
            if getattr(self, name) < 1:
                found.append(f"model.{name} is {getattr(self, name)}; it must be at least 1")
        if found:
            return found
        for name in ("num_kv_heads", "head_size", "ffn_hidden_size", "num_experts", "sliding_window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"model.{name} is {value}; it must be at least 1, or null for its default")
        for name in ("embedding_dropout", "attention_dropout", "hidden_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                found.append(f"model.{name} is {getattr(self, name)}; it is a probability, at least 0 and below 1")
        if found:
            return found
        return self._head_problems() + self._expert_problems() + self._path_problems()

    def _head_problems(self) -> list[str]:
        found = []
        if self.head_size is None and self.hidden_size % self.num_heads:
            found.append(
                f"model.hidden_size {self.hidden_size} is not divisible by model.num_heads {self.num_heads}; "
                "change one of them, or set model.head_size"
            )
        if self.num_heads % self.kv_heads:
            found.append(
                f"model.num_heads {self.num_heads} is not divisible by model.num_kv_heads {self.kv_heads}; "
                f"pick a divisor of {self.num_heads}"
            )
        if self.positions == "rotary" and self.head_dim % 2:
            found.append(f"model.head_size is {self.head_dim}; rotary positions rotate pairs, so it must be even")
        return found

    def _expert_problems(self) -> list[str]:
        if self.num_experts is None:
            return []
        if not 1 <= self.experts_per_token <= self.num_experts:
            return [
                f"model.experts_per_token is {self.experts_per_token}; it must be at least 1 and at most "
                f"model.num_experts {self.num_experts}"
            ]
        if self.experts_per_token == 1 < self.num_experts and self.normalize_expert_shares:
            return [
                "model.experts_per_token is 1 with model.normalize_expert_shares true: the one expert's share is "
                "always 1, so that the router would learn nothing; set model.normalize_expert_shares false"
            ]
        if self.expert_balance_rate < 0:
            return [
                f"model.expert_balance_rate is {self.expert_balance_rate}; it must be at least 0, for example 0.001"
            ]
        return []

    def _path_problems(self) -> list[str]:
        found = []
        if self.attention in ("sdpa", "flex") and self.attention_dropout > 0:
            found.append(
                f"model.attention is {self.attention!r} with model.attention_dropout {self.attention_dropout}; it "
                "cannot draw layout-independent dropout masks: set model.attention to 'unfused' (or 'auto'), or "
                "model.attention_dropout to 0"
            )
        if self.norm_epsilon <= 0:
            found.append(f"model.norm_epsilon is {self.norm_epsilon}; it must be above 0, for example 1e-5")
        if self.init_std <= 0:
            found.append(f"model.init_std is {self.init_std}; it must be above 0, for example 0.02")
        if self.rope_scaling.kind != "none" and self.positions != "rotary":
            found.append(
                f"model.rope_scaling.kind is {self.rope_scaling.kind!r} but model.positions is {self.positions!r}; "
                "set model.positions to 'rotary' or model.rope_scaling.kind to 'none'"
            )
        if self.rope_scaling.factor <= 0:
            found.append(f"model.rope_scaling.factor is {self.rope_scaling.factor}; it must be above 0")
        return found
