"""Chunked linear and cross entropy, logits kept or recomputed: against torch in float64, and in memory."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megapipe.engine.stage import CompiledForward
from megapipe.kernels.ops import OPS
from megapipe.kernels.reference import cross_entropy as reference
from megapipe.kernels.reference.cross_entropy import CHUNK_ROWS
from megapipe.layers.cross_entropy import MaskedTokenHead, VocabParallelHead
from megapipe.layers.split import SplitError, SplitTape
from megapipe.parallel.groups import Group, SoloGroup
from megapipe.parallel.mesh import Mesh
from tests.layers.bound import GPT2, LLAMA, bind_model, draw, make_context, run, small_model
from tests.support.live_bytes import LiveBytes
from tests.support.meshes import run_threads

HEADS: dict[str, type[VocabParallelHead]] = {"gpt": VocabParallelHead, "bert": MaskedTokenHead}
HIDDEN, VOCABULARY, ROWS = 16, 61, 2 * CHUNK_ROWS + 30

SOLO = SoloGroup("tensor")
Results = dict[str, Tensor]


def parameters(kind: str, dtype: torch.dtype) -> dict[str, Tensor]:
    weight = {"weight": draw(VOCABULARY, HIDDEN, seed=1, dtype=dtype)}
    return weight if kind == "gpt" else {**weight, "bias": draw(VOCABULARY, seed=2, dtype=dtype)}


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [2, rows / 2, h], labels and uneven weights, some 0."""
    x = draw(2, ROWS // 2, HIDDEN, seed=3, dtype=dtype)
    labels = torch.randint(VOCABULARY, x.shape[:2], generator=torch.Generator().manual_seed(4))
    return x, labels, draw(*x.shape[:2], seed=5).clamp(min=0).float()


def bound_head(kind: str, dtype: torch.dtype, group: Group, recompute: bool, stored: int) -> VocabParallelHead:
    """The head of one of the ranks that share 61 tokens, `stored` rows each; padding is far off zero."""
    shares = {}
    for name, whole in parameters(kind, dtype).items():
        padded = torch.cat([whole, 100 + whole.new_zeros(stored * group.size - VOCABULARY, *whole.shape[1:])])
        shares[name] = padded[group.rank * stored : (group.rank + 1) * stored]
    head = HEADS[kind]({name: tuple(share.shape) for name, share in shares.items()}, VOCABULARY, group, OPS, recompute)
    for name, share in shares.items():
        setattr(head, name, nn.Parameter(share.clone()))
    return head


def trained(
    group: Group,
    kind: str,
    dtype: torch.dtype = torch.float64,
    recompute: bool = True,
    stored: int = VOCABULARY,
    masked: bool = True,
    scale: float = 1 / 300,
) -> Results:
    """Loss and gradients of one rank."""
    head = bound_head(kind, dtype, group, recompute, stored)
    x, labels, weights = batch(dtype)
    x.requires_grad_()
    loss = head.loss_sum(x, labels, weights if masked else None, None)
    loss.backward(torch.tensor(scale, dtype=loss.dtype))
    assert x.grad is not None
    results = {"loss": loss.detach(), "x": x.grad}
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None
        assert not parameter.grad[head.num_columns :].any(), "padding got a gradient"
        results[name] = parameter.grad[: head.num_columns]
    return results


def on_rank(mesh: Mesh, kind: str, stored: int) -> Results:
    return trained(mesh.group("tensor"), kind, stored=stored)


def exact(kind: str, dtype: torch.dtype, masked: bool) -> Results:
    """By torch in float64."""
    leaves = {name: whole.double().requires_grad_() for name, whole in parameters(kind, dtype).items()}
    x, labels, weights = batch(dtype)
    leaves["x"] = x.double().requires_grad_()
    logits = functional.linear(leaves["x"], leaves["weight"], leaves.get("bias")).flatten(0, 1)
    losses = functional.cross_entropy(logits, labels.flatten(), reduction="none")
    loss = (losses * weights.flatten() if masked else losses).sum()
    gradients = torch.autograd.grad(loss / 300, list(leaves.values()))
    return {"loss": loss.detach(), **dict(zip(leaves, gradients, strict=True))}


def check(actual: Results, expected: Results, tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        error = (actual[name].double() - wanted.double()).norm()
        assert error <= tolerance * wanted.double().norm(), f"{name}: {error / wanted.double().norm():.3g}"


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", HEADS)
def test_matches_double_precision(kind: str, dtype: torch.dtype, masked: bool, recompute: bool) -> None:
    actual = trained(SOLO, kind, dtype, recompute, masked=masked)
    assert actual["loss"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 0.01}[dtype]
    check(actual, exact(kind, dtype, masked), tolerance)


@pytest.mark.parametrize(("size", "stored"), [(2, 31), (4, 16), (4, 32)])
@pytest.mark.parametrize("kind", HEADS)
def test_ranks_that_share_the_vocabulary(kind: str, size: int, stored: int) -> None:
    """With 32 rows each, two of four ranks hold nothing but padding."""
    expected = trained(SOLO, kind)
    ranks = run_threads({"tensor": size}, on_rank, kind, stored)
    for results in ranks:
        for name in ("loss", "x"):
            assert torch.equal(results[name], ranks[0][name])
    joined = {name: torch.cat([results[name] for results in ranks]) for name in parameters(kind, torch.float64)}
    check({"loss": ranks[0]["loss"], "x": ranks[0]["x"], **joined}, expected, 1e-13)


@pytest.mark.parametrize("kind", HEADS)
def test_no_tensor_of_tokens_by_vocabulary_is_ever_alive(kind: str) -> None:
    """In bytes that are alive at once, forward and backward: the kept form is beyond them, this one far below."""
    rows, vocabulary = 12 * CHUNK_ROWS, 256
    peaks = {}
    for recompute in (False, True):
        shapes = {"weight": (vocabulary, 2), **({"bias": (vocabulary,)} if kind == "bert" else {})}
        head = HEADS[kind](shapes, vocabulary, SOLO, OPS, recompute)
        for name, shape in shapes.items():
            setattr(head, name, nn.Parameter(torch.zeros(shape)))
        x = torch.zeros(rows, 2, requires_grad=True)
        labels = torch.zeros(rows, dtype=torch.int64)
        with LiveBytes() as live:
            loss = head.loss_sum(x, labels, torch.ones(rows), None)
            forward = live.peak
            loss.backward()
        assert x.grad is not None
        peaks[recompute] = live.peak
        assert (forward > rows * vocabulary * 4) != recompute
    assert peaks[True] < 0.5 * rows * vocabulary * 4


@pytest.mark.parametrize("recompute", [False, True])
def test_labels_count_where_they_have_weight(recompute: bool) -> None:
    head = bound_head("bert", torch.float32, SOLO, recompute, VOCABULARY)
    x, labels, weights = batch(torch.float32)
    expected = head.loss_sum(x, labels, weights, None)
    assert torch.equal(head.loss_sum(x, labels.masked_fill(weights == 0, -100), weights, None), expected)
    for label in (-100, VOCABULARY):
        wrong = labels.masked_fill(weights == weights.max(), label)
        with pytest.raises(ValueError, match=f"label {label} is outside of the vocabulary of 61"):
            head.loss_sum(x, wrong, weights, None)


def test_a_token_outside_of_the_vocabulary_is_refused() -> None:
    model = small_model()
    context = make_context(model)
    assert context.tokens is not None
    context.tokens[1, 2] = VOCABULARY
    with pytest.raises(ValueError, match=r"to 61 do not fit a vocabulary of 61"):
        run(bind_model(model), context)


def test_one_tensor_as_large_as_the_logits_is_kept() -> None:
    head = bound_head("gpt", torch.float32, SOLO, False, VOCABULARY)
    x, labels, weights = batch(torch.float32)
    with torch.no_grad():
        assert head.loss_sum(x, labels, weights, None).grad_fn is None
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        head.loss_sum(x.requires_grad_(), labels, weights, None)
    assert [shape for shape in kept if shape[-1] == VOCABULARY] == [torch.Size([ROWS, VOCABULARY])]


def test_half_precision_does_not_round_gradient_scales() -> None:
    """bf16 holds 1/256 exactly; 1/300 it would round by 0.2%, and with it every gradient."""
    how = SOLO, "gpt", torch.bfloat16, False, VOCABULARY, False
    actual, exact_scale = (trained(*how, scale) for scale in (1 / 300, 1 / 256))
    for name in ("x", "weight"):
        ours, other = actual[name].double(), exact_scale[name].double()
        assert (ours * other).sum() / other.square().sum() == pytest.approx(256 / 300, rel=3e-4)


@pytest.mark.parametrize("kind", HEADS)
def test_halves_are_refused(kind: str) -> None:
    head = bound_head(kind, torch.float32, SOLO, True, VOCABULARY)
    with pytest.raises(SplitError, match=r"recompute\.logits false"):
        head.loss_sum(*batch(torch.float32), SplitTape())


@pytest.mark.parametrize("fields", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_compiled_heads_have_the_bits_of_eager_ones(fields: dict[str, object]) -> None:
    torch._dynamo.reset()
    model = small_model(**fields)
    head = bind_model(model, recompute_logits=True)[-1]
    context = make_context(model)
    compiled = partial(CompiledForward(backend="aot_eager", fullgraph=True), head.module)

    def trained_head(forward: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
        head.state.zero_gradients()
        x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
        (loss,) = forward((x,), context=context)
        loss.backward()
        assert x.grad is not None
        return [loss.detach(), x.grad, head.state.gradients[0].clone()]

    eager = trained_head(lambda inputs, context: head.module(*inputs, context=context))
    for ours, expected in zip(trained_head(compiled), eager, strict=True):
        assert torch.equal(ours, expected)


def test_a_part_of_minus_infinity_has_no_gradient() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 8, dtype=torch.float64)
    logits[0, :4] = logits[1, 4:] = -torch.inf
    targets = torch.tensor([6, 1, 2])
    whole = logits.clone().requires_grad_()
    torch.nn.functional.cross_entropy(whole, targets, reduction="sum").backward()
    parts, owned = logits.split(4, dim=1), (targets < 4, targets >= 4)
    softmax = [torch.empty_like(part) for part in parts]
    own = torch.stack(
        [
            reference.with_sums(*reference.cross_entropy_row_statistics(part, targets % 4, here, buffer))
            for part, here, buffer in zip(parts, owned, softmax, strict=True)
        ]
    )
    log_sum_exp, _ = reference.merged(own)
    for buffer, here, statistics in zip(softmax, owned, own, strict=True):
        reference.linear_cross_entropy_complete_gradient(buffer, targets % 4, here, 4, statistics, log_sum_exp)
    assert whole.grad is not None
    torch.testing.assert_close(torch.cat(softmax, dim=1), whole.grad)
