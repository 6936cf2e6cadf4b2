"""Random configurations of transformers' own classes, and the comparison of their models with ours.

The keys are those of the class. A key is drawn (`KEYS`), or has no effect on a model (its family says so; these are
drawn too, by the type of their value), or is listed in `UNDRAWN` with a reason.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from megapipe.checkpoint import CheckpointError
from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.conversion.hugging_face import HuggingFaceSource, exported_config
from megapipe.spec.family import _WITHOUT_EFFECT, Family, family_of
from tests.layers.bound import all_gradients, bind_weights, make_context, run
from tests.models import test_bert_hugging_face as bert
from tests.models.hugging_face import (
    CONFIGS,
    ENCODERS,
    SIZES,
    UNDROPPED,
    drawn,
    gradients_of,
    loss_of,
    model_class,
    tame,
)

LENGTH = 40
DRAWS = 40
"""Draws of a family that transformers can run."""
MORE_DRAWS = {
    *("mixtral", "phi3", "gpt_neox", "gemma3_text", "qwen3_moe", "bloom", "gpt_oss", "ernie4_5_moe", "modernbert"),
    *("deepseek_v2", "deepseek_v3"),
}
"""Families with values that are refused, of which 100 are drawn."""
LEAST = 80
"""Least share in percent of the draws of a family that train as in transformers."""
Draw = Callable[[Random], Any]


class Unusable(Exception):
    """A configuration that transformers refuses, fails with, or has no finite logits for."""


def among(*values: Any) -> Draw:
    """Draw one of several values, each equally often."""
    return lambda random: random.choice(values)


def between(first: int, last: int) -> Draw:
    """Draw a whole number, each equally often."""
    return lambda random: random.randint(first, last)


ROPE: dict[str, dict[str, Draw]] = {
    "default": {},
    "linear": {"factor": among(1.0, 2.0, 3.5)},
    "dynamic": {"factor": among(1.0, 2.0, 3.5)},
    "yarn": {
        "factor": among(2.0, 8.0),
        "original_max_position_embeddings": among(16, 32),
        "attention_factor": among(None, 0.8),
        "beta_fast": among(None, 16.0),
        "beta_slow": among(None, 2.0),
        "mscale": among(None, 0.7),
        "mscale_all_dim": among(None, 1.2),
        "truncate": among(None, False),
    },
    "llama3": {
        "factor": among(2.0, 4.0),
        "low_freq_factor": among(1.0, 2.0),
        "high_freq_factor": among(4.0, 8.0),
        "original_max_position_embeddings": among(16, 32),
    },
    "longrope": {"original_max_position_embeddings": among(16, 32)},
}
"""Kind of rotary positions -> its options. `proportional` is Gemma 4's."""
LONGROPE_ONLY = frozenset({"phi3"})
"""Families of which transformers refuses other kinds of rotary positions."""
PARTIAL = frozenset({"gpt_neox", "phi3"})
"""Families whose code in transformers reads partial_rotary_factor with every kind of rotary positions."""


