"""Attention over samples that several ranks share, against float64 attention over whole samples."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.kernels.ops import OPS
from megapipe.layers.attention import Attention, BidirectionalAttention
from megapipe.layers.context import BertContext, MicrobatchContext
from megapipe.layers.context_parallel import attend_in_pieces, share_samples
from megapipe.layers.linear import within
from megapipe.parallel.groups import SoloGroup
from megapipe.parallel.in_process import InProcessMesh
from megapipe.spec.layers import model_layers
from megapipe.spec.ops import ContextAttention
from megapipe.spec.token_order import Share, order_of
from tests.support.meshes import run_mesh

SEED = 11


@dataclass(frozen=True)
class Case:
    """One attention over `size` ranks. documents: random ones are separate. lengths: samples are padded, BERT."""

    kind: ContextAttention
    size: int
    chunk: int
    batch: int = 1
    kv_heads: int = 2
    heads_each: int = 2
    window: int | None = None
    documents: bool = False
    padded: bool = False
    dropout: float = 0.0
    path: str = "auto"
    sinks: bool = False
    alibi: bool = False
    dtype: torch.dtype = torch.float64

    @property
    def length(self) -> int:
        return 2 * self.size * self.chunk

    @property
    def order(self) -> str:
        return order_of(self.kind, causal=not self.padded)


WIDTH = 8


def attention_of(case: Case) -> Attention:
    kind, config = (BidirectionalAttention, BertModelConfig) if case.padded else (Attention, ModelConfig)
    heads = case.kv_heads * case.heads_each
    model = config(
        hidden_size=heads * WIDTH,
        num_heads=heads,
        num_kv_heads=case.kv_heads,
        sliding_window=case.window,
        attention_dropout=case.dropout,
        attention=case.path,  # type: ignore[arg-type]
        positions="alibi" if case.alibi else "none",
        attention_sinks=case.sinks,
    )
    shapes = {path: each.shape for path, each in model_layers(model)[1].parameters.items()}
    attention = kind(model, within(shapes, "attention"), SoloGroup("tensor"), OPS, site=1)
    if model.why_pieces is not None:
        attend_in_pieces(attention)
    if attention.sinks is not None:
        attention.sinks.weight = nn.Parameter(torch.linspace(-1, 2, heads, dtype=case.dtype).view(case.kv_heads, -1))
    return attention


def drawn(case: Case) -> tuple[list[Tensor], MicrobatchContext]:
    """Query, key, value and the gradient of the result, of whole samples, and what is known of these."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (case.batch, case.length, case.kv_heads)
    sizes = [(*shape, case.heads_each, WIDTH), (*shape, 1, WIDTH), (*shape, 1, WIDTH)]
    sizes.append((case.batch, case.length, case.kv_heads * case.heads_each, WIDTH))
    tensors = [torch.randn(each, generator=generator, dtype=torch.float64).to(case.dtype) for each in sizes]
    context: MicrobatchContext = MicrobatchContext()
    if case.padded:
        lengths = torch.randint(1, case.length + 1, (case.batch,), generator=generator)
        context = BertContext(lengths=lengths)
    if case.documents:
        is_start = torch.rand(case.batch, case.length, generator=generator) < 0.2
        is_start[:, 0] = True
        context.document_starts = torch.where(is_start, torch.arange(case.length), 0).cummax(dim=1).values
    context.seed, context.ordinals = 5, torch.arange(case.batch) + 3
    return tensors, context


