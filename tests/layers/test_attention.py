"""Attention paths against each other; dropout; documents that share a sample come out as if each had been alone."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional
from torch.nn.attention import flex_attention

from megapipe.engine.stage import CompiledForward
from megapipe.layers import attention as blocks
from megapipe.layers.attention import block_lists, choose_path, document_blocks, visible_within_documents
from megapipe.layers.context import MicrobatchContext
from megapipe.layers.linear import RowParallelLinear
from megapipe.models import build_layer
from megapipe.parallel.groups import SoloGroup
from megapipe.spec.attention import why_a_mask
from tests.layers.bound import (
    GPT2,
    LLAMA,
    SHAPES,
    all_gradients,
    bind,
    bind_model,
    check_halves,
    draw,
    make_context,
    run,
    small_model,
)


@pytest.mark.parametrize("shape", SHAPES)
def test_paths_agree_in_double(shape: str) -> None:
    x = draw(2, 12, 32)
    results = []
    for path in ("sdpa", "unfused"):
        model = small_model(**SHAPES[shape], attention=path)
        block = bind_model(model, dtype=torch.float64)[1]
        leaf = x.clone().requires_grad_()
        (y,) = block.module(leaf, context=make_context(model))
        y.square().sum().backward()
        results.append((y.detach(), leaf.grad, block.state.gradients[0]))
    for fused, unfused in zip(*results, strict=True):
        assert (fused - unfused).norm() <= 1e-12 * fused.norm()


def test_path_is_chosen_by_dtype_and_length() -> None:
    assert choose_path("cpu", torch.float32, 64) == "sdpa"
    assert choose_path("cpu", torch.bfloat16, 64) == "unfused"
    assert choose_path("cpu", torch.bfloat16, 4096) == "sdpa"
    assert choose_path("cuda", torch.bfloat16, 64) == "sdpa"


def test_dropout_does_not_depend_on_the_micro_batch() -> None:
    """Samples drop the same channels in whatever company they come; another seed drops others."""
    model = small_model(embedding_dropout=0.2, attention_dropout=0.3, hidden_dropout=0.1)
    layers = bind_model(model, dtype=torch.float64)
    context = make_context(model, batch=3)
    whole = run(layers, context)
    parts = []
    for i in range(3):
        names = ("tokens", "labels", "loss_mask", "ordinals")
        own = {name: getattr(context, name)[i : i + 1] for name in names}
        parts.append(run(layers, replace(context, **own)))
    assert torch.allclose(whole, sum(parts), rtol=1e-12)
    assert not torch.allclose(whole, run(layers, replace(context, seed=context.seed + 1)), rtol=1e-6)
    still = run(layers, replace(context, training=False))
    assert torch.equal(still, run(layers, replace(context, training=False, ordinals=None)))
    assert not torch.allclose(whole, still, rtol=1e-6)


def test_layers_drop_different_channels() -> None:
    """The same block at another place in the model has other dropout sites."""
    model = small_model(hidden_dropout=0.5)
    first, second = bind_model(model)[1:3]
    moved = replace(first.spec, index=second.spec.index)
    twin = bind(moved, model)
    x = torch.randn(2, 12, 32)
    context = make_context(model)
    assert torch.equal(first.state.weights[0], twin.state.weights[0])
    assert not torch.equal(first.module(x, context=context)[0], twin.module(x, context=context)[0])


def test_dropout_without_ordinals_is_refused() -> None:
    model = small_model(hidden_dropout=0.5)
    with pytest.raises(ValueError, match="ordinals"):
        run(bind_model(model), replace(make_context(model), ordinals=None))


def test_a_declaration_that_differs_from_the_module_is_named() -> None:
    model = small_model()
    spec = bind_model(model)[1].spec
    extra = {**spec.parameters, "mlp.gate.weight": spec.parameters["mlp.up.weight"]}
    with pytest.raises(ValueError, match=r"blocks\.0.*differ in mlp\.gate\.weight"):
        build_layer(replace(spec, parameters=extra), model, SoloGroup("tensor"))


def test_weights_of_own_tokens_must_be_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(bias="all")
    spec = bind_model(model)[1].spec
    monkeypatch.setattr(RowParallelLinear, "partial", ())
    with pytest.raises(ValueError, match=r"own tokens alone.*'attention\.output\.bias', 'mlp\.down\.bias'"):
        build_layer(spec, model, SoloGroup("tensor"))


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


def test_dropout_of_attention_goes_with_documents() -> None:
    model = small_model(**GPT2, attention_dropout=0.4)
    layers = bind_model(model, dtype=torch.float64)
    context = packed_context(make_context(model))
    dropped = run(layers, context)
    assert torch.equal(dropped, run(layers, context))
    assert dropped.item() != pytest.approx(run(layers, replace(context, training=False)).item(), rel=1e-4)


starts_of_samples = st.integers(1, 30).flatmap(
    lambda length: st.lists(
        st.lists(st.booleans(), min_size=length, max_size=length).map(
            lambda is_start: [max([0, *(p for p in range(q + 1) if is_start[p])]) for q in range(length)]
        ),
        min_size=1,
        max_size=3,
    )
)


@settings(max_examples=40, deadline=None)
@given(starts=starts_of_samples, window=st.none() | st.integers(1, 45), block=st.sampled_from([2, 4, 7]))
def test_blocks_are_those_of_the_mask(starts: list[list[int]], window: int | None, block: int) -> None:
    """The oracle is torch's own reduction of the whole square to blocks."""
    document_starts = torch.tensor(starts)
    mask = visible_within_documents(document_starts, window)
    length = mask.shape[1]
    expected = flex_attention.create_block_mask(
        lambda b, h, q, k: mask[b, q, k], len(starts), None, length, length, device="cpu", BLOCK_SIZE=block
    )
    lists = block_lists(document_starts.numpy(), window, block)
    for num, which, expected_num, expected_which in (
        (lists.num_partial, lists.partial, expected.kv_num_blocks, expected.kv_indices),
        (lists.num_full, lists.full, expected.full_kv_num_blocks, expected.full_kv_indices),
    ):
        assert num.dtype == which.dtype == np.int32
        assert np.array_equal(num, expected_num)
        for place in np.ndindex(num.shape):
            assert which[place][: num[place]].tolist() == expected_which[place][: num[place]].tolist()
            assert sorted(which[place].tolist()) == list(range(which.shape[-1]))