def one_rope(random: Random, family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Draw the options of rotary positions of one kind of layers."""
    kinds = [kind for kind in ROPE if kind in ("default", "longrope") or family not in LONGROPE_ONLY]
    kind = random.choice(kinds)
    options = {key: draw(random) for key, draw in ROPE[kind].items()}
    rope = {key: value for key, value in options.items() if value is not None}
    if family in PARTIAL:
        rope["partial_rotary_factor"] = random.choice([0.25, 0.5, 1.0])
    if kind == "longrope":
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        pairs = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
        rope |= {key: [random.uniform(1.0, 4.0) for _ in range(pairs)] for key in ("short_factor", "long_factor")}
        if family not in LONGROPE_ONLY:
            rope["factor"] = random.choice([2.0, 4.0])
    return {"rope_type": kind, "rope_theta": random.choice([50.0, 10000.0]), **rope}


def rope_parameters(random: Random, family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Draw rope_parameters, by type of layer where the class has them so."""
    kinds = ("full_attention", "sliding_attention")
    if set(kinds) <= set(config["rope_parameters"]):
        return {kind: one_rope(random, family, config) for kind in kinds}
    return one_rope(random, family, config)


def layers(*values: Any) -> Callable[[Random, str, Mapping[str, Any]], list[Any] | None]:
    """Return a function that draws a list with a value for every layer, or none."""

    def draw(random: Random, _: str, config: Mapping[str, Any]) -> list[Any] | None:
        return random.choice([None, random.choices(values, k=config["num_hidden_layers"])])

    return draw


def epsilon(random: Random) -> float:
    """Draw a small constant, each magnitude equally often."""
    return float(10 ** random.uniform(-8, -1))


SOFTCAPS = among(None, 2.0, 30.0)
COUNTS = between(1, 4)
WIDTHS = between(8, 100)
FLAG = among(False, True)
ACTIVATIONS = among("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2")
KEYS: dict[str, Draw] = {
    "vocab_size": among(97, 100, 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), COUNTS),
    **dict.fromkeys(("hidden_size", "n_embd"), among(32, 48, 64)),
    **dict.fromkeys(("num_attention_heads", "n_head"), among(1, 2, 4)),
    **dict.fromkeys(("intermediate_size", "n_inner", "moe_intermediate_size"), WIDTHS),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), among(50, 64, 100)),
    "original_max_position_embeddings": among(16, 32, 64),
    "num_key_value_heads": among(1, 2, 4),
    "head_dim": among(4, 8, 16, 32),
    "embedding_size": among(16, 24, 64),
    "type_vocab_size": between(1, 3),
    "pad_token_id": among(None, 0, 1, 3),
    **dict.fromkeys(("hidden_act", "activation_function", "hidden_activation", "classifier_activation"), ACTIVATIONS),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon"), epsilon),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias", "qkv_bias", "norm_bias"), FLAG),
    **dict.fromkeys(("decoder_bias", "classifier_bias", "use_sliding_window", "use_parallel_residual"), FLAG),
    **dict.fromkeys(("norm_topk_prob", "rope_interleave", "scale_attn_by_inverse_layer_idx"), FLAG),
    **dict.fromkeys(("scale_attn_weights", "slow_but_exact", "apply_residual_connection_post_layernorm"), FLAG),
    "sliding_window": among(None, 1, 5, 64),
    "local_attention": among(2, 8, 128),
    "max_window_layers": between(0, 4),
    **dict.fromkeys(("sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval"), COUNTS),
    "final_logit_softcapping": SOFTCAPS,
    "query_pre_attn_scalar": between(1, 300),
    **dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts"), between(2, 5)),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), among(2, 3, 4, 1)),
    "router_jitter_noise": among(0.0, 0.1),
    "moe_norm_min": among(1e-12, 1e-3),
    "shared_expert_intermediate_size": WIDTHS,
    "moe_num_shared_experts": between(0, 2),
    "moe_layer_start_index": between(0, 2),
    "moe_layer_end_index": between(-1, 3),
    "moe_layer_interval": between(1, 2),
    "decoder_sparse_step": between(1, 3),
    "mlp_only_layers": lambda random: random.sample(range(4), random.randint(0, 2)),
    "first_k_dense_replace": between(0, 3),
    "n_routed_experts": among(4, 8),
    "n_shared_experts": between(1, 2),
    "n_group": among(1, 2, 4),
    "topk_group": between(1, 3),
    "topk_method": among("greedy", "group_limited_greedy"),
    "routed_scaling_factor": among(0.5, 1.0, 2.5),
    "q_lora_rank": among(None, 16, 40),
    "kv_lora_rank": among(8, 24),
    "qk_nope_head_dim": among(8, 16),
    "qk_rope_head_dim": among(4, 8),
    "v_head_dim": among(8, 12, 16),
    "pretraining_tp": among(1, 2),
    "swiglu_alpha": among(1.702, 1.0),
    "swiglu_limit": among(7.0, 2.0),
}
"""Key -> its values, each as likely as the others, some of which no model of a family can have."""
LATER: dict[str, Callable[[Random, str, Mapping[str, Any]], Any]] = {
    "rope_parameters": rope_parameters,
    "layer_types": layers("full_attention", "sliding_attention"),
    "no_rope_layers": layers(0, 1),
    # transformers does not read it in Gemma 3.
    "attn_logit_softcapping": lambda random, family, _: (
        random.choice([None, 30.0]) if family == "gemma3_text" else SOFTCAPS(random)
    ),
}
"""Key -> its values, which depend on the family and on the other keys."""
UNDRAWN = {
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention"), "a decoder that reads an encoder"),
    "use_bidirectional_attention": "an encoder with the weights of a decoder",
    **dict.fromkeys(("num_hidden_groups", "inner_group_num"), "several blocks that share weights"),
    "qk_head_dim": "the class computes it",
}
"""Key -> the kind of model that other values make, which megapipe refuses by name in every family."""
_DECODER, _COMPUTED = {"is_decoder": "a decoder with the weights of an encoder"}, {"head_dim": "the class computes it"}
BY_FAMILY: dict[str, dict[str, str]] = {
    **dict.fromkeys(("bert", "megatron-bert", "roberta", "xlm-roberta"), _DECODER),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _COMPUTED),
}
"""Further undrawn keys of some families."""
RETURNED = frozenset({"output_router_logits", "classifier_pooling"})
"""Keys without effect on logits that change what else transformers returns, or that it refuses."""


