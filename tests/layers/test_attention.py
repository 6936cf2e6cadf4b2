"""Attention paths against each other and against brute force; invariance of dropout."""

from dataclasses import replace

import pytest
import torch

from megapipe.layers.attention import choose_path
from megapipe.layers.linear import RowParallelLinear
from megapipe.models import build_layer
from megapipe.parallel.groups import SoloGroup
from tests.layers.bound import SHAPES, bind, bind_model, draw, make_context, run, small_model


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