@pytest.fixture
def differentiable_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch refuses gradients through flex_attention on a CPU, where its reference of the same arithmetic has them."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(blocks, "BLOCK", 4)
    yield
    torch._dynamo.reset()


def with_blocks(context: MicrobatchContext, window: int | None) -> MicrobatchContext:
    assert context.document_starts is not None
    tensors = list(map(torch.from_numpy, block_lists(context.document_starts.numpy(), window, blocks.BLOCK)))
    return replace(context, document_blocks={window: document_blocks(tensors, context.document_starts, window)})


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("path", ["sdpa", "unfused", "blocks"])
@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradients_are_the_sum_of_the_documents(shape: str, path: str, differentiable_on_cpu: None) -> None:
    model = small_model(**SHAPES[shape], attention="auto" if path == "blocks" else path)
    context = make_context(model)
    packed, apart = bind_model(model, dtype=torch.float64), bind_model(model, dtype=torch.float64)
    together_context = packed_context(context)
    if path == "blocks":
        together_context = with_blocks(together_context, model.sliding_window)
    together = run(packed, together_context)
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


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("shape", "blocked"), [*((shape, False) for shape in SHAPES), ("qwen3", True)])
def test_a_split_backward_finds_the_same_gradients(shape: str, blocked: bool, differentiable_on_cpu: None) -> None:
    model = small_model(**SHAPES[shape])
    layers, context = bind_model(model), packed_context(make_context(model))
    check_halves(layers, with_blocks(context, model.sliding_window) if blocked else context)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_compiled_blocks_find_the_same_loss(differentiable_on_cpu: None) -> None:
    model = small_model(**LLAMA)
    layers = bind_model(model)
    context = packed_context(make_context(model))
    expected = run(layers, context)
    forward = CompiledForward(backend="eager", fullgraph=True)
    hidden: tuple[torch.Tensor, ...] = ()
    for layer in layers:
        inner = with_blocks(context, None)
        hidden = (
            forward(layer.module, hidden, inner)
            if layer.spec.kind == "block"
            else layer.module(*hidden, context=inner)
        )
    assert hidden[0].item() == pytest.approx(expected.item(), rel=1e-5)


def test_other_documents_need_no_other_kernel(differentiable_on_cpu: None) -> None:
    """Every micro-batch has a rule of its own; the compiler has to see that only its tensors differ."""
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(flex_attention.flex_attention, backend=counter)
    generator = np.random.default_rng(0)
    query, key, value = (torch.randn(2, 4, 12, 16, requires_grad=True) for _ in range(3))
    for _ in range(10):
        places = np.where(generator.random((2, 12)) < 0.3, np.arange(12), 0)
        starts = torch.from_numpy(np.maximum.accumulate(places, axis=1))
        context = with_blocks(MicrobatchContext(document_starts=starts), None)
        actual = compiled(query, key, value, block_mask=context.document_blocks[None])
        mask = visible_within_documents(starts, None).unsqueeze(1)
        assert torch.allclose(actual, functional.scaled_dot_product_attention(query, key, value, mask), atol=1e-5)
    assert counter.frame_count == 1


def test_the_path_follows_from_device_and_model() -> None:
    wide = small_model(**GPT2, head_size=16)
    assert why_a_mask(wide, "cuda") is None
    assert "no backward on cpu" in str(why_a_mask(wide, "cpu"))
    assert "heads of 16 channels, and these have 8" in str(why_a_mask(small_model(**GPT2), "cuda"))
    assert "sdpa" in str(why_a_mask(small_model(**GPT2, attention="sdpa"), "cuda"))
    assert "attention_dropout" in str(why_a_mask(small_model(**GPT2, attention_dropout=0.1), "cuda"))