@cache
def bases() -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Return the cases of every family: prefix of transformers' classes, and a configuration to change."""
    small = {**SIZES, **UNDROPPED}
    cases = [*CONFIGS.values(), *ENCODERS.values(), ("Bert", small), ("MegatronBert", small)]
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for prefix, fields in cases:
        found.setdefault(config_class(prefix).model_type, []).append((prefix, fields))
    return found


def config_class(prefix: str) -> Any:
    """Return the configuration class of a prefix."""
    return getattr(transformers, f"{prefix}Config")


@dataclass(frozen=True)
class KeysOf:
    """The keys of a family's class: with their values, those without effect, and those that are not drawn."""

    drawn: tuple[str, ...]
    without_effect: dict[str, Any]
    undrawn: dict[str, str]
    unknown: tuple[str, ...]


@cache
def keys_of(model_type: str) -> KeysOf:
    """Sort the keys of a family's class."""
    prefix, fields = bases()[model_type][0]
    config, family = config_class(prefix)(**fields).to_dict(), family_of(model_type)
    undrawn = {key: why for key, why in (UNDRAWN | BY_FAMILY.get(model_type, {})).items() if key in config}
    others = [key for key in config if key not in undrawn]
    idle = {key for key in others if family.aliases.get(key, key) in without_effect(family)}
    shaping = [key for key in others if key not in idle]
    own = {key: config[key] for key in sorted(idle - _WITHOUT_EFFECT - RETURNED) if key != "pad_token_id"}
    return KeysOf(
        tuple(sorted(key for key in shaping if key in KEYS or key in LATER)),
        {key: value for key, value in own.items() if isinstance(value, (bool, int, float))},
        undrawn,
        tuple(key for key in shaping if key not in KEYS and key not in LATER),
    )


def without_effect(family: Family) -> frozenset[str]:
    """Return the keys that a family says have no effect on logits."""
    return (family.ignored | family.run_keys.keys() | _WITHOUT_EFFECT) - family.known_keys


def configuration(random: Random, model_type: str) -> tuple[Any, list[str]]:
    """Draw a configuration of a family with up to six of its keys changed, and in half of the draws one without
    effect; return the changed keys too. Raises Unusable."""
    prefix, fields = random.choice(bases()[model_type])
    known, whole = keys_of(model_type), config_class(prefix)(**fields).to_dict()
    order = random.sample(known.drawn, random.randint(1, 6))
    values: dict[str, Any] = {key: KEYS[key](random) for key in order if key in KEYS}
    for key in order:
        if key in LATER:
            values[key] = LATER[key](random, model_type, {**whole, **values})
    if known.without_effect and random.choice([False, True]):
        key = random.choice(sorted(known.without_effect))
        before = known.without_effect[key]
        values[key] = not before if isinstance(before, bool) else before + (1 if isinstance(before, int) else 0.25)
        order = [*order, key]
    try:
        return config_class(prefix)(**{"attn_implementation": "eager", **fields, **values}), order
    except Exception as error:
        raise Unusable from error


