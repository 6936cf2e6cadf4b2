"""Caches of generation: which tokens they hold, the logits that they give, and how many bytes they take."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megapipe.config.model import Reach
from megapipe.config.rope import RopeScaling
from megapipe.models.gpt_decoding import DecodingContext, cache_slots, decoding_layer
from tests.layers.bound import LATENT, LATENTS, LLAMA, ROTATED, bind_model, make_context, run, small_model

LENGTH = 12
BIASES = {**LLAMA, "bias": "attention"}
NORMS = {**BIASES, "qk_norm": True, "qk_norm_over": "projection"}
YARN = RopeScaling(kind="yarn", factor=4.0, original_length=6, mscale=0.7, mscale_all_dim=1.2, truncate=False)
DECODED: dict[str, dict[str, Any]] = {
    "OLMo 2's norms": NORMS,
    "YaRN": {**NORMS, "rope_scaling": YARN},
    "Gemma 2's scores": {**BIASES, "attention_scale": 5**-0.5, "attention_softcap": 0.7},
    "gpt-oss's sinks": {**BIASES, "attention_sinks": True},
    "StableLM's rotation": {**LLAMA, "rotary_fraction": 0.5, "bias": "qkv"},
    "Gemma 2": {
        **LLAMA,
        "activation": "geglu_tanh",
        "normalization": "rms_norm_unit_offset",
        "norm_position": "sandwich",
        "embedding_scale": 5.7,
        "logit_softcap": 2.0,
    },
    "OLMo 2": {**LLAMA, "norm_position": "output"},
    "BLOOM": {"norm_position": "stream", "embedding_norm": True},
    "GPT-NeoX": {"parallel_residual": True, "activation": "relu_squared"},
    "Granite": {**LLAMA, "residual_scale": 0.6, "logit_scale": 0.3},
    "latents": {**LATENTS, "query_latent_size": 20, "value_head_size": 6},
    "latents in a window": {**LATENTS, "value_head_size": 12, "attention_softcap": 0.7, "sliding_window": 5},
    "latents in chunks": {**LATENTS, "attention_chunk_size": 3},
    "window": {**LLAMA, "sliding_window": 3},
    "window, ALiBi": {**LLAMA, "sliding_window": 3, "positions": "alibi"},
    "window, softcap": {**LLAMA, "sliding_window": 3, "attention_softcap": 0.7},
    "window, sinks": {**LLAMA, "sliding_window": 3, "attention_sinks": True},
    "chunks": {**LLAMA, "attention_chunk_size": 4},
    "chunks, sinks": {**LLAMA, "attention_chunk_size": 4, "attention_sinks": True},
    "chunks, ALiBi": {**LLAMA, "attention_chunk_size": 6, "positions": "alibi"},
}
"""Name -> fields of a model, whose caches differ."""


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    reach=st.builds(Reach, st.none()) | st.builds(Reach, st.integers(1, 12), st.booleans()),
    width=st.integers(1, 9),
    new=st.integers(0, 20),
)
def test_new_tokens_see_exactly_their_reach(lengths: list[int], reach: Reach, width: int, new: int) -> None:
    """Texts of unequal length in chunks, then token by token; a token's value is its position."""
    capacity = -(-max(lengths) // width) * width + new
    slots = cache_slots([reach], capacity, width)
    cache = torch.full((len(lengths), 1, slots[reach], 1), -1)
    ends = torch.tensor(lengths) - 1
    steps = [
        (torch.arange(start, start + width).expand(len(lengths), -1), ends - start)
        for start in range(0, max(lengths), width)
    ]
    steps += [((ends + 1 + number).unsqueeze(1), torch.zeros_like(ends)) for number in range(new)]
    for positions, last in steps:
        length = int(positions.max()) + 1
        context = DecodingContext.of(slice(None), positions, positions, last, length=length, slots=slots)
        context.store(reach, cache, positions[:, :, None, None])
        for row, (places, visible) in enumerate(zip(positions, context.held[reach].visible, strict=True)):
            for place, seen in list(zip(places.tolist(), visible, strict=True))[: max(0, int(last[row]) + 1)]:
                most = capacity if reach.tokens is None else reach.tokens
                first = place // most * most if reach.in_chunks else max(0, place - most + 1)
                assert sorted(cache[row, 0, : seen.shape[0], 0][seen].tolist()) == list(range(first, place + 1))


@pytest.mark.parametrize("fields", DECODED.values(), ids=DECODED)
def test_caches_give_the_logits_of_training(fields: dict[str, Any]) -> None:
    """Two chunks of a prompt, then token by token."""
    model = small_model(**fields)
    assert not model.problems()
    layers, context = bind_model(model), make_context(model)
    slots = cache_slots([model.attention_reach], LENGTH, 4)
    with torch.no_grad():
        expected = run(layers, replace(context, labels=None))
        decoding = [decoding_layer(layer.module, rows=2, capacity=LENGTH, slots=slots) for layer in layers]
        for first, end in ((0, 4), (4, 8), *((place, place + 1) for place in range(8, LENGTH))):
            tokens, positions = context.tokens[:, first:end], torch.arange(first, end).expand(2, -1)
            last = torch.full((2,), end - first - 1)
            step = DecodingContext.of(slice(0, 2), tokens, positions, last, length=end, slots=slots)
            hidden: tuple[Tensor, ...] = ()
            for layer in decoding:
                hidden = layer(*hidden, context=step)
            torch.testing.assert_close(hidden[0], expected[:, end - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("window", "cached"), [(None, 12), (3, 3 + 4 - 1), (10, 12)])
def test_a_cache_has_the_bytes_of_its_window(window: int | None, cached: int) -> None:
    """Rows x tokens x keys and values x float32, or latents."""
    for fields, channels in ((LLAMA, 2 * 2 * 8), (LATENTS, LATENT + ROTATED)):
        model = small_model(**fields, sliding_window=window)
        slots = cache_slots([Reach(window)], 12, 4)
        block: Any = decoding_layer(bind_model(model)[1].module, rows=3, capacity=12, slots=slots)
        kept = [each for each in vars(block._attend).values() if isinstance(each, Tensor)]
        assert sum(each.nbytes for each in kept) == 3 * cached * channels * 4
