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
from tests.layers.bound import BoundLayer, all_gradients, bind_weights
from tests.models.hugging_face import ENCODERS, SIZES, UNDROPPED, canonical, gradients_of, opened
from tests.models.hugging_face import case_of as encoder_of

MODEL = BertModelConfig(vocabulary_size=97, num_layers=2, hidden_size=64, num_heads=4, max_positions=64)
BATCH, LENGTH, HIDDEN_TOKENS = 3, 40, 6
LENGTHS = (40, 23, 9)
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
        **{**SIZES, **UNDROPPED, **narrow, "intermediate_size": 256, "pad_token_id": 0},
        hidden_act="gelu" if activation == "gelu" else "gelu_new",
        attn_implementation="eager",
    )
    theirs = getattr(transformers, family + ("ForPreTraining" if sentence_head else "ForMaskedLM"))(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in theirs.named_parameters():
        parameter.data.normal_(0.0, 0.2, generator=generator)
        if name.endswith(("LayerNorm.weight", "ln.weight", "layer_norm.weight")):
            parameter.data.add_(1.0)
    forms = {"pre": {"norm_position": "pre"}, "shared": {"shared_blocks": True, "embedding_size": 24}}
    model = replace(MODEL, sentence_head=sentence_head, activation=activation, **forms.get(form, {}))  # type: ignore[arg-type]
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
    return bind_weights(model, weights, dtype=dtype)


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


def compare(theirs: torch.nn.Module, layers: list[BoundLayer], model: BertModelConfig, tolerance: float) -> None:
    """Logits, losses and gradients; outputs at padded positions are undefined."""
    context = make_context(model)
    logits, *pairs = their_logits(theirs, context)
    real = torch.arange(LENGTH) < context.lengths[:, None]
    with torch.no_grad():
        outputs = run(layers, replace(context, labels=None))
    for ours, expected, rows in zip(outputs, (logits, *pairs), (real, slice(None))[: 1 + len(pairs)], strict=True):
        assert 0.5 < expected[rows].std() < 50.0
        assert (ours - expected)[rows].abs().max() <= tolerance * expected[rows].abs().max()
    rows = logits.gather(1, context.positions.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))
    tokens = functional.cross_entropy(rows.flatten(0, 1), context.labels.flatten(), reduction="none")
    terms = [(tokens * context.loss_mask.flatten()).sum()]
    for pair in pairs:
        sentences = functional.cross_entropy(pair, context.sentence_labels, reduction="none")
        terms.append((sentences * context.sentence_weights).sum())
    expected_losses = torch.stack(terms).squeeze()
    scale = torch.tensor([0.3, 2.0][: len(terms)], dtype=torch.float64).squeeze()
    (expected_losses * scale).sum().backward()
    (losses,) = run(layers, context)
    (losses * scale).sum().backward()
    assert torch.allclose(losses, expected_losses, rtol=tolerance, atol=0.0)
    wanted, gradients = gradients_of(theirs), all_gradients(layers)
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient.norm() > 0, name
        assert (gradients[name] - gradient).norm() <= tolerance * gradient.norm(), name


@pytest.mark.parametrize(
    ("path", "sentence_head", "activation"),
    [("sdpa", True, "gelu"), ("unfused", True, "gelu"), ("sdpa", False, "gelu_tanh")],
)
@pytest.mark.parametrize("form", FAMILIES)
def test_berts_agree_in_double(form: str, path: str, sentence_head: bool, activation: str) -> None:
    case = case_of(sentence_head, activation, form, torch.float64)
    model = replace(case.model, attention=path)
    compare(case.theirs, bound(model, case.weights, torch.float64), model, 1e-9)


SLOWER = [
    pytest.param(name, "unfused", marks=() if name == "modernbert" else pytest.mark.exhaustive) for name in ENCODERS
]


@pytest.mark.parametrize(("name", "path"), [*((name, "sdpa") for name in ENCODERS), *SLOWER])
def test_encoders_of_masked_tokens_agree_in_double(name: str, path: str) -> None:
    theirs = encoder_of(name).theirs.double()
    model, weights = opened(theirs)
    assert isinstance(model, BertModelConfig)
    layers = bound(replace(model, attention=path), weights, torch.float64)
    compare(theirs, layers, model, ROUNDED if model.positions == "rotary" else 1e-9)


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