def context_of(config: Any) -> Any:
    """Return random tokens for a model."""
    if family_of(config.model_type).kind == "gpt":
        return make_context(ModelConfig(vocabulary_size=config.vocab_size), length=LENGTH)
    padded = config.pad_token_id if "roberta" in config.model_type else None
    types = getattr(config, "type_vocab_size", 0)
    return bert.make_context(
        replace(bert.MODEL, first_position=0 if padded is None else padded + 1, token_types=types)
    )


def their_outcome(theirs: nn.Module, context: Any) -> tuple[Tensor, Tensor]:
    """Return transformers' logits and loss, whose gradients are in the model. Raises Unusable."""
    try:
        if isinstance(context, bert.BertContext):
            (logits,) = bert.their_logits(theirs, context)
            rows = logits.gather(1, context.positions.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))
        else:
            rows = logits = theirs(context.tokens).logits
        loss = loss_of(rows, context)
        loss.backward()
        for parameter in theirs.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    except Exception as error:
        raise Unusable from error
    if not logits.isfinite().all():
        raise Unusable
    return logits.detach(), loss.detach()


def compare(config: Any) -> str | None:
    """Compare logits, loss and gradients of transformers' random model with ours; return the line that refuses it, if
    it is refused. Raises Unusable, or AssertionError where they differ."""
    try:
        theirs = drawn(model_class(config)(config)).double()
    except Exception as error:
        raise Unusable from error
    tame(theirs)
    context = context_of(config)
    expected, expected_loss = their_outcome(theirs, context)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        try:
            source = HuggingFaceSource(Path(folder))
        except CheckpointError as refused:
            return str(refused)
        model, weights = source.contents.model, {each.name: source.read(each) for each in source.contents.tensors}
    exported_config(model, "F32")
    model = replace(model, embedding_dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0)
    if isinstance(model, BertModelConfig):
        layers = bert.bound(model, weights, torch.float64)
        real = torch.arange(bert.LENGTH) < context.lengths[:, None]
    else:
        layers = bind_weights(model, weights, dtype=torch.float64)
        real = torch.ones_like(context.tokens, dtype=torch.bool)
    with torch.no_grad():
        logits = run(layers, replace(context, labels=None))
    logits = logits[0] if isinstance(logits, tuple) else logits
    assert (logits - expected)[real].abs().max() <= 2e-5 * expected[real].abs().max()
    loss = run(layers, context)
    loss.backward()
    assert torch.allclose(loss, expected_loss, rtol=1e-5, atol=0.0)
    wanted, ours = gradients_of(theirs), all_gradients(layers)
    trained = {name for name in ours if not name.endswith("router.bias")}
    assert trained <= wanted.keys()
    largest = max(float(gradient.norm()) for gradient in wanted.values())
    for name in trained:
        # The gradient of a key's bias is zero, and rounding.
        allowed = 1e-4 * float(wanted[name].norm()) + 1e-6 * largest
        assert (ours[name] - wanted[name]).norm() <= allowed, name
    return None


def draws_of(model_type: str) -> int:
    """Return how many configurations of a family are drawn."""
    return 100 if model_type in MORE_DRAWS else DRAWS


@dataclass
class Share:
    """Numbers of draws of a family, and the lines that refuse some."""

    agree: int = 0
    refused: list[str] = field(default_factory=list)

    @property
    def drawn(self) -> int:
        """Return the number of draws that transformers itself can run."""
        return self.agree + len(self.refused)


def is_named(line: str, changed: list[str]) -> bool:
    """Return whether a message is one line that names a changed key, or a field of our model."""
    return "\n" not in line and any(key.lstrip("_") in line for key in (*changed, "rotary parameters", "model."))


def share_of(model_type: str, draws: int) -> Share:
    """Compare independent random configurations of a family. Raises AssertionError where a model differs.

    hypothesis would draw variations of earlier draws: a share of the models would be one of a few groups.
    """
    share = Share()
    for number in count():
        if share.drawn == draws:
            break
        try:
            config, changed = configuration(Random(f"{model_type} {number}"), model_type)
            line = compare(config)
        except Unusable:
            continue
        except AssertionError as error:
            raise AssertionError(f"draw {number} of {model_type}, with other {changed}: {error}") from error
        if line is None:
            share.agree += 1
            continue
        assert is_named(line, changed), (line, changed)
        share.refused.append(line)
    return share
