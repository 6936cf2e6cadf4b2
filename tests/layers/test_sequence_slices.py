"""Blocks that see samples slice by slice compute what they compute of whole samples, in float64."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config.model import ModelConfig
from megapipe.layers.context import MicrobatchContext
from megapipe.layers.sequence_slices import sliced
from megapipe.spec.layers import model_layers
from tests.layers.bound import bind
from tests.support.gpt_runs import GPT2_SHAPE, LLAMA_SHAPE

LENGTH, SAMPLES = 24, 2
MODELS: dict[str, ModelConfig] = {
    "grouped": LLAMA_SHAPE,
    "window": replace(LLAMA_SHAPE, sliding_window=5, qk_norm=True),
    "sinks": replace(LLAMA_SHAPE, attention_sinks=True, sliding_window=9),
    "capped": replace(LLAMA_SHAPE, attention_softcap=2.0),
    "alibi": replace(GPT2_SHAPE, positions="alibi"),
    "dropout": replace(GPT2_SHAPE, attention_dropout=0.3, hidden_dropout=0.3),
}


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=8, deadline=None)
@given(st.sets(st.integers(1, LENGTH - 1), max_size=4), st.booleans(), st.booleans())
def test_slices_have_the_results_and_gradients_of_whole_samples(
    name: str, cuts: set[int], documents: bool, again: bool
) -> None:
    """again: forwards run without a graph first, as those of recomputed blocks do."""
    model = replace(MODELS[name], max_positions=LENGTH, init_std=0.3, scale_residual_init=False)
    block, random = bind(model_layers(model)[1], model, dtype=torch.float64), torch.Generator().manual_seed(1)
    hidden, upstream = torch.randn(2, SAMPLES, LENGTH, model.hidden_size, dtype=torch.float64, generator=random)
    starts = torch.tensor([[0] * 7 + [7] * 17, [0] * 16 + [16] * 8]) if documents else None
    context = MicrobatchContext(ordinals=torch.arange(SAMPLES), seed=3, document_starts=starts)
    edges = [0, *sorted(cuts), LENGTH]
    ranges = [range(*pair) for pair in pairwise(edges)]
    actual: list[Any] = []
    for contexts in ([context], sliced(context, ranges)):
        places = ranges if len(contexts) == len(ranges) else [range(LENGTH)]
        parts = [hidden[:, each.start : each.stop].clone().requires_grad_() for each in places]
        if again and len(contexts) > 1:
            with torch.no_grad():
                outputs = [block.module(part, context=each)[0] for part, each in zip(parts, contexts, strict=True)]
        else:
            outputs = [block.module(part, context=each)[0] for part, each in zip(parts, contexts, strict=True)]
        for number in reversed(range(len(parts))):
            output = outputs[number]
            if not output.requires_grad:
                (output,) = block.module(parts[number], context=contexts[number])
            output.backward(upstream[:, places[number].start : places[number].stop])
        inputs = [part.grad for part in parts]
        actual.append((torch.cat(outputs, 1).detach(), torch.cat(inputs, 1), block.gradients()))
        block.state.zero_gradients()
    (whole, inside, own), (whole_again, inside_again, own_again) = actual
    torch.testing.assert_close(whole_again, whole, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(inside_again, inside, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(own_again, own, rtol=1e-10, atol=1e-10)
