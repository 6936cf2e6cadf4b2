"""Routers and shared experts next to those of transformers, and the choice of experts next to plain Python."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tests.layers.bound import LLAMA, small_model
from tests.layers.test_experts import block_of, drawn, experts_of

OURS: dict[str, Any] = {**LLAMA, "num_experts": 8, "experts_per_token": 3, "ffn_hidden_size": 24}
THEIRS: dict[str, Any] = {
    "hidden_size": 32,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 3,
    "experts_implementation": "eager",
}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
GROUPED = {"router_groups": 4, "router_groups_chosen": 2, "router_scale": 2.5}
QWEN = {"num_experts": 8}
DEEPSEEK = {"n_routed_experts": 8, "n_shared_experts": 2, **GROUPS}
SHARED = {"shared_expert_size": 48}
KINDS: dict[str, tuple[Any, Any, Mapping[str, Any], Mapping[str, Any]]] = {
    "qwen2_moe": (
        Qwen2MoeSparseMoeBlock,
        Qwen2MoeConfig,
        {**QWEN, "shared_expert_intermediate_size": 48, "norm_topk_prob": False},
        {**SHARED, "shared_expert_gate": True, "normalize_expert_shares": False},
    ),
    "qwen3_moe": (Qwen3MoeSparseMoeBlock, Qwen3MoeConfig, {**QWEN, "norm_topk_prob": True}, {}),
    "deepseek_v2": (
        DeepseekV2Moe,
        DeepseekV2Config,
        {**DEEPSEEK, "topk_method": "group_limited_greedy"},
        {**SHARED, **GROUPED, "normalize_expert_shares": False},
    ),
    "deepseek_v3": (
        DeepseekV3MoE,
        DeepseekV3Config,
        DEEPSEEK,
        {**SHARED, **GROUPED, "router_scores": "sigmoid", "expert_balance_rate": 0.001},
    ),
}
"""Class and configuration of transformers, and the fields of both sides."""
NAMES = {
    "router.weight": "gate.weight",
    "router.bias": "gate.e_score_correction_bias",
    "up.weight": "experts.gate_up_proj",
    "down.weight": "experts.down_proj",
    "shared.down.weight": "shared_expert{s}.down_proj.weight",
    "shared.gate.weight": "shared_expert_gate.weight",
}


def tensors_of(module: nn.Module, name: str) -> list[Tensor]:
    """Their tensors whose rows, one after another, are one of ours."""
    s = "s" if hasattr(module, "shared_experts") else ""
    if name == "shared.up.weight":
        theirs = [f"shared_expert{s}.{part}.weight" for part in ("gate_proj", "up_proj")]
    else:
        theirs = [NAMES[name].format(s=s)]
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return [tensors[each] for each in theirs]


@pytest.mark.parametrize("name", KINDS)
def test_outputs_and_gradients_are_those_of_transformers(name: str) -> None:
    """Theirs computes scores in fp32, whatever the weights are in."""
    kind, config, their_fields, fields = KINDS[name]
    theirs = kind(config(**THEIRS, **their_fields)).double()
    model = small_model(**{**OURS, "expert_balance_rate": 0.0, **fields})
    block = block_of(model)
    prefix = "blocks.0.mlp."
    ours = {path.removeprefix(prefix): value for path, value in block.parameters().items() if path.startswith(prefix)}
    for path, value in ours.items():
        parts = tensors_of(theirs, path)
        for part, rows in zip(parts, value.reshape(len(parts), *parts[0].shape), strict=True):
            part.data.copy_(rows)
    x, x_theirs = (drawn(2, 25, 32).requires_grad_() for _ in range(2))
    dy = drawn(2, 25, 32, seed=2)
    y, y_theirs = experts_of(block)(x, None), theirs(x_theirs)
    y.backward(dy)
    y_theirs.backward(dy)

    def check(actual: Tensor, expected: Tensor) -> None:
        expected = expected.reshape(actual.shape)
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=1e-6 * max(1.0, float(expected.detach().abs().max()))
        )

    check(y, y_theirs)
    assert x.grad is not None
    assert x_theirs.grad is not None
    check(x.grad, x_theirs.grad)
    for path in ours.keys() - {"router.bias"}:
        gradients = [part.grad for part in tensors_of(theirs, path)]
        check(block.gradients()[prefix + path], torch.stack([each for each in gradients if each is not None]))


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(2, 3),
    groups=st.integers(1, 4),
    chosen=st.integers(1, 4),
    choices=st.integers(1, 12),
    scores=st.sampled_from(["softmax", "sigmoid"]),
    levels=st.sampled_from([2, 1000]),
    seed=st.integers(0, 2**32),
)
def test_choices_are_those_of_plain_python(
    size: int, groups: int, chosen: int, choices: int, scores: Any, levels: int, seed: int
) -> None:
    """levels: numbers of different scores; few of them make ties, which the lowest numbers win."""
    chosen = min(chosen, groups)
    choices = min(choices, chosen * size)
    model = small_model(
        **LLAMA,
        num_experts=size * groups,
        experts_per_token=choices,
        ffn_hidden_size=8,
        router_scores=scores,
        router_groups=groups,
        router_groups_chosen=chosen,
        normalize_expert_shares=False,
    )
    assert model.problems() == []
    router = experts_of(block_of(model)).router
    generator = torch.Generator().manual_seed(seed)
    drawn_scores = torch.randint(levels, (1, 5, size * groups), generator=generator).double() / levels
    if router.bias is not None:
        router.bias.data.copy_(torch.randint(levels, (size * groups,), generator=generator) / levels)
    values = drawn_scores.sigmoid() if scores == "sigmoid" else drawn_scores.softmax(-1)
    values = values if router.bias is None else values + router.bias.detach()
    actual = router._choices(drawn_scores)[0]
    for token, row in zip(actual.tolist(), values[0].tolist(), strict=True):
        best = 2 if scores == "sigmoid" else 1

        def goodness(group: int, row: list[float] = row, best: int = best) -> float:
            return sum(sorted(row[group * size : (group + 1) * size], reverse=True)[:best])

        allowed = sorted(range(groups), key=lambda group: (-goodness(group), group))[:chosen]
        experts = [expert for expert in range(size * groups) if expert // size in allowed]
        assert token == sorted(experts, key=lambda expert: (-row[expert], expert))[:choices]


def test_a_trained_router_bias_is_that_of_gpt_oss() -> None:
    theirs = GptOssTopKRouter(GptOssConfig(hidden_size=32, num_local_experts=8, num_experts_per_tok=3)).double()
    block = block_of(small_model(**OURS, router_bias=True, expert_balance_rate=0.0))
    router = experts_of(block).router
    assert router.score_bias is not None
    theirs.weight.data.copy_(router.weight)
    theirs.bias.data.copy_(router.score_bias)
    x, dy = drawn(1, 25, 32), drawn(1, 25, 3, seed=2)
    shares, experts = router(x, None)
    _, expected, chosen = theirs(x[0])
    assert torch.equal(experts[0], chosen)
    torch.testing.assert_close(shares[0], expected)
    shares.backward(dy)
    expected.backward(dy[0])
    torch.testing.assert_close(block.gradients()["blocks.0.mlp.router.weight"], theirs.weight.grad)
    torch.testing.assert_close(block.gradients()["blocks.0.mlp.router.score_bias"], theirs.bias.grad)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"router_groups": 3}, "model.router_groups 3 does not divide model.num_experts 8"),
        (
            {"router_groups": 8, "router_scores": "sigmoid"},
            "groups of at least 2; pick a divisor of 8 that is at most 4",
        ),
        ({"router_groups_chosen": 2}, "it must be at most model.router_groups 1"),
        ({"router_groups": 4}, "of 2 experts each, must have model.experts_per_token 3"),
        ({"router_scores": "sigmoid", "expert_bias": "scores"}, "set model.expert_bias to 'shares'"),
        ({"shared_expert_gate": True}, "set model.shared_expert_size"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    (problem,) = small_model(**{**OURS, **fields}).problems()
    assert message in problem
