"""Experts compared with every expert run on every token, on one rank and on several, and with their split backward."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from megapipe.config.model import ModelConfig
from megapipe.layers.feed_forward import Experts, assign, assign_evenly, pick_rows, sum_rows
from megapipe.layers.split import SplitTape
from megapipe.parallel.groups import Group
from megapipe.parallel.unit_state import free
from megapipe.spec.layers import model_layers
from tests.layers.bound import DROPOUT, GPT2, LLAMA, BoundLayer, bind, make_context, small_model
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


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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
    weights = {name.removeprefix("blocks.0.mlp."): value for name, value in block.parameters().items()}
    weights = {name: value for name, value in weights.items() if not name.startswith("blocks")}
    if "router.bias" in weights:
        weights["router.bias"][-1] += pull
        weights["router.bias"][0] -= pull
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    x, x_plain = (drawn(1, tokens, 32).requires_grad_() for _ in range(2))
    dy = drawn(1, tokens, 32, seed=2)
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
    x = drawn(2, 12, 32).bfloat16()
    shares, chosen = experts.router(x, None)
    shares.sum().backward()
    counts = [int((chosen == expert).sum()) for expert in range(4)]
    assert sum(counts) == 2 * 12 * 2
    actual = block.gradients()["blocks.0.mlp.router.bias"].tolist()
    assert actual == [4 * count - sum(counts) for count in counts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parts", [(), ("attention", "mlp", "norms")], ids=["kept", "again"])
@pytest.mark.parametrize("shape", ROUTED)
def test_split_backward_has_the_bits_of_the_fused(shape: str, parts: tuple[Any, ...], dtype: torch.dtype) -> None:
    """Recomputed tensors too, and the weight half after its weights were released."""
    model = small_model(**ROUTED[shape], **EXPERTS)
    block, context = block_of(model, dtype), make_context(model)
    x, dy = drawn(2, 12, 32).to(dtype).requires_grad_(), drawn(2, 12, 32, seed=2).to(dtype)
    block.module(x, context=context)[0].backward(dy)
    expected, expected_x = block.state.gradients[0].clone(), x.grad
    block.state.zero_gradients()
    block.module.recompute(parts)
    context.tape = SplitTape()
    (output,) = block.module(x, context=context)
    (dx,) = context.tape.backward_input([output], [dy], [x])
    assert dx is not None
    assert expected_x is not None
    assert torch.equal(dx, expected_x)
    assert not block.state.gradients[0].any(), "the input half touched a parameter's gradient"
    free(block.state.weights[0])
    context.tape.backward_weight()
    assert torch.equal(block.state.gradients[0], expected)


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
    x, dy = drawn(2, 12, 32), drawn(2, 12, 32, seed=2)
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


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 6), st.integers(0, 2**32))
def test_rows_are_tokens_of_experts_and_sum_back(number: int, choices: int, tokens: int, seed: int) -> None:
    """Against loops over tokens, choices and experts; picking and summing are each other's transpose."""
    generator = torch.Generator().manual_seed(seed)
    choices = min(choices, number)
    chosen = torch.stack([torch.randperm(number, generator=generator)[:choices] for _ in range(tokens)])
    first = int(torch.randint(number, (1,), generator=generator))
    mine = assign(chosen, first, number - first)
    expected = [
        (token, choice)
        for expert in range(first, number)
        for token in range(tokens)
        for choice in range(choices)
        if chosen[token, choice] == expert
    ]
    assert mine.pairs.tolist() == [token * choices + choice for token, choice in expected]
    assert mine.counts == tuple(int((chosen == expert).sum()) for expert in range(first, number))
    x = torch.arange(tokens * 3, dtype=torch.float64).view(tokens, 3)
    rows = pick_rows(x, mine)
    assert rows.tolist() == [x[token].tolist() for token, _ in expected]
    summed = torch.zeros_like(x)
    for row, (token, _) in zip(rows, expected, strict=True):
        summed[token] += row
    assert torch.equal(sum_rows(rows, mine), summed)
    x, rows = x.requires_grad_(), rows.detach().requires_grad_()
    weights = torch.rand(rows.shape, generator=generator, dtype=torch.float64)
    (pick_rows(x, mine) * weights).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, sum_rows(weights, mine))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9))
def test_even_shares_are_all_choices_together(number: int, ranks: int, choices: int, tokens: int) -> None:
    chosen = torch.empty(tokens, choices, dtype=torch.int64, device="meta")
    mine = assign_evenly(chosen, number, number * ranks)
    assert len(mine.pairs) == sum(mine.counts)
    assert len(mine.rows) == tokens * choices
    assert all(abs(count - tokens * choices / (number * ranks)) <= 1 for count in mine.counts)
    if ranks == 1:
        assert sum(mine.counts) == tokens * choices
