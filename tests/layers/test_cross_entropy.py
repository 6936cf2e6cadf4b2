"""Chunked linear and cross entropy against torch in float64, and what it keeps."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megapipe.kernels.reference.cross_entropy import CHUNK_ROWS
from tests.layers.bound import LLAMA, bind_model, make_context, run, small_model


def head_and_input(dtype: torch.dtype, rows: int = 2 * CHUNK_ROWS + 30, **fields: object) -> tuple:
    """(head, context, input) over more rows than one chunk holds."""
    model = small_model(**{**LLAMA, **fields})
    head = bind_model(model, dtype=dtype)[-1]
    context = make_context(model, batch=2, length=rows // 2)
    x = torch.randn(2, rows // 2, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    return head, context, x


def reference(head, context, x: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[no-untyped-def]
    """(loss, input gradient, weight gradient) by torch in float64."""
    leaf = x.double().requires_grad_()
    weight = head.parameters()["head.output.weight"].double().requires_grad_()
    norm = head.parameters()["head.norm.weight"].double()
    normalised = torch.nn.functional.rms_norm(leaf, (32,), norm, eps=1e-5)
    losses = torch.nn.functional.cross_entropy(
        (normalised @ weight.t()).flatten(0, 1), context.labels.flatten(), reduction="none"
    )
    loss = (losses * (1.0 if context.loss_mask is None else context.loss_mask.flatten().double())).sum()
    (loss * scale).backward()
    return loss, leaf.grad, weight.grad  # type: ignore[return-value]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_against_double(dtype: torch.dtype, masked: bool) -> None:
    head, context, x = head_and_input(dtype)
    if not masked:
        context = replace(context, loss_mask=None)
    leaf = x.clone().requires_grad_()
    (loss,) = head.module(leaf, context=context)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    loss.backward(torch.tensor(1 / 300, dtype=loss.dtype))
    expected = reference(head, context, x, 1 / 300)
    tolerance = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 0.01}[dtype]
    for actual, exact in zip((loss, leaf.grad, head.gradients()["head.output.weight"]), expected, strict=True):
        assert (actual.double() - exact).norm() <= tolerance * exact.norm()


def test_labels_without_weight_may_be_anything() -> None:
    head, context, x = head_and_input(torch.float32)
    (expected,) = head.module(x, context=context)
    labels = context.labels.masked_fill(context.loss_mask == 0, -100)
    (actual,) = head.module(x, context=replace(context, labels=labels))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("label", [-100, 61])
def test_a_label_outside_of_the_vocabulary_is_refused(label: int) -> None:
    head, context, x = head_and_input(torch.float32)
    labels = context.labels.clone()
    labels[0, int(context.loss_mask[0].nonzero()[0])] = label
    with pytest.raises(ValueError, match=f"label {label} is outside of the vocabulary of 61"):
        head.module(x, context=replace(context, labels=labels))


def test_a_token_outside_of_the_vocabulary_is_refused() -> None:
    model = small_model()
    layers = bind_model(model)
    context = make_context(model)
    context.tokens[1, 2] = 61
    with pytest.raises(ValueError, match=r"to 61 do not fit a vocabulary of 61"):
        run(layers, context)


def test_nothing_is_kept_without_gradients() -> None:
    """Live bytes after a forward under no_grad: the loss alone."""
    head, context, x = head_and_input(torch.float32)
    with torch.no_grad():
        (loss,) = head.module(x, context=context)
    assert loss.grad_fn is None
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        head.module(x.clone().requires_grad_(), context=context)
    wide = [shape for shape in kept if shape[-1] == 61]
    assert wide == [torch.Size([x.shape[0] * x.shape[1], 61])], "one tensor as large as the logits is kept"


def test_half_precision_does_not_round_gradient_scales() -> None:
    """bf16 holds 1/256 exactly; 1/300 it would round by 0.2%, and with it every gradient."""

    def gradients(scale: float) -> list[Tensor]:
        head, context, x = head_and_input(torch.bfloat16)
        leaf = x.requires_grad_()
        (loss,) = head.module(leaf, context=replace(context, loss_mask=None))
        loss.backward(torch.tensor(scale))
        return [leaf.grad.double(), head.gradients()["head.output.weight"].double()]  # type: ignore[union-attr]

    for actual, exact in zip(gradients(1 / 300), gradients(1 / 256), strict=True):
        assert (actual * exact).sum() / exact.square().sum() == pytest.approx(256 / 300, rel=3e-4)
