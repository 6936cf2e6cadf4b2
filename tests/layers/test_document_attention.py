"""Documents that share a sample come out as if each had been alone."""

import itertools
from dataclasses import replace

import pytest
import torch

from megapipe.layers.context import MicrobatchContext
from megapipe.layers.split import SplitTape
from tests.layers.bound import GPT2, LLAMA, QWEN3, all_gradients, bind_model, make_context, run, small_model

SHAPES = {"gpt2": GPT2, "llama": LLAMA, "qwen3": QWEN3}
BOUNDS = [[0, 5, 6, 12], [0, 12]]
"""Documents of two samples of 12 tokens."""


def packed_context(context: MicrobatchContext) -> MicrobatchContext:
    starts = [[max(b for b in bounds if b <= token) for token in range(12)] for bounds in BOUNDS]
    return replace(context, document_starts=torch.tensor(starts))


def alone(context: MicrobatchContext, sample: int, begin: int, end: int) -> MicrobatchContext:
    def cut(tensor: torch.Tensor | None) -> torch.Tensor:
        assert tensor is not None
        return tensor[sample : sample + 1, begin:end].contiguous()

    return MicrobatchContext(cut(context.tokens), cut(context.labels), cut(context.loss_mask))


@pytest.mark.parametrize("path", ["sdpa", "unfused"])
@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradients_are_the_sum_of_the_documents(shape: str, path: str) -> None:
    model = small_model(**SHAPES[shape], attention=path)
    context = make_context(model)
    packed, apart = bind_model(model, dtype=torch.float64), bind_model(model, dtype=torch.float64)
    together = run(packed, packed_context(context))
    together.backward()
    total = torch.zeros((), dtype=torch.float64)
    for sample, bounds in enumerate(BOUNDS):
        for begin, end in itertools.pairwise(bounds):
            loss = run(apart, alone(context, sample, begin, end))
            loss.backward()
            total += loss.detach()
    assert together.item() == pytest.approx(total.item(), rel=1e-12)
    expected = all_gradients(apart)
    for name, gradient in all_gradients(packed).items():
        assert (gradient - expected[name]).norm() <= 1e-11 * expected[name].norm() + 1e-13, name
    assert run(packed, context).item() != pytest.approx(together.item(), rel=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_document_is_the_plain_sample(shape: str) -> None:
    model = small_model(**SHAPES[shape])
    context = make_context(model)
    layers = bind_model(model, dtype=torch.float64)
    one = replace(context, document_starts=torch.zeros(2, 12, dtype=torch.int64))
    assert run(layers, one).item() == pytest.approx(run(layers, context).item(), rel=1e-13)


def test_dropout_of_attention_goes_with_documents() -> None:
    model = small_model(**GPT2, attention_dropout=0.4)
    layers = bind_model(model, dtype=torch.float64)
    context = packed_context(make_context(model))
    dropped = run(layers, context)
    assert torch.equal(dropped, run(layers, context))
    assert dropped.item() != pytest.approx(run(layers, replace(context, training=False)).item(), rel=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_split_backward_finds_the_same_gradients(shape: str) -> None:
    layers = bind_model(small_model(**SHAPES[shape]))
    context = packed_context(make_context(small_model(**SHAPES[shape])))
    run(layers, context).backward()
    fused = [layer.state.gradients[0].clone() for layer in layers]
    for layer in layers:
        layer.state.zero_gradients()
    context.tape = SplitTape()
    loss = run(layers, context)
    context.tape.backward_input([loss], [torch.ones(())], [])
    context.tape.backward_weight()
    for layer, expected in zip(layers, fused, strict=True):
        assert torch.equal(layer.state.gradients[0], expected), layer.spec.name