def get_slopes(heads: int) -> list[float]:
    """The authors' function (github.com/ofirpress/attention_with_linear_biases), for any number of heads."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return get_slopes(closest) + get_slopes(2 * closest)[0::2][: heads - closest]


def visible(case: Case, context: MicrobatchContext) -> Tensor:
    """bool [b, s, s], written out."""
    places = torch.arange(case.length)
    seen = torch.ones(case.batch, case.length, case.length, dtype=torch.bool)
    if isinstance(context, BertContext) and context.lengths is not None:
        return seen & (places < context.lengths[:, None, None])
    distance = places[:, None] - places
    seen &= distance >= 0
    if case.window is not None:
        seen &= distance < case.window
    if context.document_starts is not None:
        seen &= places >= context.document_starts[:, :, None]
    return seen


def whole_attention(case: Case) -> list[Tensor]:
    """Result and gradients of query, key and value, in float64, by the definition."""
    tensors, context = drawn(case)
    query, key, value, gradient = (each.double() for each in tensors)
    leaves = [each.requires_grad_() for each in (query, key, value)]
    wide = [each.expand(-1, -1, -1, case.heads_each, -1).flatten(2, 3).transpose(1, 2) for each in leaves]
    scores = wide[0] @ wide[1].transpose(-1, -2) * WIDTH**-0.5
    if case.alibi:
        distance = (torch.arange(case.length)[:, None] - torch.arange(case.length)).abs()
        slopes = get_slopes(case.kv_heads * case.heads_each)
        scores = scores - distance * torch.tensor(slopes, dtype=torch.float64)[:, None, None]
    scores = scores.masked_fill(~visible(case, context)[:, None], -torch.inf)
    attention = attention_of(case)
    if attention.sinks is not None:
        leaves.append(attention.sinks.weight.detach().double().requires_grad_())
        scores = torch.cat([scores, leaves[-1].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : case.length]
    if case.dropout:
        weights = attention.dropout.drop_attention(weights, 0, context)
    mixed = (weights @ wide[2]).transpose(1, 2)
    return [mixed.detach(), *torch.autograd.grad(mixed, leaves, gradient)]


def shared_attention(mesh: InProcessMesh, case: Case) -> list[Tensor]:
    """The same on this rank, of the tokens in hand."""
    group = mesh.group("context")
    tensors, context = drawn(case)
    numbers = torch.from_numpy(Share(case.order, group.rank, case.size).numbers(case.length))  # type: ignore[arg-type]
    query, key, value, gradient = (each[:, numbers].contiguous() for each in tensors)
    starts = context.document_starts
    context = replace(context, token_numbers=numbers, whole_document_starts=starts)
    context.document_starts = None if starts is None else starts[:, numbers]
    attention = attention_of(case)
    share_samples(attention, group, case.kind)
    assert attention.sharing is not None
    leaves = [each.requires_grad_() for each in (query, key, value)]
    leaves += [] if attention.sinks is None else [attention.sinks.weight]
    mixed = attention.sharing.mix(*leaves[:3], context)
    mixed = mixed.reshape(gradient.shape)
    return [mixed.detach(), *torch.autograd.grad(mixed, leaves, gradient)]


def joined(case: Case, parts: list[list[Tensor]]) -> list[Tensor]:
    """Return tensors of whole samples from those of every rank."""
    numbers = [Share(case.order, rank, case.size).numbers(case.length) for rank in range(case.size)]  # type: ignore
    place = torch.cat([torch.from_numpy(each) for each in numbers]).argsort()
    whole = [torch.cat(tensors, dim=1)[:, place] for tensors in zip(*(part[:4] for part in parts), strict=True)]
    return [*whole, *(sum(tensors[1:], tensors[0]) for tensors in zip(*(part[4:] for part in parts), strict=True))]


def check(case: Case, backend: str = "threads") -> None:
    expected = whole_attention(case)
    actual = joined(case, run_mesh({"context": case.size}, shared_attention, case, backend=backend))  # type: ignore
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2}[case.dtype]
    for one, other in zip(actual, expected, strict=True):
        assert torch.isfinite(one).all()
        assert (one.double() - other).norm() <= tolerance * max(float(other.norm()), 1.0)


cases = st.builds(
    Case,
    kind=st.sampled_from(["ring", "all_to_all"]),
    size=st.sampled_from([2, 3, 4]),
    chunk=st.integers(1, 5),
    batch=st.integers(1, 2),
    kv_heads=st.sampled_from([1, 2, 4]),
    heads_each=st.sampled_from([1, 2, 3, 12]),
    window=st.one_of(st.none(), st.integers(1, 50)),
    documents=st.booleans(),
    path=st.sampled_from(["sdpa", "unfused"]),
    sinks=st.booleans(),
    alibi=st.booleans(),
).filter(lambda case: case.kind == "ring" or case.kv_heads * case.heads_each % case.size == 0)


@settings(max_examples=60, deadline=None)
@given(cases)
def test_causal_attention_is_that_of_whole_samples(case: Case) -> None:
    check(case)


@settings(max_examples=25, deadline=None)
@given(cases)
def test_padded_samples_see_both_ways(case: Case) -> None:
    check(replace(case, padded=True, documents=False, window=None))


@settings(max_examples=25, deadline=None)
@given(cases)
def test_dropout_of_weights_is_that_of_whole_samples(case: Case) -> None:
    check(replace(case, dropout=0.3, path="auto"))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(("ring", torch.bfloat16), ("all_to_all", torch.float32)),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (("ring", torch.float32), ("all_to_all", torch.bfloat16))
        ),
    ],
)
def test_processes_over_gloo_and_lower_precision(kind: ContextAttention, dtype: torch.dtype) -> None:
    check(Case(kind, 4, 8, batch=2, kv_heads=4, dtype=dtype, path="sdpa"), backend="processes")
