"""The choice of experts next to plain Python. Families compare routers and shared experts with transformers."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layers.bound import LLAMA, small_model
from tests.layers.test_experts import block_of, experts_of


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
