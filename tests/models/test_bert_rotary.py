"""A BERT with rotary positions against transformers' ESM-2: a pre-norm encoder with the same masked-token head."""

from dataclasses import replace

import torch
import transformers
from torch import Tensor
from torch.nn import functional

from tests.layers.bound import all_gradients
from tests.models.hugging_face import canonical
from tests.models.test_bert_hugging_face import LENGTH, MODEL, bound, make_context, run

ROTARY = replace(MODEL, norm_position="pre", positions="rotary", sentence_head=False)
RENAMED = {
    "esm.": "bert.",
    "attention.LayerNorm": "attention.ln",
    "encoder.emb_layer_norm_after": "encoder.ln",
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
    "lm_head.decoder": "cls.predictions.decoder",
    "lm_head.bias": "cls.predictions.bias",
}


def megatron_names(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """ESM's tensors as MegatronBERT would name them; it has no token types, and buffers that are no weights."""
    names = {}
    for name, tensor in theirs.items():
        if "inv_freq" in name or "contact_head" in name or "position" in name:
            continue
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        parts = name.split(".")
        if parts[1:3] == ["encoder", "layer"] and parts[4] == "LayerNorm":
            parts[4] = "ln"
        names[".".join(parts)] = tensor
    types = torch.zeros(2, MODEL.hidden_size, dtype=torch.float64)
    return {**names, "bert.embeddings.token_type_embeddings.weight": types}


def test_logits_and_gradients_agree_in_double() -> None:
    config = transformers.EsmConfig(
        vocab_size=MODEL.vocabulary_size,
        pad_token_id=0,
        mask_token_id=4,
        hidden_size=MODEL.hidden_size,
        num_hidden_layers=MODEL.num_layers,
        num_attention_heads=MODEL.num_heads,
        intermediate_size=MODEL.ffn_size,
        max_position_embeddings=MODEL.max_positions,
        position_embedding_type="rotary",
        token_dropout=False,
        layer_norm_eps=MODEL.norm_epsilon,
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
        attn_implementation="eager",
    )
    theirs = transformers.EsmForMaskedLM(config).eval().double()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in theirs.named_parameters():
        parameter.data.normal_(0.0, 0.2, generator=generator)
        if "norm" in name.lower() and name.endswith("weight"):
            parameter.data.add_(1.0)
    context = make_context()
    layers = bound(
        ROTARY, canonical(megatron_names(dict(theirs.state_dict())), ROTARY, "megatron-bert"), torch.float64
    )
    visible = torch.arange(LENGTH) < context.lengths[:, None]
    expected = theirs(input_ids=context.tokens, attention_mask=visible.long()).logits
    with torch.no_grad():
        (actual,) = run(layers, replace(context, labels=None))
    assert 0.5 < expected[visible].std() < 50.0
    # Their frequencies are kept in fp32, ours are computed in fp64.
    assert (actual - expected)[visible].abs().max() <= 1e-6 * expected[visible].abs().max()
    rows = expected.gather(1, context.positions.unsqueeze(-1).expand(-1, -1, expected.shape[-1]))
    losses = functional.cross_entropy(rows.flatten(0, 1), context.labels.flatten(), reduction="none")
    (losses * context.loss_mask.flatten()).sum().backward()
    (ours,) = run(layers, context)
    ours.backward()
    given = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    wanted, gradients = canonical(megatron_names(given), ROTARY, "megatron-bert"), all_gradients(layers)
    for name, gradient in wanted.items():
        if name != "embedding.token_type.weight":
            assert gradient.norm() > 0, name
            assert (gradients[name] - gradient).norm() <= 1e-6 * gradient.norm(), name
