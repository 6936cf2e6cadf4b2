"""BERT against transformers' BertForPreTraining and MegatronBertForPreTraining: same weights, logits, gradients."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional

from megapipe.config.bert import BertModelConfig
from megapipe.layers.context import BertContext
from megapipe.models.bert import build_layer
from megapipe.parallel.groups import SoloGroup
from megapipe.parallel.unit_state import UnitState
from megapipe.spec.layers import model_layers
from tests.layers.bound import BoundLayer, all_gradients
from tests.models.hugging_face import ENCODERS, canonical, gradients_of, opened
from tests.models.hugging_face import case_of as encoder_of

MODEL = BertModelConfig(vocabulary_size=97, num_layers=2, hidden_size=64, num_heads=4, max_positions=64)
BATCH, LENGTH, HIDDEN_TOKENS = 3, 40, 6
LENGTHS = (40, 23, 9)
PATHS = ("sdpa", "unfused")
FAMILIES = {"post": "Bert", "pre": "MegatronBert", "shared": "Albert"}
"""Where norms are, or that blocks share weights -> prefix of transformers' classes."""
ROUNDED = 1e-5
"""Tolerance where transformers computes rotary angles in fp32."""


class Case(NamedTuple):
    model: BertModelConfig
    theirs: torch.nn.Module

    @property
    def family(self) -> str:
        """The model_type in transformers."""
        return str(self.theirs.config.model_type)

    @property
    def weights(self) -> dict[str, Tensor]:
        return canonical(self.theirs.state_dict(), self.model, self.family)


