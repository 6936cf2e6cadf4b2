"""Experts against every expert run on every token, on one rank and on several, and their choice against plain Python.

Families compare routers and shared experts with transformers."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from megapipe.config.model import ModelConfig
from megapipe.layers.feed_forward import Experts, assign_evenly
from megapipe.parallel.groups import Group
from megapipe.spec.layers import model_layers
from tests.layers.bound import DROPOUT, GPT2, LLAMA, BoundLayer, bind, check_halves, draw, make_context, small_model
from tests.support.meshes import run_threads

EXPERTS = {"num_experts": 4, "experts_per_token": 2, "ffn_hidden_size": 24}
SIGMOIDS = {"router_scores": "sigmoid", "router_groups": 2, "router_scale": 2.5}
ROUTED: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "qwen2_moe": {**LLAMA, "shared_expert_size": 40, "shared_expert_gate": True},
    "deepseek": {**GPT2, **SIGMOIDS, "shared_expert_size": 40, "router_bias": True},
}
SHAPES = {"gpt2": GPT2, "llama": LLAMA, "dropout": DROPOUT, "gelu": {"activation": "gelu", "bias": "none"}}


def block_of(model: ModelConfig, dtype: torch.dtype = torch.float64, group: Group | None = None) -> BoundLayer:
    """The first block, its router's bias drawn as other biases are."""
    return bind(model_layers(model)[1], model, group, dtype)


def experts_of(block: BoundLayer) -> Experts:
    experts = block.module.mlp
    assert isinstance(experts, Experts)
    return experts


def every_expert_on_every_token(weights: dict[str, Tensor], model: ModelConfig, x: Tensor) -> Tensor:
    """The definition: all experts' results, weighed by shares that are 0 for those not chosen."""
    scores = x @ weights["router.weight"].t()
    if "router.bias" not in weights:
        ranked = scores
    else:
        ranked = (scores if model.expert_bias == "scores" else scores.softmax(-1)) + weights["router.bias"]
    kth = ranked.sort(dim=-1, descending=True).values[..., model.experts_per_token - 1 :][..., :1]
    chosen = ranked >= kth
    if model.normalize_expert_shares:
        shares = scores.masked_fill(~chosen, float("-inf")).softmax(-1)
    else:
        shares = scores.softmax(-1) * chosen
    total = torch.zeros_like(x)
    for expert in range(weights["router.weight"].shape[0]):
        up, down = weights["up.weight"][expert], weights["down.weight"][expert]
        inner = functional.linear(x, up.flatten(0, -2))
        if "up.bias" in weights:
            inner = inner + weights["up.bias"][expert].flatten()
        if model.activation == "swiglu":
            gate, linear = inner.chunk(2, dim=-1)
            inner = functional.silu(gate) * linear
        else:
            inner = functional.gelu(inner, approximate="tanh" if model.activation == "gelu_tanh" else "none")
        result = functional.linear(inner, down)
        if "down.bias" in weights:
            result = result + weights["down.bias"][expert]
        total = total + shares[..., expert : expert + 1] * result
    return total


@settings(max_examples=40, deadline=None)
@given(
    number=st.integers(1, 6),
    choices=st.integers(1, 6),
    tokens=st.integers(1, 9),
    shape=st.sampled_from(sorted(SHAPES)),
    normalize=st.booleans(),
    pull=st.sampled_from([0.0, 50.0]),
    rule=st.sampled_from(["shares", "scores"]),
)
def test_any_shape_equals_every_expert_on_every_token(
    number: int, choices: int, tokens: int, shape: str, normalize: bool, pull: float, rule: Any
) -> None:
    """pull: the last expert's bias, so large that all tokens go there, and none by choice to the first."""
    choices = min(choices, number)
    model = small_model(
        **SHAPES[shape],
        num_experts=number,
        experts_per_token=choices,
        ffn_hidden_size=24,
        normalize_expert_shares=normalize,
        expert_bias=rule,
    )
    block = block_of(model)
    named = block.parameters().items()
    weights = {name.removeprefix("blocks.0.mlp."): value for name, value in named if ".mlp." in name}
    if "router.bias" in weights:
        weights["router.bias"][-1] += pull
        weights["router.bias"][0] -= pull
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    x, x_plain = (draw(1, tokens, 32).requires_grad_() for _ in range(2))
    dy = draw(1, tokens, 32, seed=2)
    y, expected = experts_of(block)(x, None), every_expert_on_every_token(leaves, model, x_plain)
    torch.testing.assert_close(y, expected)
    y.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(x.grad, x_plain.grad)
    for name, leaf in leaves.items():
        if name != "router.bias":
            expected_gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            torch.testing.assert_close(block.gradients()[f"blocks.0.mlp.{name}"], expected_gradient)


def test_biases_receive_the_load_that_they_balance() -> None:
    block = block_of(small_model(**LLAMA, **EXPERTS), torch.bfloat16)
    experts = experts_of(block)
    x = draw(2, 12, 32).bfloat16()
    shares, chosen = experts.router(x, None)
    shares.sum().backward()
    counts = [int((chosen == expert).sum()) for expert in range(4)]
    assert sum(counts) == 2 * 12 * 2
    actual = block.gradients()["blocks.0.mlp.router.bias"].tolist()
    assert actual == [4 * count - sum(counts) for count in counts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parts", [(), ("attention", "mlp", "norms")], ids=["kept", "again"])
@pytest.mark.parametrize("shape", ROUTED)
def test_split_backward_has_the_bits_of_the_fused(shape: str, parts: tuple[str, ...], dtype: torch.dtype) -> None:
    model = small_model(**ROUTED[shape], **EXPERTS)
    x, dy = (draw(2, 12, 32, seed=seed, dtype=dtype) for seed in (1, 2))
    check_halves([block_of(model, dtype)], make_context(model), [x], dy, parts)


def on_a_rank(mesh: Any, model: ModelConfig, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    block = block_of(model, group=mesh.group("tensor"))
    x = x.clone().requires_grad_()
    y = experts_of(block)(x, None)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad, block.gradients()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_ranks_that_share_the_experts_compute_what_one_does(shape: str, ranks: int) -> None:
    """Every rank has the same router's gradient, counted once, and those of its own experts."""
    model = small_model(**{**SHAPES[shape], "num_kv_heads": 4}, **EXPERTS)
    x, dy = draw(2, 12, 32), draw(2, 12, 32, seed=2)
    ((y, dx, gradients),) = run_threads({"tensor": 1}, on_a_rank, model, x, dy)
    results = run_threads({"tensor": ranks}, on_a_rank, model, x, dy)
    for y_rank, dx_rank, gradients_rank in results:
        torch.testing.assert_close(y_rank, y)
        torch.testing.assert_close(dx_rank, dx)
        for name, gradient in gradients_rank.items():
            if ".router." in name:
                assert torch.equal(gradient, results[0][2][name])
                torch.testing.assert_close(gradient, gradients[name])
    for name, gradient in gradients.items():
        if ".mlp.up." in name or ".mlp.down." in name:
            torch.testing.assert_close(torch.cat([each[name] for _, _, each in results]), gradient)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9))
def test_even_shares_are_all_choices_together(number: int, ranks: int, choices: int, tokens: int) -> None:
    chosen = torch.empty(tokens, choices, dtype=torch.int64, device="meta")
    mine = assign_evenly(chosen, number, number * ranks)
    assert len(mine.pairs) == sum(mine.counts)
    assert len(mine.rows) == tokens * choices
    assert all(abs(count - tokens * choices / (number * ranks)) <= 1 for count in mine.counts)
    if ranks == 1:
        assert sum(mine.counts) == tokens * choices


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
