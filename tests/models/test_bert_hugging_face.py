"""BERT against transformers' BertForPreTraining and MegatronBertForPreTraining: same weights, logits, gradients."""

from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional

from megapipe.config.bert import BertModelConfig
from megapipe.layers.context import BertContext
from tests.layers.bound import BoundLayer, bind_weights
from tests.models.hugging_face import ENCODERS, SIZES, UNDROPPED, Case, check_gradients, drawn, loss_of, opened
from tests.models.hugging_face import case_of as encoder_of

MODEL = BertModelConfig(vocabulary_size=97, num_layers=2, hidden_size=64, num_heads=4, max_positions=64)
BATCH, LENGTH, HIDDEN_TOKENS = 3, 40, 6
LENGTHS = (40, 23, 9)
FAMILIES = {"post": "Bert", "pre": "MegatronBert", "shared": "Albert"}
"""Where norms are, or that blocks share weights -> prefix of transformers' classes."""
ROUNDED = 1e-5
"""Tolerance where transformers computes rotary angles in fp32."""


def case_of(sentence_head: bool = True, activation: str = "gelu", form: str = "post") -> Case:
    """A BERT with the weights of `drawn`."""
    family, narrow = FAMILIES[form], {"embedding_size": 24} if form == "shared" else {}
    config = getattr(transformers, f"{family}Config")(
        **{**SIZES, **UNDROPPED, **narrow, "intermediate_size": 256, "pad_token_id": 0},
        hidden_act="gelu" if activation == "gelu" else "gelu_new",
        attn_implementation="eager",
    )
    kind = getattr(transformers, family + ("ForPreTraining" if sentence_head else "ForMaskedLM"))
    return Case(config.model_type, drawn(kind(config)))


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


def compare(theirs: torch.nn.Module, path: str) -> None:
    """Logits, losses and gradients in float64; outputs at padded positions are undefined."""
    model, weights = opened(theirs)
    assert isinstance(model, BertModelConfig)
    layers = bound(replace(model, attention=path), weights, torch.float64)
    tolerance = ROUNDED if model.positions == "rotary" else 1e-9
    context = make_context(model)
    logits, *pairs = their_logits(theirs, context)
    real = torch.arange(LENGTH) < context.lengths[:, None]
    with torch.no_grad():
        outputs = run(layers, replace(context, labels=None))
    for ours, expected, rows in zip(outputs, (logits, *pairs), (real, slice(None))[: 1 + len(pairs)], strict=True):
        assert 0.5 < expected[rows].std() < 50.0
        assert (ours - expected)[rows].abs().max() <= tolerance * expected[rows].abs().max()
    rows = logits.gather(1, context.positions.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))
    terms = [loss_of(rows, context)]
    for pair in pairs:
        sentences = functional.cross_entropy(pair, context.sentence_labels, reduction="none")
        terms.append((sentences * context.sentence_weights).sum())
    expected_losses = torch.stack(terms).squeeze()
    scale = torch.tensor([0.3, 2.0][: len(terms)], dtype=torch.float64).squeeze()
    (expected_losses * scale).sum().backward()
    (losses,) = run(layers, context)
    (losses * scale).sum().backward()
    assert torch.allclose(losses, expected_losses, rtol=tolerance, atol=0.0)
    check_gradients(theirs, layers, tolerance)


@pytest.mark.parametrize(
    ("path", "sentence_head", "activation"),
    [("sdpa", True, "gelu"), ("unfused", True, "gelu"), ("sdpa", False, "gelu_tanh")],
)
@pytest.mark.parametrize("form", FAMILIES)
def test_berts_agree_in_double(form: str, path: str, sentence_head: bool, activation: str) -> None:
    compare(case_of(sentence_head, activation, form).theirs.double(), path)


SLOWER = [
    pytest.param(name, "unfused", marks=() if name == "modernbert" else pytest.mark.exhaustive) for name in ENCODERS
]


@pytest.mark.parametrize(("name", "path"), [*((name, "sdpa") for name in ENCODERS), *SLOWER])
def test_encoders_of_masked_tokens_agree_in_double(name: str, path: str) -> None:
    compare(encoder_of(name).theirs.double(), path)


def test_evaluation_counts_correct_predictions() -> None:
    theirs = case_of().theirs
    layers = bound(*opened(theirs), torch.float32)
    context = make_context()
    with torch.no_grad():
        logits, pairs = their_logits(theirs, context)
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
