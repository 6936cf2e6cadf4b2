"""Attention in chunks against transformers' Llama with transformers' own mask of chunks, and what is refused."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.masking_utils import chunked_causal_mask_function

from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.layout.validation import context_problems
from tests.layers.bound import bind_weights, make_context, run, small_model
from tests.models.hugging_face import case_of, check_gradients, loss_of, opened

CHUNK, LENGTH = 5, 40


def visible_in_chunks(length: int) -> Tensor:
    """bool [1, 1, s, s]."""
    sees = chunked_causal_mask_function(CHUNK, torch.zeros(1, dtype=torch.int64))
    places = torch.arange(length)
    return sees(torch.tensor(0), torch.tensor(0), places[:, None], places)[None, None]


def added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask that is added to scores."""
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -1e9)


def in_chunks(theirs: nn.Module) -> None:
    """Let the first layer see chunks alone. A mask that the model gets is for the others."""

    def masked(_: nn.Module, inputs: tuple[Tensor, ...], words: dict[str, Any]) -> tuple[tuple[Tensor, ...], Any]:
        within = added(visible_in_chunks(inputs[0].shape[1]), inputs[0].dtype)
        return inputs, {**words, "attention_mask": within + words["attention_mask"]}

    theirs.model.layers[0].register_forward_pre_hook(masked, with_kwargs=True)  # type: ignore[union-attr, index]


def ours(theirs: nn.Module) -> tuple[ModelConfig, dict[str, Tensor]]:
    model, weights = opened(theirs)
    assert model.num_layers == 2
    chunked = {"chunked": {"attention_chunk_size": CHUNK}}
    return replace(model, layer_kinds=chunked, layer_pattern=("chunked", "base")), weights


@pytest.mark.parametrize(
    ("path", "documents"),
    [
        *(("sdpa", True), ("unfused", False)),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("sdpa", False), ("unfused", True))),
    ],
)
def test_loss_and_gradients_are_those_of_masked_chunks(path: Any, documents: bool) -> None:
    theirs = copy.deepcopy(case_of("llama").theirs).double()
    model, weights = ours(theirs)
    in_chunks(theirs)
    layers = bind_weights(replace(model, attention=path), weights, dtype=torch.float64)
    context = make_context(model, batch=3, length=LENGTH)
    known: dict[str, Tensor] = {}
    if documents:
        is_start = torch.rand(3, LENGTH, generator=torch.Generator().manual_seed(5)) < 0.15
        places = torch.arange(LENGTH)
        starts = torch.where(is_start, places, 0).cummax(dim=1).values
        context.document_starts = starts
        seen = (places <= places[:, None]) & (places >= starts[:, :, None])
        known = {"attention_mask": added(seen[:, None], torch.float64), "position_ids": places - starts}
    expected_loss = loss_of(theirs(context.tokens, **known).logits, context)
    expected_loss.backward()
    loss = run(layers, context)
    loss.backward()
    assert torch.allclose(loss, expected_loss, rtol=1e-5, atol=0.0)
    check_gradients(theirs, layers, 1e-5)
    whole = bind_weights(replace(model, layer_kinds={}, layer_pattern=()), weights, dtype=torch.float64)
    assert not torch.allclose(run(whole, context), loss, rtol=1e-3), "chunks should matter"


def test_what_cannot_cut_samples_into_chunks_is_refused() -> None:
    config = PretrainConfig(model=small_model(attention_chunk_size=CHUNK, max_positions=64))
    config.data.sequence_length, config.parallel.context = 20, 2
    assert context_problems(config) == [
        "model.attention_chunk_size is 5, which parallel.context_attention ring does not support; set "
        "parallel.context_attention to all_to_all"
    ]
    config.parallel.context_attention = "all_to_all"
    assert not context_problems(config)
    for length, refused in ((5, False), (15, False), (16, True), (4, False)):
        config.data.sequence_length = length
        problems = [each for each in config.problems() if "attention_chunk_size" in each]
        assert bool(problems) == refused, problems