def case_of(
    sentence_head: bool = True,
    activation: str = "gelu",
    form: str = "post",
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Matrices with std 0.2, so that logits are of order 1 (at 0.02 nearly any model would agree); norms around 1."""
    family, narrow = FAMILIES[form], {"embedding_size": 24} if form == "shared" else {}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=97,
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=256,
        num_attention_heads=4,
        max_position_embeddings=64,
        hidden_act="gelu" if activation == "gelu" else "gelu_new",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
        **narrow,
    )
    theirs = getattr(transformers, family + ("ForPreTraining" if sentence_head else "ForMaskedLM"))(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in theirs.named_parameters():
        parameter.data.normal_(0.0, 0.2, generator=generator)
        if name.endswith(("LayerNorm.weight", "ln.weight", "layer_norm.weight")):
            parameter.data.add_(1.0)
    model = replace(MODEL, sentence_head=sentence_head, activation=activation)
    if form == "pre":
        model = replace(model, norm_position="pre")
    elif form == "shared":
        model = replace(model, shared_blocks=True, embedding_size=24)
    return Case(model, theirs.eval().to(dtype))


def make_context(model: BertModelConfig = MODEL) -> BertContext:
    """Padded samples of two parts with hidden tokens, the last of them without weight here and there."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor(LENGTHS)
    places = torch.arange(LENGTH)
    tokens = torch.randint(MODEL.vocabulary_size, (BATCH, LENGTH), generator=generator)
    padding = max(0, model.first_position - 1)
    if model.first_position:  # transformers numbers the tokens that are not padding
        tokens += tokens == padding
    positions = torch.stack([torch.randperm(length, generator=generator)[:HIDDEN_TOKENS] for length in LENGTHS])
    return BertContext(
        tokens=torch.where(places < lengths[:, None], tokens, padding),
        token_types=((places >= lengths[:, None] // 3) & (places < lengths[:, None])).long() * (model.token_types > 1),
        lengths=lengths,
        positions=positions,
        labels=torch.randint(MODEL.vocabulary_size, (BATCH, HIDDEN_TOKENS), generator=generator),
        loss_mask=(torch.arange(HIDDEN_TOKENS) < torch.tensor([[6], [4], [1]])).float(),
        sentence_labels=torch.tensor([1, 0, 1]),
        sentence_weights=torch.tensor([1.0, 1.0, 0.0]),
    )


def bound(model: BertModelConfig, weights: dict[str, Tensor], dtype: torch.dtype) -> list[BoundLayer]:
    layers = []
    for spec in model_layers(model):
        state = UnitState(spec.name, spec.parameters.values(), compute_dtype=dtype)
        module = build_layer(spec, model, SoloGroup("tensor"))
        state.bind(module, spec.parameters)
        layer = BoundLayer(spec, module, state)
        for name, parameter in layer.parameters().items():
            parameter.copy_(weights[name])
        layers.append(layer)
    assert {name for layer in layers for name in layer.parameters()} == set(weights)
    return layers


def run(layers: list[BoundLayer], context: BertContext) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, ...] = ()
    for layer in layers:
        outputs = layer.module(*outputs, context=context)
    return outputs


def their_logits(theirs: torch.nn.Module, context: BertContext) -> tuple[Tensor, ...]:
    visible = (torch.arange(LENGTH) < context.lengths[:, None]).long()
    types = {"token_type_ids": context.token_types} if "type_vocab_size" in theirs.config else {}
    output = theirs(input_ids=context.tokens, attention_mask=visible, **types)
    if "prediction_logits" in output:
        return (
            output.prediction_logits,
            output.sop_logits if "sop_logits" in output else output.seq_relationship_logits,
        )
    return (output.logits,)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", FAMILIES)
@pytest.mark.parametrize(("sentence_head", "activation"), [(True, "gelu"), (False, "gelu_tanh")])
def test_logits_agree(sentence_head: bool, activation: str, form: str, path: str) -> None:
    case = case_of(sentence_head, activation, form)
    model = replace(case.model, attention=path)
    layers = bound(model, case.weights, torch.float32)
    context = make_context()
    with torch.no_grad():
        expected = their_logits(case.theirs, context)
        actual = run(layers, replace(context, labels=None))
    assert len(actual) == 1 + sentence_head
    # Outputs at padded positions are undefined.
    real = torch.arange(LENGTH) < context.lengths[:, None]
    for ours, theirs, rows in zip(actual, expected, (real, slice(None)), strict=False):
        assert 0.5 < theirs[rows].std() < 50.0
        assert (ours - theirs)[rows].abs().max() <= 1e-5 * theirs[rows].abs().max()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", FAMILIES)
def test_losses_and_gradients_agree_in_double(form: str, path: str) -> None:
    case = case_of(form=form, dtype=torch.float64)
    model = replace(case.model, attention=path)
    layers = bound(model, case.weights, torch.float64)
    context = make_context()
    logits, pairs = their_logits(case.theirs, context)
    rows = logits.gather(1, context.positions.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))
    tokens = functional.cross_entropy(rows.flatten(0, 1), context.labels.flatten(), reduction="none")
    sentences = functional.cross_entropy(pairs, context.sentence_labels, reduction="none")
    expected = torch.stack(
        [(tokens * context.loss_mask.flatten()).sum(), (sentences * context.sentence_weights).sum()]
    )
    scale = torch.tensor([0.3, 2.0], dtype=torch.float64)
    (expected * scale).sum().backward()
    (losses,) = run(layers, context)
    (losses * scale).sum().backward()
    assert torch.allclose(losses, expected, rtol=1e-9, atol=0.0)
    gradients = {name: parameter.grad for name, parameter in case.theirs.named_parameters()}
    wanted, actual = canonical(gradients, model, case.family), all_gradients(layers)
    assert actual.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient.norm() > 0, name
        assert (actual[name] - gradient).norm() <= 1e-9 * gradient.norm(), name


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ENCODERS)
def test_masked_token_losses_and_gradients_agree_in_double(name: str, path: str) -> None:
    theirs = encoder_of(name).theirs.double()
    model, weights = opened(theirs)
    assert isinstance(model, BertModelConfig)
    layers = bound(replace(model, attention=path), weights, torch.float64)
    context = make_context(model)
    (logits,) = their_logits(theirs, context)
    real = torch.arange(LENGTH) < context.lengths[:, None]
    with torch.no_grad():
        (actual,) = run(layers, replace(context, labels=None))
    assert 0.5 < logits[real].std() < 50.0
    tolerance = ROUNDED if model.positions == "rotary" else 1e-9
    assert (actual - logits)[real].abs().max() <= tolerance * logits[real].abs().max()
    rows = logits.gather(1, context.positions.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))
    losses = functional.cross_entropy(rows.flatten(0, 1), context.labels.flatten(), reduction="none")
    (losses * context.loss_mask.flatten()).sum().backward()
    (loss,) = run(layers, context)
    loss.backward()
    actual, wanted = all_gradients(layers), gradients_of(theirs)
    assert actual.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient.norm() > 0, name
        assert (actual[name] - gradient).norm() <= tolerance * gradient.norm(), name


def test_evaluation_counts_correct_predictions() -> None:
    case = case_of()
    layers = bound(case.model, case.weights, torch.float32)
    context = make_context()
    with torch.no_grad():
        logits, pairs = their_logits(case.theirs, context)
        best = logits.argmax(-1).gather(1, context.positions)
        # Some labels are the model's own guesses, so that not all of them are wrong.
        labels = torch.where(torch.arange(HIDDEN_TOKENS) % 2 == 0, best, context.labels)
        context = replace(context, labels=labels, training=False)
        losses, correct = run(layers, context)
        (trained,) = run(layers, replace(context, training=True))
    expected = [
        ((best == labels) * context.loss_mask).sum(),
        ((pairs.argmax(-1) == context.sentence_labels) * context.sentence_weights).sum(),
    ]
    assert correct.tolist() == [float(count) for count in expected]
    assert 3 <= correct[0] < context.loss_mask.sum()
    assert torch.equal(losses, trained)


def test_padding_changes_nothing() -> None:
    case = case_of()
    layers = bound(case.model, case.weights, torch.float32)
    context = make_context()
    padding = torch.arange(LENGTH) >= context.lengths[:, None]
    other = replace(context, tokens=context.tokens.masked_fill(padding, 55))
    with torch.no_grad():
        assert torch.equal(run(layers, context)[0], run(layers, other)[0])
