"""Variants of attention against transformers' attention modules and frequencies, and what is refused."""

import random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention
from transformers.models.stablelm.modeling_stablelm import StableLmAttention

from megapipe.config.rope import RopeScaling
from megapipe.layers.embedding import attention_factor, inverse_frequencies
from tests.layers.bound import LLAMA, bind, bind_model, make_context, small_model

LENGTH, HEAD = 12, 8
SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD,
    "attention_bias": True,
}
YARN = RopeScaling(kind="yarn", factor=4.0, original_length=6, mscale=0.7, mscale_all_dim=1.2, truncate=False)
ROPE = {"rope_type": "default", "rope_theta": 1e4}
VARIANTS: dict[str, tuple[type[nn.Module], type, dict[str, Any], dict[str, Any]]] = {
    "OLMo 2's norms": (
        Olmo2Attention,
        transformers.Olmo2Config,
        {"rms_norm_eps": 1e-5, "rope_parameters": ROPE},
        {"qk_norm": True, "qk_norm_over": "projection"},
    ),
    "Gemma 2's scores": (
        Gemma2Attention,
        transformers.Gemma2Config,
        {"query_pre_attn_scalar": 5, "attn_logit_softcapping": 0.7, "attn_implementation": "eager"},
        {"attention_scale": 5**-0.5, "attention_softcap": 0.7},
    ),
    "gpt-oss's sinks": (
        GptOssAttention,
        transformers.GptOssConfig,
        {"rope_parameters": ROPE, "attn_implementation": "eager"},
        {"attention_sinks": True},
    ),
    "StableLM's rotation": (
        StableLmAttention,
        transformers.StableLmConfig,
        {"use_qkv_bias": True, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
        {"rotary_fraction": 0.5, "bias": "qkv"},
    ),
    "YaRN": (
        Olmo2Attention,
        transformers.Olmo2Config,
        {
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                **ROPE,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 6,
                "mscale": 0.7,
                "mscale_all_dim": 1.2,
                "truncate": False,
            },
        },
        {"qk_norm": True, "qk_norm_over": "projection", "rope_scaling": YARN},
    ),
}


def projections(attention: nn.Module, part: str) -> dict[str, Tensor]:
    """Parameters of our attention, or their gradients, by transformers' names."""

    def of(name: str) -> Tensor | None:
        found = dict(attention.named_parameters()).get(name)
        return found if found is None or part == "weight" else found.grad

    sinks = of("sinks.weight")
    found = {"o_proj.weight": of("output.weight"), "o_proj.bias": of("output.bias")}
    found["sinks"] = None if sinks is None else sinks.flatten()
    for kind in ("weight", "bias"):
        joint = of(f"qkv.{kind}")
        for name, rows in (("q", slice(0, 2)), ("k", slice(2, 3)), ("v", slice(3, 4))) if joint is not None else ():
            found[f"{name}_proj.{kind}"] = joint[:, rows].flatten(0, 2)
    for name in ("query", "key"):
        weight = of(f"{name}_norm.weight")
        found[f"{name[0]}_norm.weight"] = None if weight is None else weight.flatten()
    return {name: tensor.detach() for name, tensor in found.items() if tensor is not None}


@pytest.mark.parametrize("name", VARIANTS)
def test_attention_agrees_with_transformers(name: str) -> None:
    kind, config_kind, theirs, ours = VARIANTS[name]
    config = config_kind(**{**SIZES, "max_position_embeddings": 64, "attn_implementation": "sdpa", **theirs})
    model = small_model(**{**LLAMA, "bias": "attention", **ours})
    block = bind(bind_model(model)[1].spec, model, dtype=torch.float64)
    attention = block.module.attention
    other = kind(config, 0).double()
    other.load_state_dict(projections(attention, "weight"))
    rope = dict(config.rope_parameters)
    rope_type = rope["rope_type"]
    inverse, factor = 1e4 ** (-torch.arange(0, model.rotary_dim, 2).double() / model.rotary_dim), 1.0
    if rope_type != "default":
        inverse, factor = ROPE_INIT_FUNCTIONS[rope_type](config)
    angles = torch.outer(torch.arange(LENGTH).double(), inverse.double())
    angles = angles if kind is GptOssAttention else angles.repeat(1, 2)
    tables = (angles.cos() * factor).unsqueeze(0), (angles.sin() * factor).unsqueeze(0)
    inputs = [torch.randn(2, LENGTH, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))] * 2
    x, y = (each.clone().requires_grad_() for each in inputs)
    mask = torch.full((LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1).expand(2, 1, -1, -1)
    actual, expected = attention(x, make_context(model)), other(y, position_embeddings=tables, attention_mask=mask)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn_like(actual)
    (actual * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-5)
    gradients = projections(attention, "gradient")
    for path, parameter in other.named_parameters():
        torch.testing.assert_close(gradients[path].double(), parameter.grad, rtol=1e-4, atol=1e-4, msg=path)


def drawn_scaling(draw: random.Random, kind: str, pairs: int) -> tuple[RopeScaling, dict[str, Any]]:
    """A random scaling, and transformers' rope_parameters of it."""
    length, factor = draw.choice([64, 2048, 8192]), draw.choice([1.0, 2.0, 3.7, 32.0])
    fields: dict[str, Any] = {"original_length": length}
    if kind == "longrope":
        fields |= {f"{name}_factor": [draw.uniform(1, 60) for _ in range(pairs)] for name in ("short", "long")}
    choices = {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.3}
    for name, value in {"attention_factor": 1.5, **(choices if kind == "yarn" else {})}.items():
        if kind in ("yarn", "longrope") and draw.random() < 0.5:
            fields[name] = value
    theirs = {name: value for name, value in fields.items() if name != "original_length"}
    if kind in ("yarn", "longrope", "llama3"):
        theirs["original_max_position_embeddings"] = length
    if kind == "llama3":
        theirs |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return RopeScaling(kind=kind, factor=factor, **fields), {"rope_type": kind, "factor": factor, **theirs}  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["linear", "llama3", "dynamic", "yarn", "longrope"])
def test_stretched_frequencies_are_those_of_transformers(kind: str) -> None:
    draw = random.Random(kind)
    for _ in range(40):
        head, fraction, theta = draw.choice([16, 64, 128]), draw.choice([1.0, 0.5, 0.25]), draw.choice([500.0, 1e6])
        channels = int(head * fraction)
        scaling, parameters = drawn_scaling(draw, kind, channels // 2)
        config = transformers.LlamaConfig(
            hidden_size=4 * head,
            num_attention_heads=4,
            head_dim=head,
            max_position_embeddings=scaling.original_length,
            rope_parameters={**parameters, "rope_theta": theta, "partial_rotary_factor": fraction},
        )
        assert not scaling.problems(theta, channels)
        for num_tokens in (scaling.original_length, scaling.original_length + 1, 3 * scaling.original_length):
            expected, factor = ROPE_INIT_FUNCTIONS[kind](config, seq_len=num_tokens)
            actual = inverse_frequencies(channels, theta, scaling, num_tokens)
            torch.testing.assert_close(actual, expected.double(), rtol=2e-6, atol=0.0)
            assert attention_factor(scaling) == pytest.approx(factor, rel=1e-12)
